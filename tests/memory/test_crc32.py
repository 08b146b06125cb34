"""CRC-32 in native code: zlib's, by each of its methods, in parts, by threads, and of parts together."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme.memory.tensor_bytes import checksums, crc32, memory_of
from deepnvme.ops import load_async_io

from ..support.examples import examples

RANDOM = torch.randint(256, (40 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LENGTHS = (
    *range(70), 127, 128, 129, 255, 256, 257, 319, 320, 511, 512, 513, 1000, 4095, 12_288, 12_289, 40_000, 1_000_003
)  # fmt: skip


@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize("nbytes", LENGTHS)
def test_it_is_zlibs_for_any_length(nbytes: int, tables: bool) -> None:
    for skipped in (0, 1, 3, 15):
        data = memory_of(RANDOM, skipped, nbytes)
        assert load_async_io().memory.crc32(data, 0, tables) == zlib.crc32(data)
        assert load_async_io().memory.crc32(data, 0xDEADBEEF, tables) == zlib.crc32(data, 0xDEADBEEF)


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(st.binary(max_size=300), max_size=6), st.booleans())
def test_it_goes_on_where_it_stopped(parts: list[bytes], tables: bool) -> None:
    crc = 0
    for part in parts:
        crc = load_async_io().memory.crc32(part, crc, tables)
    assert crc == zlib.crc32(b"".join(parts))


@pytest.mark.parametrize("nbytes", [(16 << 20) - 1, 16 << 20, (16 << 20) + 5, 40 << 20])
def test_threads_compute_the_same(nbytes: int) -> None:
    data = memory_of(RANDOM, 0, nbytes)
    assert crc32(data, 7) == zlib.crc32(data, 7)


@settings(deadline=None, max_examples=examples(100))
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_those_of_parts_make_that_of_the_whole(first: bytes, second: bytes) -> None:
    combined = load_async_io().memory.crc32_combined
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_running_checksums_of_a_tensors_parts() -> None:
    assert checksums(RANDOM[:1000], [300, 0, 700]) == tuple(zlib.crc32(memory_of(RANDOM, 0, end)) for end in (300, 300, 1000))


@pytest.mark.parametrize("data", [torch.zeros(2, 2, dtype=torch.uint8).numpy(), torch.zeros(4).numpy(), memoryview(b"abcd")[::2]])
def test_what_is_no_plain_bytes_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="contiguous bytes of one dimension"):
        crc32(data)  # type: ignore[arg-type]
