"""Archives that other programs read, whatever their records' sizes."""

from __future__ import annotations

import contextlib
import io
import zipfile
import zlib
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme.checkpoint.formats.zip_directory import LOCAL_HEADER, BadDirectory, data_of, entries
from deepnvme.ops import load_async_io

from ...support.examples import examples

GIB = 1 << 30
records = st.lists(st.tuples(st.text("abcé/.", min_size=1, max_size=30), st.binary(max_size=200)), max_size=8,
                   unique_by=lambda record: record[0])  # fmt: skip


def laid_out(names: list[str], sizes: list[int], crcs: list[int], alignment: int) -> tuple[bytes, array[int], array[int]]:
    return load_async_io().checkpoint.zip_layout(names, array("Q", sizes), array("Q", crcs), alignment)[:3]


def archive(contents: list[tuple[str, bytes]], alignment: int = 64) -> bytes:
    names, data = [name for name, _ in contents], [data for _, data in contents]
    text, headers, paddings = laid_out(names, [*map(len, data)], [*map(zlib.crc32, data)], alignment)
    written, at = io.BytesIO(), 0
    for content, header, padding in zip(data, headers, paddings, strict=True):
        written.write(text[at : at + header] + bytes(padding) + content)
        at += header
    written.write(text[at:])
    return written.getvalue()


@settings(deadline=None, max_examples=examples(50))
@given(records, st.sampled_from([1, 64, 4096]))
def test_the_standard_librarys_reader_finds_every_record(contents: list[tuple[str, bytes]], alignment: int) -> None:
    with zipfile.ZipFile(io.BytesIO(archive(contents, alignment))) as opened:
        assert opened.testzip() is None
        assert [(info.filename, opened.read(info)) for info in opened.infolist()] == contents


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.integers(0, 6 * GIB), max_size=6), st.sampled_from([64, 4096]))
def test_data_begin_at_multiples_of_the_alignment_and_do_not_overlap(sizes: list[int], alignment: int) -> None:
    _, headers, paddings = laid_out([f"data/{index}" for index in range(len(sizes))], sizes, [0] * len(sizes), alignment)
    end = 0
    for size, header, padding in zip(sizes, headers, paddings, strict=True):
        assert (end + header + padding) % alignment == 0
        assert padding < alignment
        end += header + padding + size


@pytest.mark.parametrize("alignment", [0, -1, 1 << 16])
def test_an_alignment_that_no_header_can_be_padded_to_is_refused(alignment: int) -> None:
    with pytest.raises(ValueError, match=f"alignment must be in .* got {alignment}"):
        laid_out(["a"], [1], [0], alignment)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="must be as many, got 2, 1 and 1"):
        laid_out(["a", "b"], [1], [0], 64)


class TestDirectory:
    """As this package reads it."""

    @settings(deadline=None, max_examples=examples(50))
    @given(records)
    def test_it_has_what_was_written(self, tmp_path_factory: pytest.TempPathFactory, contents: list[tuple[str, bytes]]) -> None:
        path = tmp_path_factory.mktemp("zip") / "file"
        data = archive(contents)
        path.write_bytes(data)
        with path.open("rb") as file:
            found = entries(file)
        assert [(entry.name, entry.nbytes, entry.crc32) for entry in found] == [
            (name, len(content), zlib.crc32(content)) for name, content in contents
        ]
        for entry, (_, content) in zip(found, contents, strict=True):
            offset = data_of(data[entry.header :][: LOCAL_HEADER.size], entry.header)
            assert data[offset : offset + entry.nbytes] == content

    @pytest.mark.parametrize("damage", ["cut", "entry", "beyond", "no archive", "encrypted", "method", "smaller", "name"])
    def test_a_damaged_directory_is_refused(self, tmp_path: Path, damage: str) -> None:
        data = archive([("a/data/0", b"x" * 100), ("a/data/1", b"y" * 100)])
        at = data.index(b"PK\1\2")
        damaged = {
            "cut": data[:-30],
            "entry": data[:at] + b"QQ" + data[at + 2 :],
            "beyond": data[: at + 20] + b"\xff\xff\xff\x7f" + data[at + 24 :],
            "no archive": b"PK\3\4" + bytes(5000),
            "encrypted": data[: at + 8] + b"\1" + data[at + 9 :],
            "method": data[: at + 10] + b"\1" + data[at + 11 :],
            "smaller": data[: at + 24] + b"\x63" + data[at + 25 :],
            "name": data[: at + 50] + b"\xff" + data[at + 51 :],
        }[damage]
        path = tmp_path / "file"
        path.write_bytes(damaged)
        with path.open("rb") as file, pytest.raises(BadDirectory):
            entries(file)

    def test_a_large_archive_and_one_with_a_comment_are_read(self, tmp_path: Path) -> None:
        sizes, path = [5 * GIB, 3, 4 * GIB - 1, 5], tmp_path / "file"
        text, headers, paddings = laid_out([f"data/{index}" for index in range(4)], sizes, [7] * 4, 64)
        with path.open("wb") as file:
            file.seek(sum(sizes) + sum(headers) + sum(paddings))
            file.write(text[sum(headers) :])
        with path.open("rb") as file:
            assert [entry.nbytes for entry in entries(file)] == sizes
        with zipfile.ZipFile(path, "w") as made:
            made.writestr("a/data/0", b"0" * 1000)
            made.comment = b"PK\5\5 " * 1000
        with path.open("rb") as file:
            assert [entry.name for entry in entries(file)] == ["a/data/0"]

    @pytest.mark.parametrize("comment", [b"", b"of anybody"])
    def test_an_archive_with_another_directory_for_torchs_reader_is_refused(self, tmp_path: Path, comment: bytes) -> None:
        """It would unpickle other bytes than were checked."""
        other, path = archive([("a/data.pkl", b"x" * 1000)]), tmp_path / "file"
        at, path_end = other.index(b"PK\1\2"), archive([("a/data.pkl", b"y" * 100)])
        begin = path_end.index(b"PK\1\2")
        size = len(path_end) - 22 - begin
        end = path_end[-22:-6] + at.to_bytes(4, "little") + len(comment).to_bytes(2, "little")
        path.write_bytes(other[: at + size] + path_end[:-22] + end + comment)
        with path.open("rb") as file, pytest.raises(BadDirectory, match="not where its end says"):
            entries(file)

    @settings(deadline=None, max_examples=examples(50))
    @given(st.data())
    def test_damage_is_never_another_error(self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
        content = bytearray(archive([("a/data/0", b"x" * 10), ("a/data/1", b"y" * 10)]))
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(200, len(content) - 1))] = data.draw(st.integers(0, 255))
        path = tmp_path_factory.mktemp("zip") / "file"
        path.write_bytes(content)
        with path.open("rb") as file, contextlib.suppress(BadDirectory):
            assert len(entries(file)) <= 2
