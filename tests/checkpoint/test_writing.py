"""Any range of an image reaches its place in the file, and nothing around it is touched."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme import Engine
from deepnvme.checkpoint.file_io import write
from deepnvme.checkpoint.formats.file_image import FileImage
from deepnvme.memory.alignment import PAGE
from deepnvme.memory.pool import BufferPool, OutOfBuffers
from deepnvme.transfer.gather import CHUNK, DIRECT_FROM

from ..support.memory import Guarded, bytes_of, pattern


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
    def test_without_memory_to_copy_through_out_of_buffers_is_raised(self, drive: Path, engine: Engine) -> None:
        image, _ = image_of(100)
        with engine.open(drive / "file", "w+") as file, pytest.raises(OutOfBuffers):
            write(image, file, engine, BufferPool(0))

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


@pytest.mark.parametrize("begin", [0, PAGE, 5 * PAGE])
def test_a_part_touches_no_other_bytes(drive: Path, engine: Engine, begin: int) -> None:
    image, content = image_of(3, DIRECT_FROM + 5, 70_000)
    end = min(len(content), begin + DIRECT_FROM // PAGE * PAGE)
    before = pattern(len(content), 9)
    (drive / "file").write_bytes(before)
    with engine.open(drive / "file", "r+") as file:
        write(image, file, engine, BufferPool(16 << 20), [(begin, end)])
    assert (drive / "file").read_bytes() == before[:begin] + content[begin:end] + before[end:]


def test_more_chunks_than_memory_are_written(drive: Path, engine: Engine) -> None:
    image, content = image_of(*(DIRECT_FROM - 1,) * 30)
    pool = BufferPool(CHUNK)
    with engine.open(drive / "file", "w+") as file:
        write(image, file, engine, pool)
    assert (drive / "file").read_bytes() == content
    assert pool.in_use == 0


def test_what_is_copied_is_what_was_there(drive: Path, engine: Engine) -> None:
    tensor = torch.arange(1000)
    image = FileImage()
    image.add(tensor)
    with engine.open(drive / "file", "w+") as file:
        write(image, file, engine, BufferPool(CHUNK))
        tensor.zero_()
    assert (drive / "file").read_bytes() == bytes_of(torch.arange(1000))
