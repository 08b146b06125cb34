"""Carrying out a job: nothing is moved that cannot be, everything is moved that is counted, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from deepnvme.drives.aio_config import AioConfig
from deepnvme.tools.tune import folder, measuring, transfers
from deepnvme.tools.tune.folder import NotMeasurable
from deepnvme.tools.tune.job import EngineName, Job, Operation, Place
from deepnvme.tools.tune.measuring import measure

from ...support.disks import Disk
from ...support.files import cached

MIB = 1 << 20
ENGINES = get_args(EngineName)
OPERATIONS = get_args(Operation)
Mover = Callable[[Any, Path], None]


def job(folder: Path, operation: Operation, *, processes: int = 1, io_size: int = MIB, **more: Any) -> Job:
    setting = more.pop("setting", AioConfig(block_size=128 << 10, queue_depth=4))
    more = {"loops": 2, "warmup_loops": 1, **more}
    return Job(tuple(Place(folder, device) for device in range(processes)), operation, io_size, setting, **more)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Mover], Mover]], None]:
    """Puts something around the transfers."""

    def wrap(around: Callable[[Mover], Mover]) -> None:
        monkeypatch.setattr(transfers.TensorMover, "move", around(transfers.TensorMover.move))

    return wrap


@pytest.fixture
def no_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test fails where one is made, or a directory for its files."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("something was begun")

    monkeypatch.setattr(transfers, "TensorMover", refuse)
    monkeypatch.setattr(measuring, "workspace", refuse)


# -- before the first byte ---------------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.usefixtures("no_transfer")
@pytest.mark.parametrize("wanted", [
    {"io_size": 40 * MIB},
    {"io_size": 20 * MIB, "processes": 2},
    {"io_size": 10 * MIB, "different_files": True},
    {"io_size": 40 * MIB, "operation": "read"},
])  # fmt: skip
def test_a_folder_too_small_is_told_before_anything_is_written(small_disk: Disk, wanted: dict[str, Any]) -> None:
    free = small_disk.bytes_free()
    with pytest.raises(NotMeasurable, match=r"bytes free, .* are needed; make room, give a smaller --io_size"):
        measure(job(small_disk.path, wanted.pop("operation", "write"), **wanted))
    assert small_disk.bytes_free() == free


@pytest.mark.usefixtures("no_transfer")
@pytest.mark.parametrize(("available", "wanted"), [
    (5 * MIB - 1, {"io_size": 5 * MIB}),
    (10 * MIB - 1, {"io_size": 5 * MIB, "operation": "read", "engine": "torch_io"}),
    (10 * MIB - 1, {"io_size": 5 * MIB, "validate": True, "engine": "torch_fastio"}),
    (69 * MIB - 1, {"io_size": 5 * MIB, "engine": "torch_fastio"}),
    (400 * MIB, {"processes": 2}),
])  # fmt: skip
def test_tensors_larger_than_memory_are_told_before_they_are_made(
    drive: Path, monkeypatch: pytest.MonkeyPatch, available: int, wanted: dict[str, Any]
) -> None:
    monkeypatch.setattr(folder, "available_memory", lambda: available)
    with pytest.raises(NotMeasurable, match=f"bytes of memory are needed, {available} are available; give a smaller --io_size"):
        measure(job(drive, wanted.pop("operation", "write"), **wanted))


# -- what moves wrong bytes, or fails ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("engine", ENGINES)
def test_validation_notices_a_transfer_that_does_nothing(
    moved: Any, drive: Path, engine: EngineName, operation: Operation
) -> None:
    calls: list[Path] = []

    def lazy(real: Mover) -> Mover:
        def move(self: Any, path: Path) -> None:
            calls.append(path)
            if len(calls) != 3:  # the warm-up is the first
                real(self, path)
            elif engine.startswith("torch") and operation == "read":
                self._loaded = self.tensor.flip(0)  # a load that makes nothing cannot be

        return move

    moved(lazy)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        measure(job(drive, operation, engine=engine, validate=True))
    assert f"{operation}.0.0" in str(caught.value)
    assert len(calls) == 3
    assert list(drive.iterdir()) == []


def test_an_error_of_a_transfer_leaves_nothing(moved: Any, drive: Path) -> None:
    def broken(real: Mover) -> Mover:
        def move(self: Any, path: Path) -> None:
            path.unlink()
            real(self, path)

        return move

    moved(broken)
    with pytest.raises(FileNotFoundError) as caught:
        measure(job(drive, "read"))
    assert caught.value.filename.endswith("/read.0.0")
    assert list(drive.iterdir()) == []


# -- what is measured is what was asked --------------------------------------------------------------------------------


@pytest.mark.parametrize("io_size", [1, MIB + 1])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_moves_every_size_both_ways(engine: EngineName, operation: Operation, io_size: int, drive: Path) -> None:
    found = measure(job(drive, operation, engine=engine, io_size=io_size, validate=True))
    assert found.nbytes == 2 * io_size
    assert [sample.nbytes for sample in found.samples] == [io_size] * 2
    assert 0 < found.task_seconds <= found.seconds
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize("operation", OPERATIONS)
def test_bytes_by_path_add_up_to_what_was_moved(operation: Operation, drive: Path) -> None:
    found = measure(job(drive, operation, io_size=MIB + 1, loops=3, warmup_loops=2))
    paths = found.paths
    assert paths is not None
    assert paths.total() == found.nbytes == 3 * (MIB + 1)
    assert found.block_latency is not None
    assert found.block_latency.count == 3 * 9, "a megabyte in blocks of 128K, and one byte"
    if found.folders[0].direct:
        assert (paths["zero_copy"], paths["staged"] + paths["buffered"]) == (3 * MIB, 3)


@pytest.mark.root
@pytest.mark.filterwarnings("ignore:transfers of .* go through the page cache")  # said once for a device's number
def test_on_tmpfs_all_bytes_are_buffered(tmpfs: Disk) -> None:
    found = measure(job(tmpfs.path, "write", validate=True))
    assert found.paths is not None
    assert found.paths["buffered"] == found.nbytes == 2 * MIB
    assert not found.folders[0].direct
    assert any("tmpfs" in reason for reason in found.fallbacks)


@pytest.mark.parametrize(("include", "counted"), [(False, 3), (True, 5)])
def test_warm_up_counts_if_asked_to(include: bool, counted: int, drive: Path) -> None:
    found = measure(job(drive, "write", loops=3, warmup_loops=2, include_warmup=include))
    assert len(found.samples) == counted


@pytest.mark.parametrize("different", [True, False])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_loop_has_a_file_of_its_own_if_asked_to(moved: Any, operation: Operation, different: bool, drive: Path) -> None:
    seen: list[Path] = []

    def watched(real: Mover) -> Mover:
        def move(self: Any, path: Path) -> None:
            assert path.exists() == (operation == "read" or (not different and bool(seen)))
            seen.append(path)
            real(self, path)

        return move

    moved(watched)
    measure(job(drive, operation, different_files=different, validate=True))
    assert (len(seen), len(set(seen))) == (3, 3 if different else 1)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_loop_finds_its_file_in_the_page_cache(moved: Any, operation: Operation, drive: Path) -> None:
    warm: list[bool] = []

    def watched(real: Mover) -> Mover:
        def move(self: Any, path: Path) -> None:
            warm.append(path.exists() and cached(path))
            real(self, path)

        return move

    moved(watched)
    measure(job(drive, operation, validate=True))  # which reads it by the page cache
    assert warm == [False] * 3


@pytest.mark.parametrize(("operation", "fsync", "times"), [("write", True, 3), ("write", False, 0), ("read", True, 1)])
def test_fsync_is_for_writes_that_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, drive: Path, operation: Operation, fsync: bool, times: int
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(measuring, "sync", synced.append)
    measure(job(drive, operation, fsync=fsync))
    assert len(synced) == times, "what reads are to find is made durable once"


# -- several processes -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_process_has_a_folder_and_its_bytes_count(drive: Path) -> None:
    places = tuple(Place(drive / name, 0) for name in ("one", "other"))
    for place in places:
        place.folder.mkdir()
    found = measure(Job(places, "write", MIB, AioConfig(), loops=2, validate=True, fsync=True))
    assert [Path(facts.path).name for facts in found.folders] == ["one", "other"]
    assert found.nbytes == 2 * 2 * MIB
    assert found.paths is not None
    assert found.paths.total() == 4 * MIB
    assert found.cpu_seconds_per_gb > 0
    assert multiprocessing.active_children() == []
    assert [list(place.folder.iterdir()) for place in places] == [[], []]


@pytest.mark.slow
def test_a_process_killed_while_it_works_keeps_nobody(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killers: list[threading.Timer] = []

    def settle(directory: Path) -> None:
        doomed = multiprocessing.active_children()[0].pid or 0
        os.kill(doomed, signal.SIGSTOP)  # so that it does not end its part before
        killers.append(threading.Timer(0.5, os.kill, (doomed, signal.SIGKILL)))
        killers[0].start()

    monkeypatch.setattr(measuring, "settle", settle)
    with pytest.raises(ChildProcessError, match="one of 2 processes died; dmesg may tell why"):
        measure(job(drive, "write", processes=2))
    killers[0].join()
    assert multiprocessing.active_children() == []
    assert list(drive.iterdir()) == []


@pytest.mark.slow
def test_a_process_that_cannot_begin_says_why_and_all_end(drive: Path) -> None:
    with pytest.raises(NotMeasurable, match="aio_basic has one worker"):
        measure(job(drive, "write", processes=2, engine="aio_basic", setting=AioConfig(backend="threads")))
    assert multiprocessing.active_children() == []
    assert list(drive.iterdir()) == []
