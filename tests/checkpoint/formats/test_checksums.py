"""Checksums that are computed while the bytes of an archive pass by are those of its records, however it is cut."""

from __future__ import annotations

import ctypes
import io
import itertools
import zipfile
import zlib
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme.ops import load_async_io

from ...support.examples import examples


def archive(contents: list[bytes], crcs: list[int]) -> tuple[bytearray, array[int], array[int]]:
    """An archive of records, its places and the records' sizes."""
    sizes = array("Q", map(len, contents))
    names = [f"data/{index}" for index in range(len(contents))]
    text, headers, paddings, places = load_async_io().checkpoint.zip_layout(names, sizes, array("Q", crcs), 64)
    written, at = bytearray(), 0
    for content, header, padding in zip(contents, headers, paddings, strict=True):
        written += text[at : at + header] + bytes(padding) + content
        at += header
    return written + text[at:], places, sizes


@settings(deadline=None, max_examples=examples(200))
@given(
    st.lists(st.tuples(st.binary(max_size=150), st.booleans()), max_size=8), st.lists(st.integers(1, 200), max_size=30), st.data()
)
def test_an_archive_in_chunks_gets_the_checksums_of_its_records(
    records: list[tuple[bytes, bool]], lengths: list[int], data: st.DataObject
) -> None:
    contents, wanted = [content for content, _ in records], [wanted for _, wanted in records]
    written, places, sizes = archive(contents, [0] * len(contents))
    expected, _, _ = archive(contents, [zlib.crc32(each) if sum_it else 0 for each, sum_it in records])
    checksums = load_async_io().checkpoint.Checksums(places, sizes, bytes(wanted))
    memory = (ctypes.c_char * len(written)).from_buffer(written)
    ends = [*(end for end in itertools.accumulate(lengths) if end < len(written)), len(written)]
    for begin, end in itertools.pairwise([0, *ends]):
        checksums.advance(begin, ctypes.addressof(memory) + begin, end - begin)
    assert bytes(written) == bytes(expected)
    if all(wanted):
        with zipfile.ZipFile(io.BytesIO(written)) as opened:
            assert opened.testzip() is None


def test_data_alone_are_not_written_to() -> None:
    contents = [bytes(range(200)), b"abc"]
    written, places, sizes = archive(contents, [0, 0])
    checksums = load_async_io().checkpoint.Checksums(places, sizes, b"\1\1")
    begin, end = places[0], places[0] + sizes[0]
    read_only = ctypes.create_string_buffer(bytes(written[begin:end]), end - begin)
    memory = ctypes.addressof((ctypes.c_char * len(written)).from_buffer(written))
    checksums.advance(0, memory, begin)
    checksums.advance(begin, ctypes.addressof(read_only), end - begin)
    checksums.advance(end, memory + end, len(written) - end)
    assert read_only.raw == contents[0]
    assert bytes(written) == bytes(archive(contents, [*map(zlib.crc32, contents)])[0])


def test_bytes_out_of_order_are_refused_and_change_nothing() -> None:
    written, places, sizes = archive([b"abc"], [0])
    checksums = load_async_io().checkpoint.Checksums(places, sizes, b"\1")
    memory = ctypes.addressof((ctypes.c_char * len(written)).from_buffer(written))
    with pytest.raises(ValueError, match="the next bytes begin at 0, got some at 3"):
        checksums.advance(3, memory + 3, 1)
    checksums.advance(0, memory, len(written))
    assert bytes(written) == bytes(archive([b"abc"], [zlib.crc32(b"abc")])[0])


@pytest.mark.parametrize(
    ("places", "sizes", "wanted"), [([1, 2], [1], b"\1"), ([64, 69, 100], [1, 1], b"\1\1"), ([64, 69, 100], [1], b"")]
)
def test_columns_of_different_lengths_are_refused(places: list[int], sizes: list[int], wanted: bytes) -> None:
    with pytest.raises(ValueError, match="places must be three for each"):
        load_async_io().checkpoint.Checksums(array("Q", places), array("Q", sizes), wanted)
