"""What a build takes, and what it leaves when it does not come to its end."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch

from deepnvme.checkpoint.weight_locations import OpenFiles, Weights
from deepnvme.engine import Engine
from deepnvme.model.structure import ExtentPlan
from deepnvme.streaming import Location, WeightInfo, WeightStore
from deepnvme.streaming.weights.build_pipeline import ExtentBuilder, write_extents
from deepnvme.swap import TensorStore

from ...support.files import open_files
from ...support.shards import save_sharded

MIB = 1 << 20


def state(layers: int = 4, nbytes: int = 4096) -> dict[str, torch.Tensor]:
    return {f"layers.{index}.weight": torch.full((nbytes // 4,), float(index)) for index in range(layers)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shards", "pt", "converted"])
def test_it_takes_the_memory_of_a_few_extents(drive, interpreters, kind):
    """96 MiB in 24 extents, of which four are in memory at a time, and 8 MiB of staging."""
    if kind == "pt":
        torch.save(state(24, 4 * MIB), drive / "model.pt")
    else:
        save_sharded(state(24, 4 * MIB), drive, most=30_000_000)
    dtype = "torch.bfloat16" if kind == "converted" else "None"
    interpreters.run(f"""
        import re
        import deepnvme
        from deepnvme.streaming import WeightStore
        def memory(name):
            return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
        deepnvme.engine_for([{str(drive)!r}]).close()  # the code that makes engines takes a MiB, once
        before = memory("VmRSS")
        open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew
        WeightStore.build({str(drive)!r}, {str(drive / "store")!r}, dtype={dtype}).close()
        grown = memory("VmHWM") - before
        assert 8 << 10 < grown < 36 << 10, grown
    """).check()


@pytest.mark.parametrize("after", [1, 3])
def test_a_killed_build_leaves_no_store_and_the_next_one_works(drive, interpreters, after):
    torch.save(state(), drive / "model.pt")
    place = drive / "store"
    program = f"""
        import os, signal
        from deepnvme.streaming import WeightStore
        told = []
        def progress(done, total):
            told.append(done)
            if len(told) == {after}:
                os.kill(os.getpid(), signal.SIGKILL)
        WeightStore.build({str(drive / "model.pt")!r}, {str(place)!r}, progress=progress)
    """
    assert interpreters.run(program).returncode == -signal.SIGKILL
    assert place.exists()
    with pytest.raises(FileNotFoundError, match="ever committed"):
        WeightStore.open(place)
    with WeightStore.build(drive / "model.pt", place) as store:
        store.verify()


def test_a_full_disk_is_told_before_anything_is_written(small_disk):
    written = []
    with pytest.raises(OSError, match=r"bytes wanted, \d+ free") as refused:
        WeightStore.build(state(10, 4 * MIB), small_disk / "store", progress=lambda *args: written.append(args))
    assert (refused.value.errno, refused.value.filename) == (errno.ENOSPC, str(small_disk / "store"))
    assert written == []
    assert not (small_disk / "store").exists()


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ZeroDivisionError])
def test_what_interrupts_it_leaves_nothing(drive, raised):
    def progress(done: int, total: int) -> None:
        raise raised

    with pytest.raises(raised):
        WeightStore.build(state(), drive / "store", progress=progress)
    assert list(drive.iterdir()) == []


def test_a_drive_that_fails_is_told_and_leaves_nothing(drive, engine, faulty):
    source = Weights(state(), OpenFiles(engine))
    builders = [ExtentBuilder(ExtentPlan(name, (name,)), source, {name: name}, None) for name in state()]
    failing = faulty("threads", error_every=3, error_limit=1)
    with (
        pytest.raises(OSError, match="Input/output error") as refused,
        TensorStore(drive / "store", persist=True, engine=failing) as store,
    ):
        write_extents(builders, store, lambda nbytes: None)
    assert refused.value.errno == errno.EIO
    assert list(drive.iterdir()) == []


def test_a_checkpoint_that_is_changed_meanwhile_leaves_nothing(drive):
    path = drive / "model.pt"
    torch.save(state(), path)
    with pytest.raises(OSError, match="changed while"):
        WeightStore.build(path, drive / "store", progress=lambda done, total: os.utime(path))
    assert [each.name for each in drive.iterdir()] == ["model.pt"]


@pytest.fixture
def sharded(drive: Path) -> Path:
    """A checkpoint of four shards, with three weights of one block in each."""
    weights = {f"layers.{layer}.{part}": torch.ones(1000) for layer in range(4) for part in "abc"}
    save_sharded(weights, drive / "checkpoint", most=12_000)
    return drive / "checkpoint"


def in_files_of_their_own(count: int, drive: Path) -> dict[str, Location]:
    """Weights, each of which is alone in a file."""
    for index in range(count):
        (drive / f"{index}.dat").write_bytes(bytes([index]) * 100)
    info = WeightInfo(torch.uint8, (100,))
    return {f"layers.{index}.w": Location(str(drive / f"{index}.dat"), 0, info) for index in range(count)}


def test_few_files_are_open_at_a_time(drive):
    most = 0

    def progress(done: int, total: int) -> None:
        nonlocal most
        most = max(most, len(set(open_files(drive, "*.dat"))))

    with WeightStore.build(in_files_of_their_own(50, drive), drive / "store", progress=progress) as store:
        store.verify()
    assert 8 < most < 20


@pytest.mark.parametrize("fails", ["cut off", "unreadable", "progress"])
def test_files_are_closed_after_an_error_that_somebody_keeps(drive, sharded, fails, faulty):
    def progress(done: int, total: int) -> None:
        if fails == "progress":
            raise ZeroDivisionError
        if fails == "cut off":
            for path in sharded.glob("*.safetensors"):
                os.truncate(path, 200)

    reads = mock.patch.object(Engine, "read", faulty("threads", error_every=5).read) if fails == "unreadable" else None
    with pytest.raises((ZeroDivisionError, OSError)) as failed, reads or contextlib.nullcontext():
        WeightStore.build(sharded, drive / "store", progress=progress)
    assert failed.value.__traceback__ is not None
    assert open_files(sharded) == []


def test_extents_of_all_sizes_go_through_one_budget(drive):
    sizes = [9 << 20, 1, 0, 5000, 3 << 20] * 3
    weights = {f"layers.{index}.w": torch.full((size,), index, dtype=torch.uint8) for index, size in enumerate(sizes)}
    with WeightStore.build(weights, drive / "store") as store:
        assert [extent.nbytes for extent in store.extents.values()][:5] == [9 << 20, 4096, 0, 8192, 3 << 20]
        store.verify()
