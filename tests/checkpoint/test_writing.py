"""Any range of an image reaches its place in the file, and nothing around it is touched."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deepnvme import Engine
from deepnvme.checkpoint.file_io import write
from deepnvme.checkpoint.formats.file_image import FileImage
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.pool import BufferPool
from deepnvme.memory.tensor_bytes import memory_of
from deepnvme.transfer.gather import CHUNK, DIRECT_FROM

from ..support.memory import Guarded, pattern


def image_of(*sizes: int, misalignment: int = 0) -> tuple[FileImage, bytes]:
    image, content = FileImage(), b""
    for index, size in enumerate(sizes):
        part = pattern(size, index)
        image.add(Guarded(part, misalignment).tensor)
        content += part
    return image, content


SIZES = [
    (1,), (PAGE,), (PAGE + 1, 3), (DIRECT_FROM,), (100, DIRECT_FROM + 5, 7), (DIRECT_FROM - 1,) * 3, (5, CHUNK + PAGE, 9),
    (DIRECT_FROM + 100,) * 3,
]  # fmt: skip


class TestFailures:
    @pytest.mark.parametrize("sizes", [(100,), (DIRECT_FROM * 2, 100)])
    def test_an_error_of_the_drive_is_raised(self, drive: Path, faulty: Callable[..., Any], sizes: tuple[int, ...]) -> None:
        image, _ = image_of(*sizes)
        pool, failing = BufferPool(16 << 20), faulty("threads", error_every=1)
        with failing.open(str(drive / "file"), "w+") as file, pytest.raises(OSError, match="write") as failed:
            write(image, file, failing, pool)
        assert failed.value.errno == errno.EIO
        del failed  # and what its frames hold
        assert pool.in_use == 0


@pytest.mark.parametrize("misalignment", [0, 64, 1])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sources_of_any_sizes_are_written(drive: Path, engine: Engine, sizes: tuple[int, ...], misalignment: int) -> None:
    image, content = image_of(*sizes, misalignment=misalignment)
    with engine.open(drive / "file", "w+") as file:
        write(image, file, engine, BufferPool(16 << 20))
    assert (drive / "file").read_bytes() == content


# -- parts of a file ---------------------------------------------------------------------------------------------------

PART_SIZES = (1, 7, 4096, 5000, 70_000, DIRECT_FROM, DIRECT_FROM + 4097, CHUNK + 1)
ABSENT = 0xEE


class OnDevice(torch.Tensor):
    """Passes for a tensor of a device, whose address means nothing here."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return 0


def made(chance: random.Random, on_a_device: float = 0.0) -> tuple[FileImage, bytes]:
    """An image, and what it is of."""
    image, parts = FileImage(), []
    for _ in range(12):
        tensor = torch.randint(0, 255, (chance.choice(PART_SIZES),), dtype=torch.uint8)
        image.add(tensor.as_subclass(OnDevice) if chance.random() < on_a_device else tensor)
        parts.append(tensor)
    whole = torch.cat(parts)
    return image, bytes(memory_of(whole))


@pytest.mark.parametrize("seed", range(3))
def test_only_what_is_asked_for_is_written(seed: int, drive: Path, engine: Engine) -> None:
    chance = random.Random(seed)
    image, whole = made(chance)
    borders = sorted({0, image.nbytes, *(chance.randrange(image.nbytes) for _ in range(300))})
    parts = [part for part in pairwise(borders) if chance.random() < 0.5]
    expected = bytearray([ABSENT]) * image.nbytes
    (drive / "file").write_bytes(expected)
    for begin, end in parts:
        expected[begin:end] = whole[begin:end]
    told: list[tuple[int, int]] = []
    pool = BufferPool(32 << 20)
    with engine.open(drive / "file", "r+") as file:
        write(image, file, engine, pool, parts, lambda done, total: told.append((done, total)))
    assert (drive / "file").read_bytes() == expected
    total = sum(end - begin for begin, end in parts)
    assert told[-1] == (total, total)
    assert pool.in_use == 0


def test_parts_of_a_devices_tensors_are_copied_from_there() -> None:
    chance = random.Random(1)
    image, whole = made(chance, on_a_device=0.5)
    with mock.patch("torch.cuda.current_stream") as stream:
        for _ in range(50):
            begin = chance.randrange(image.nbytes)
            end = chance.randrange(begin + 1, image.nbytes + 1)
            into = torch.full((end - begin,), ABSENT, dtype=torch.uint8)
            image.copy(begin, end, into)
            assert bytes(memory_of(into)) == whole[begin:end]
    assert stream().synchronize.called
