"""Copies between addresses: nothing but what was asked for changes."""

from __future__ import annotations

import ctypes
import math
import random
import struct
import zlib
from array import array
from typing import Any

import pytest
import torch

from deepnvme.memory.tensor_bytes import copy_many, crc32_mismatches, memory_of, stack_ranges

from ..support.memory import pattern
from ..support.threads import others_run_during

KIB = 1 << 10
MIB = 1 << 20
GUARD = 37


def words(*numbers: int) -> array[int]:
    return array("Q", numbers)


class Ranges:
    """Pieces of memory of the sizes given, in any order, with guard bytes between them."""

    def __init__(self, sizes: list[int], seed: int) -> None:
        order = random.Random(seed).sample(range(len(sizes)), len(sizes))
        self._starts = [0] * len(sizes)
        end = GUARD
        for index in order:
            self._starts[index] = end
            end += sizes[index] + GUARD
        self._sizes = sizes
        self.memory = bytearray(b"\xa5" * end)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.addresses = words(*(base + start for start in self._starts))

    def place(self, index: int) -> slice:
        return slice(self._starts[index], self._starts[index] + self._sizes[index])


SIZES = {
    "none": [],
    "one byte": [1],
    "only empty ones": [0, 0, 0],
    "small": [random.Random(1).randrange(4 * KIB, 64 * KIB) for _ in range(40)],
    "empty ones between": [0, 0, 3 * MIB + 1, 0, 512 * KIB, 0, 1, 0],
    "pieces": [512 * KIB] * 9,
    "odd, for two threads": [random.Random(2).randrange(200 * KIB) for _ in range(200)],
    "one large": [17 * MIB + 5],
    "tiny": [index % 7 for index in range(20_000)],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_range_is_copied_and_nothing_else(sizes: list[int]) -> None:
    source, target = Ranges(sizes, 1), Ranges(sizes, 2)
    content = pattern(sum(sizes))
    expected = bytearray(target.memory)
    start = 0
    for index, size in enumerate(sizes):
        source.memory[source.place(index)] = expected[target.place(index)] = content[start : start + size]
        start += size
    before = bytes(source.memory)
    copy_many(target.addresses, source.addresses, words(*sizes))
    assert target.memory == expected
    assert source.memory == before


@pytest.mark.parametrize(
    ("mebibytes", "processors", "threads"),
    [
        *[(0, 8, 1), (15, 8, 1), (16, 8, 2), (16, 1, 1), (16, 0, 1), (16, 2, 2)],
        *[(40, 3, 3), (40, 4, 4), (40, 64, 5), (1024, 64, 8), (1024, 2, 2), (2**40, 64, 8)],
    ],
)
def test_as_many_threads_copy_as_are_worth_it_and_have_a_core(
    testing: Any, mebibytes: int, processors: int, threads: int
) -> None:
    assert testing.copy_threads(mebibytes * MIB, processors) == threads


@pytest.mark.parametrize(("to", "source"), [(0, 4096), (4096, 0)])
def test_an_address_of_0_is_refused(to: int, source: int) -> None:
    with pytest.raises(ValueError, match="range 1, of 5 bytes, has the address 0"):
        copy_many(words(4096, to), words(4096, source), words(0, 5))


@pytest.mark.parametrize("counts", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (0, 0, 1)])
def test_arrays_of_different_lengths_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be as many, got {}, {} and {}".format(*counts)):
        copy_many(*(words(*[0] * count) for count in counts))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (array("q", [0]), "format 'q'"),
        (array("I", [0]), "format 'I'"),
        (array("d", [0.0]), "format 'd'"),
        (bytearray(8), "format 'B'"),
        (memoryview(bytearray(8)).cast("Q", (1, 1)), "2 dimension"),
        ([0], "bytes-like object"),
        (None, "incompatible"),
    ],
    ids=["signed", "short", "float", "bytes", "two dimensions", "list", "None"],
)
@pytest.mark.parametrize("place", range(3))
def test_what_is_no_array_of_uint64_is_refused(wrong: Any, complaint: str, place: int) -> None:
    columns: list[Any] = [words(0), words(0), words(0)]
    columns[place] = wrong
    with pytest.raises(TypeError, match=complaint):
        copy_many(*columns)


def test_other_threads_run_meanwhile() -> None:
    size = 64 * MIB
    source, target = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
    assert others_run_during(lambda: copy_many(words(target.data_ptr()), words(source.data_ptr()), words(size)))


def test_a_view_of_a_tensors_memory_keeps_the_tensor() -> None:
    views = [memory_of(torch.full((MIB,), number, dtype=torch.uint8)) for number in range(20)]
    others = [torch.full((MIB,), 99, dtype=torch.uint8) for _ in range(20)]  # would get the memory of tensors that are freed
    assert [bytes(view[:2]) for view in views] == [bytes([number, number]) for number in range(20)]
    assert others[0][0] == 99


def test_ranges_with_another_checksum_are_found() -> None:
    memory = torch.frombuffer(bytearray(pattern(100_000)), dtype=torch.uint8)
    starts, lengths = [0, 7, 7, 50_001, 99_999, 100_000], [64, 0, 5000, 49_999, 1, 0]
    expected = [zlib.crc32(memory[start : start + length].numpy()) for start, length in zip(starts, lengths, strict=True)]
    ranges = [torch.tensor(numbers) for numbers in (starts, lengths, expected)]
    assert crc32_mismatches(memory, *ranges) == []
    memory[60_000] ^= 1
    memory[99_999] ^= 128
    assert crc32_mismatches(memory, *ranges) == [3, 4]
    assert crc32_mismatches(memory, *[numbers[:0] for numbers in ranges]) == []


@pytest.mark.parametrize("counts", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_checksums_of_other_ranges_are_refused(counts: tuple[int, int, int]) -> None:
    memory = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="must be as many, got {}, {} and {}".format(*counts)):
        crc32_mismatches(memory, *(torch.zeros(count, dtype=torch.int64) for count in counts))


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
@pytest.mark.parametrize("starts", [[], [4], [0, 24, 48], [12, 60, 108], [3, 100, 7], [80, 80, 84], [48, 24, 0]])
@pytest.mark.parametrize("contiguous", [True, False])
def test_tensors_in_memory_become_one(starts: list[int], shape: tuple[int, ...], contiguous: bool) -> None:
    memory = torch.frombuffer(bytearray(pattern(200)), dtype=torch.uint8)
    count = math.prod(shape)
    whole = memory.clone().numpy().tobytes()
    expected = [struct.unpack_from(f"{count}i", whole, start) for start in starts]
    empty = (lambda shape, dtype: torch.empty(shape, dtype=dtype)) if contiguous else None
    found = stack_ranges(memory, torch.tensor(starts, dtype=torch.int64), torch.int32, shape, empty)
    assert found.shape == (len(starts), *shape)
    assert [tuple(each.flatten().tolist()) for each in found] == expected
    assert found.is_contiguous() or not contiguous
    found.zero_()  # no two tensors share bytes
    assert all(not each.any() for each in found)
    if starts == [80, 80, 84] and count:
        assert memory.numpy().tobytes() == whole


def test_tensors_that_follow_one_another_are_not_copied() -> None:
    memory = torch.zeros(96, dtype=torch.uint8)
    found = stack_ranges(memory, torch.tensor([8, 20, 32]), torch.float32, (3,), lambda shape, dtype: torch.ones(shape))
    assert found.data_ptr() == memory.data_ptr() + 8
    apart = torch.tensor([8, 40, 72])
    assert stack_ranges(memory, apart, torch.float32, (3,), None).stride() == (8, 1)
    assert stack_ranges(memory, apart, torch.float32, (3,), lambda shape, dtype: torch.ones(shape)).stride() == (3, 1)
