"""NVMeWriter: torch's own reader loads what it wrote, and an earlier checkpoint stays until the new one is whole."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

import deepnvme
from deepnvme.checkpoint import NVMeWriter, publication

from ...support.disks import MIB, Disk
from ...support.distributed_states import assert_equal, blank, state
from ...support.torch_versions import ALONE, needs_torch

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def save(saved: dict[str, Any], writer: FileSystemWriter) -> None:
    dcp.save(saved, storage_writer=writer, **ALONE)


def loaded(directory: Path) -> dict[str, Any]:
    """By torch alone."""
    found = blank()
    dcp.load(found, storage_reader=FileSystemReader(directory), **ALONE)
    return found


def cause(error: CheckpointException) -> BaseException:
    (failure,) = error.failures.values()
    return failure[0]


# -- errors ------------------------------------------------------------------------------------------------------------


class StopsBefore(NVMeWriter):
    """Fails, as if killed there."""

    def finish(self, metadata: Metadata, results: Any) -> None:
        raise KeyboardInterrupt


def fails_to_name_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def refused(source: Path, target: Path) -> None:
        if Path(target).name == ".metadata":
            raise OSError(errno.EIO, "broken drive", str(target))
        replace(source, target)

    monkeypatch.setattr(publication.os, "replace", refused)


@pytest.mark.parametrize("options", [{}, {"thread_count": 2}, {"single_file_per_rank": False}])
@pytest.mark.parametrize("where", ["before the metadata", "at the metadata's name"])
def test_an_earlier_checkpoint_is_whole_until_the_new_one_is(
    drive: Path, options: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = drive / "checkpoint"
    save(state(1), NVMeWriter(directory, **options))
    writer: type[NVMeWriter] = NVMeWriter
    with monkeypatch.context() as patched:
        if where == "at the metadata's name":
            fails_to_name_metadata(patched)
        else:
            writer = StopsBefore
        with pytest.raises(CheckpointException):
            save(state(2), writer(directory, **options))
    assert_equal(loaded(directory), state(1))
    save(state(3), NVMeWriter(directory, **options))
    assert_equal(loaded(directory), state(3))
    files = {info.relative_path for info in FileSystemReader(directory).read_metadata().storage_data.values()}
    assert {path.name for path in directory.iterdir()} == files | {".metadata"}


def test_files_that_an_interrupt_left_go_with_the_next_save(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(state(1), NVMeWriter(drive))

    def interrupted(self: Path, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", interrupted)
        for seed in (2, 3):
            with pytest.raises(CheckpointException):
                save(state(seed), NVMeWriter(drive))
            assert_equal(loaded(drive), state(seed))
    save(state(4), NVMeWriter(drive))
    assert_equal(loaded(drive), state(4))
    assert len(list(drive.iterdir())) == 2


def test_files_of_others_stay(drive: Path) -> None:
    names = ["__0_9.distcp", "mine.12345678.distcp", "__0_0.12345678.distcp.old"]
    for name in names:
        (drive / name).write_bytes(b"mine")
    for seed in (1, 2):
        save(state(seed), NVMeWriter(drive))
    assert [(drive / name).read_bytes() for name in names] == [b"mine"] * 3


def test_damaged_metadata_are_replaced(drive: Path) -> None:
    (drive / ".metadata").write_bytes(b"\x80garbage")
    save(state(1), NVMeWriter(drive))
    assert_equal(loaded(drive), state(1))


@pytest.mark.root
@pytest.mark.parametrize("options", [{}, {"thread_count": 2}])
def test_a_full_disk_is_an_error_that_names_the_file_and_nothing_is_left(small_disk: Disk, options: dict[str, Any]) -> None:
    directory = small_disk / "checkpoint"
    large = {name: torch.zeros(small_disk.bytes_free() + MIB, dtype=torch.uint8) for name in "ab"}
    with pytest.raises(CheckpointException) as caught:
        save(large, NVMeWriter(directory, **options))
    error = cause(caught.value)
    assert isinstance(error, OSError)
    assert (error.errno, error.filename) == (errno.ENOSPC, str(directory / "__0_0.distcp"))
    assert list(directory.iterdir()) == []


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 1),
        ({"thread_count": 2}, 2),
        ({"thread_count": 100}, 40),
        ({"single_file_per_rank": False}, 44),
        ({"sync_files": False}, 1),
    ],
)
def test_torch_loads_it(drive: Path, options: dict[str, Any], count: int) -> None:
    save(state(1), deepnvme.NVMeWriter(drive, **options))
    assert_equal(loaded(drive), state(1))
    assert sorted(path.name for path in drive.iterdir()) == sorted([".metadata", *(f"__0_{n}.distcp" for n in range(count))])


@needs_torch(2, 7, "records of this kind")
def test_metadata_are_torchs(drive: Path) -> None:
    found = []
    for name, writer in (("ours", NVMeWriter), ("theirs", FileSystemWriter)):
        save(state(1), writer(drive / name))
        found.append(pickle.loads((drive / name / ".metadata").read_bytes()))
    ours, theirs = found
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert getattr(ours, "version", None) == getattr(theirs, "version", None)
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    lengths = [{index: info.length for index, info in each.storage_data.items()} for each in found]
    assert lengths[0] == lengths[1]
    assert ours.storage_meta.checkpoint_id == drive / "ours"
    assert ours.storage_meta.save_id


def test_aligned_memory_is_written_from_where_it_is(drive: Path) -> None:
    from deepnvme.checkpoint.file_io import shared_engine

    engine = shared_engine(drive)
    saved = {f"{n}": engine.empty_pinned(2 << 20, torch.uint8) for n in range(4)}
    before = engine.stats()
    save(saved, NVMeWriter(drive))
    after = engine.stats()
    if after.bytes_direct == before.bytes_direct:
        pytest.skip("needs direct I/O")
    assert after.bytes_staged == before.bytes_staged
    assert after.bytes_zero_copy - before.bytes_zero_copy >= 8 * MIB


@needs_torch(2, 7, "async_save in one process")
def test_saving_behind_training_writes_what_was_there_at_the_call(drive: Path) -> None:
    saved = state(1)
    future = dcp.async_save(saved, storage_writer=NVMeWriter(drive), **ALONE)
    for tensor in saved["small"].values():
        tensor.fill_(-1)
    saved["large"].zero_()
    future.result()
    assert_equal(loaded(drive), state(1))


def test_a_writer_goes_to_another_process_and_another_directory(drive: Path) -> None:
    writer = pickle.loads(pickle.dumps(NVMeWriter(drive / "one", thread_count=2)))
    save(state(1), writer)
    dcp.save(state(2), storage_writer=writer, checkpoint_id=drive / "two", **ALONE)
    assert_equal(loaded(drive / "one"), state(1))
    assert_equal(loaded(drive / "two"), state(2))


@pytest.mark.gpu
def test_tensors_of_a_device_are_written_and_read(drive: Path) -> None:
    saved = {"large": torch.randn(700, 701, device="cuda"), "small": torch.randn(9, device="cuda"), "cpu": torch.randn(9)}
    save(saved, NVMeWriter(drive))
    for reader in (FileSystemReader, deepnvme.NVMeReader):
        found = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
        dcp.load(found, storage_reader=reader(drive), **ALONE)
        assert_equal(found, saved)
