"""CheckpointManager: at any moment there are enough whole checkpoints, and no more than wanted when nothing is under way."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme import CheckpointManager
from deepnvme.checkpoint import saving
from deepnvme.checkpoint.publication import SUFFIX

from ..support.disks import Disk
from ..support.patience import PATIENCE, until


def state(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((100_000 + step,), step % 251, dtype=torch.uint8)}


def assert_is(found: Any, step: int) -> None:
    assert found["step"] == step
    assert torch.equal(found["weights"], state(step)["weights"])


def assert_whole(manager: CheckpointManager, steps: list[int]) -> None:
    """These and no others, and no temporary file."""
    assert sorted(os.listdir(manager.directory)) == [f"step-{step:08}.pt" for step in steps]
    for step in steps:
        assert_is(manager.load(step), step)


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "step", "options", "error", "why"),
    [
        (0, 1, {}, ValueError, "keep must be at least 1, got 0"),
        (-1, 1, {}, ValueError, "keep must be at least 1, got -1"),
        (1, -1, {}, ValueError, "a step must not be negative, got -1"),
        (1, {"a": 1}, {}, TypeError, "step must be an integer, got dict"),
    ],
)
def test_wrong_arguments_are_named(
    drive: Path, keep: int, step: Any, options: dict[str, bool], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        CheckpointManager(drive / "run", keep=keep).save(step, [1], **options)  # type: ignore[call-overload]
    assert list(drive.rglob("*.pt")) == []


def test_what_is_not_there_is_told_with_what_is(drive: Path) -> None:
    manager = CheckpointManager(drive)
    with pytest.raises(FileNotFoundError, match="there are no checkpoints in this directory"):
        manager.load()
    for step in (10, 200):
        manager.save(step, [step])
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 7; existing steps: 10, 200") as caught:
        manager.load(7)
    assert caught.value.filename == str(drive)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_object_that_cannot_be_pickled_costs_no_checkpoint(drive: Path, asynchronous: bool) -> None:
    manager = CheckpointManager(drive, keep=1)
    manager.save(1, state(1))
    with pytest.raises(AttributeError):
        manager.save(2, lambda: None, asynchronous=asynchronous)
    assert_whole(manager, [1])


@pytest.mark.root
@pytest.mark.parametrize(("keep", "left"), [(1, [2]), (2, [2])])
def test_a_full_disk_costs_at_most_the_oldest(small_disk: Disk, keep: int, left: list[int]) -> None:
    manager = CheckpointManager(small_disk / "run", keep=keep)
    for step in (1, 2):
        manager.save(step, state(step))
    with pytest.raises(OSError, match="more bytes wanted") as caught:
        manager.save(3, torch.zeros(small_disk.bytes_free() + (1 << 20), dtype=torch.uint8))
    assert caught.value.errno == errno.ENOSPC
    assert_whole(manager, left)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_that_cannot_be_removed_is_told_with_what_is_saved(
    drive: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    manager = CheckpointManager(drive, keep=1)
    manager.save(1, state(1))
    monkeypatch.setattr(Path, "unlink", refuse)

    def save() -> None:
        if asynchronous:
            manager.save(2, state(2), asynchronous=True).result(PATIENCE)
        else:
            manager.save(2, state(2))

    with pytest.raises(PermissionError, match=r"step-00000002\.pt is saved, but .* removed: Permission denied") as caught:
        save()
    assert caught.value.filename == str(manager.path(1))
    assert_whole(manager, [1, 2])


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "asynchronous"), [(1, False), (2, True), (3, False)])
def test_killed_at_any_moment_enough_are_whole(drive: Path, interpreters: Any, keep: int, asynchronous: bool) -> None:
    chance, begun = random.Random(keep), 0
    output = interpreters.stdout()
    for _ in range(6):
        child = interpreters.start(f"""
import deepnvme, torch
manager = deepnvme.CheckpointManager({str(drive)!r}, keep={keep})
for step in range({begun}, {begun} + 10_000):
    state = {{"step": step, "weights": torch.full((100_000 + step,), step % 251, dtype=torch.uint8)}}
    manager.save(step, state, fsync=False, asynchronous={asynchronous})
    print(step, flush=True)
""")
        until(lambda: output.read_text().count("\n") > keep + 2)
        time.sleep(chance.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        assert interpreters.wait(child).returncode == -signal.SIGKILL
        manager = CheckpointManager(drive, keep)
        steps = manager.steps()
        assert len(steps) >= max(keep - 1, 1)
        for step in steps:
            assert_is(manager.load(step), step)
        begun = steps[-1] + 1
    manager.save(begun, state(begun))
    assert_whole(manager, [*steps, begun][-keep:])


# -- rotation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_highest_steps_are_kept(drive: Path, keep: int, asynchronous: bool) -> None:
    manager = CheckpointManager(drive / "some" / "run", keep)
    assert manager.latest() is None
    assert manager.steps() == []
    for step in range(6):
        future = manager.save(step * 10, state(step * 10), asynchronous=asynchronous)
        assert (future is not None) is asynchronous
    if future is not None:
        future.result(PATIENCE)
    assert manager.latest() == 50
    assert manager.steps() == [0, 10, 20, 30, 40, 50][-keep:]
    assert_whole(manager, manager.steps())
    assert_is(manager.load(), 50)


def test_the_oldest_is_written_over_and_is_gone_before(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(drive, keep=2)
    for step in (1, 2):
        manager.save(step, state(step))
    inode, during = manager.path(1).stat().st_ino, []
    write = saving.write
    monkeypatch.setattr(saving, "write", lambda *args, **more: (during.append(manager.steps()), write(*args, **more)))
    manager.save(3, state(3))
    assert during == [[2]]
    assert manager.path(3).stat().st_ino == inode
    assert_whole(manager, [2, 3])


def test_the_only_one_stays_until_the_next_is_there(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, during = CheckpointManager(drive, keep=1), []
    manager.save(1, state(1))
    write = saving.write
    monkeypatch.setattr(saving, "write", lambda *args, **more: (during.append(manager.steps()), write(*args, **more)))
    manager.save(2, state(2))
    assert during == [[1]]
    assert_whole(manager, [2])


def test_one_with_another_name_is_kept_under_that(drive: Path) -> None:
    manager = CheckpointManager(drive / "run", keep=2)
    manager.save(1, state(1))
    os.link(manager.path(1), drive / "best.pt")
    for step in (2, 3, 4):
        manager.save(step, state(step))
    assert_whole(manager, [3, 4])
    assert_is(deepnvme.load(drive / "best.pt"), 1)


def test_one_that_is_mapped_stays_as_it_was(drive: Path) -> None:
    manager = CheckpointManager(drive, keep=2)
    manager.save(1, state(1))
    mapped = manager.load(mmap=True)
    for step in (2, 3, 4):
        manager.save(step, state(step))
    assert_is(mapped, 1)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_step_that_is_there_is_replaced_and_costs_no_other(drive: Path, step: int) -> None:
    manager = CheckpointManager(drive, keep=3)
    for before in (1, 2, 3):
        manager.save(before, [before] if before == step else state(before))
    manager.save(step, state(step))
    assert_whole(manager, [1, 2, 3])


def test_what_has_just_been_saved_stays_though_its_step_is_the_lowest(drive: Path) -> None:
    manager = CheckpointManager(drive, keep=2)
    for step in (10, 20, 5):
        manager.save(step, state(step))
    assert_whole(manager, [5, 20])


@pytest.mark.parametrize("name", ["step-1.pt", "step-00000001.pt2", "best.pt", "step-000000001.pt", f".step-9.pt.ab{SUFFIX}x"])
def test_other_files_are_left_alone(drive: Path, name: str) -> None:
    (drive / name).write_bytes(b"mine")
    manager = CheckpointManager(drive, keep=1)
    for step in (1, 2):
        manager.save(step, state(step))
    assert manager.steps() == [2]
    assert (drive / name).read_bytes() == b"mine"


def test_several_managers_may_save_into_one_directory(drive: Path, interpreters: Any) -> None:
    interpreters.run(f"""
import os, deepnvme, torch
manager, first = deepnvme.CheckpointManager({str(drive)!r}, keep=3), os.fork()
for step in range(100):
    manager.save(2 * step + bool(first), [step, torch.full((10_000,), step)], fsync=False)
    steps = manager.steps()
    assert step < 2 or len(steps) >= 2, steps
if first:
    assert os.waitpid(first, 0)[1] == 0
else:
    os._exit(0)
""").check()  # fmt: skip
    manager = CheckpointManager(drive, keep=3)
    manager.save(200, [100, torch.full((10_000,), 100)])
    assert len(manager.steps()) == 3
    for step in manager.steps():
        half, weights = manager.load(step)
        assert half == step // 2
        assert bool((weights == half).all())
