"""Files opened once: their modes, and what happens when the file changes under them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import deepnvme

from ..support.memory import page_aligned, pattern, zeros


@pytest.fixture
def file(drive: Path) -> Path:
    """Of 10 000 bytes."""
    path = drive / "file"
    path.write_bytes(b"x" * 10_000)
    return path


@pytest.mark.parametrize("mode", ["", "a", "rb", "wb", "r+w", "R", "rw+"])
def test_an_unknown_mode_is_answered_with_the_known_ones(engine: deepnvme.Engine, file: Path, mode: Any) -> None:
    with pytest.raises(ValueError, match=r"mode must be one of r, r\+, rw, w, w\+, x, x\+, got"):
        engine.open(file, mode)


def test_a_file_opened_for_reading_is_not_written(engine: deepnvme.Engine, file: Path) -> None:
    with engine.open(file, "r") as opened, pytest.raises(ValueError, match="was not opened for writing"):
        engine.write(page_aligned(b"y"), opened)


@pytest.mark.parametrize("mode", ["x", "x+"])
def test_an_exclusive_file_must_be_new(engine: deepnvme.Engine, file: Path, mode: Any) -> None:
    with pytest.raises(FileExistsError) as caught:
        engine.open(file, mode)
    assert caught.value.filename == str(file)
    assert file.stat().st_size == 10_000


@pytest.mark.parametrize(("mode", "size"), [("w", 0), ("w+", 0), ("r+", 10_000), ("rw", 10_000), ("r", 10_000)])
def test_only_w_truncates(engine: deepnvme.Engine, file: Path, mode: Any, size: int) -> None:
    with engine.open(file, mode) as opened:
        assert opened.size() == size


@pytest.mark.parametrize("mode", ["w", "w+", "x", "x+", "rw"])
def test_a_missing_file_is_created(engine: deepnvme.Engine, drive: Path, mode: Any) -> None:
    with engine.open(drive / "new", mode) as opened:
        engine.write(page_aligned(b"y" * 5000), opened, 7).result()
        assert opened.size() == 5007
    assert (drive / "new").read_bytes() == bytes(7) + b"y" * 5000


def test_a_new_file_has_the_permissions_that_the_umask_leaves(engine: deepnvme.Engine, drive: Path) -> None:
    before = os.umask(0o027)
    try:
        engine.write(page_aligned(b"y"), drive / "new").result()
    finally:
        os.umask(before)
    assert (drive / "new").stat().st_mode & 0o777 == 0o640


def test_closing_a_file_lets_what_is_under_way_end(testing: Any, faulty: Any, gate: Any, drive: Path) -> None:
    content = pattern(50_000)
    engine = faulty("threads", gate=gate)
    opened = engine.open(drive / "new", "w")
    future = engine.write(page_aligned(content), opened)
    opened.close()
    gate.release()
    future.result()
    assert (drive / "new").read_bytes() == content


def test_a_file_truncated_since_it_was_opened_is_an_error_of_that_read(engine: deepnvme.Engine, file: Path, backend: Any) -> None:
    with deepnvme.Engine(backend=backend) as engine, engine.open(file) as opened:
        for size in (5000, 0):
            os.truncate(file, size)
            with pytest.raises(OSError, match="which the file no longer has") as caught:
                engine.read(zeros(10_000).tensor, opened).result()
            assert (caught.value.errno, caught.value.filename) == (errno.ENODATA, str(file))
            assert engine.read(zeros(size).tensor, opened).result() == size


def test_a_file_replaced_while_requests_are_under_way_gets_them_all(faulty: Any, gate: Any, backend: Any, drive: Path) -> None:
    (drive / "file").write_bytes(bytes(40_000))
    (drive / "other").write_bytes(b"other")
    engine = faulty(backend, queue_depth=1, gate=gate)
    with (drive / "file").open("rb") as original:
        futures = [engine.write(page_aligned(b"y" * 9999), drive / "file", at * 9999) for at in range(4)]
        os.replace(drive / "other", drive / "file")
        gate.release()
        for future in futures:
            future.result()
        assert original.read() == b"y" * 39_996 + bytes(4)
    assert (drive / "file").read_bytes() == b"other"


@pytest.mark.root
def test_a_block_device_is_read_and_written(drive: Path, engine: deepnvme.Engine) -> None:
    from ..support.disks import MIB, loop_device

    content = pattern(100_001)
    target = zeros(len(content))
    with loop_device(drive, 4 * MIB) as device:
        engine.write(page_aligned(content), device, 12_345).result()
        engine.read(target.tensor, device, 12_345).result()
    assert target.content() == content


@pytest.mark.root
def test_a_block_device_ends_where_it_ends(drive: Path, engine: deepnvme.Engine) -> None:
    from ..support.disks import MIB, loop_device

    with loop_device(drive, 4 * MIB) as device:
        with pytest.raises(OSError, match="past the end of the device") as caught:
            engine.write(page_aligned(bytes(8192)), device, 4 * MIB - 4096)
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(ValueError, match="past the end"):
            engine.read(zeros(8192).tensor, device, 4 * MIB - 4096)
