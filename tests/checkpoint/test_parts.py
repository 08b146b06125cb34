"""Parts of a file's image: those that are asked for are written or copied, wherever their ends lie, and nothing else is."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch

from deepnvme import Engine
from deepnvme.checkpoint.file_io import write
from deepnvme.checkpoint.formats.file_image import FileImage
from deepnvme.memory.pool import BufferPool
from deepnvme.memory.tensor_bytes import memory_of
from deepnvme.transfer.gather import CHUNK, DIRECT_FROM

SIZES = (1, 7, 4096, 5000, 70_000, DIRECT_FROM, DIRECT_FROM + 4097, CHUNK + 1)
ABSENT = 0xEE


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(32 << 20)


class OnDevice(torch.Tensor):
    """Passes for a tensor of a device, whose address means nothing here."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return 0


def made(chance: random.Random, on_a_device: float = 0.0) -> tuple[FileImage, bytes]:
    """An image, and what it is of."""
    image, parts = FileImage(), []
    for _ in range(12):
        tensor = torch.randint(0, 255, (chance.choice(SIZES),), dtype=torch.uint8)
        image.add(tensor.as_subclass(OnDevice) if chance.random() < on_a_device else tensor)
        parts.append(tensor)
    whole = torch.cat(parts)
    return image, bytes(memory_of(whole))


@pytest.mark.parametrize("seed", range(3))
def test_only_what_is_asked_for_is_written(seed: int, drive: Path, engine: Engine, pool: BufferPool) -> None:
    chance = random.Random(seed)
    image, whole = made(chance)
    borders = sorted({0, image.nbytes, *(chance.randrange(image.nbytes) for _ in range(300))})
    parts = [part for part in pairwise(borders) if chance.random() < 0.5]
    expected = bytearray([ABSENT]) * image.nbytes
    (drive / "file").write_bytes(expected)
    for begin, end in parts:
        expected[begin:end] = whole[begin:end]
    told: list[tuple[int, int]] = []
    with engine.open(drive / "file", "r+") as file:
        write(image, file, engine, pool, parts, lambda done, total: told.append((done, total)))
    assert (drive / "file").read_bytes() == expected
    total = sum(end - begin for begin, end in parts)
    assert told[-1] == (total, total)
    assert pool.in_use == 0


def test_small_parts_share_the_memory_that_is_leased(drive: Path, engine: Engine) -> None:
    image, whole = made(random.Random(0))
    parts = [(at, at + 100) for at in range(0, image.nbytes - 100, 33_000)]
    pool = BufferPool(CHUNK)
    with engine.open(drive / "file", "w+") as file, mock.patch.object(pool, "lease", wraps=pool.lease) as lease:
        write(image, file, engine, pool, parts)
    assert lease.call_count <= 1 + len(parts) * 8192 // CHUNK
    found = (drive / "file").read_bytes()
    assert all(found[begin:end] == whole[begin:end] for begin, end in parts)


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
