"""A directory belongs to one owner at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
from pathlib import Path

import pytest

from deepnvme.files.directory_lock import LOCK_NAME, DirectoryLock, StoreLocked

HOLDER = """
import os, sys, time
from pathlib import Path
from deepnvme.files.directory_lock import DirectoryLock
owner = DirectoryLock(Path({path!r}))
print("holds", flush=True)
{then}
"""


def test_another_owner_in_this_process_is_refused_and_named(drive):
    owner = DirectoryLock(drive)
    line = sys._getframe().f_lineno - 1
    named = rf"the DirectoryLock of this process \({os.getpid()}\) that was made at {__file__}:{line}: call its release\(\)"
    with pytest.raises(StoreLocked, match=named) as refused:
        DirectoryLock(drive)
    assert str(os.getpid()) in refused.value.holder
    assert (refused.value.errno, refused.value.filename) == (errno.EBUSY, str(drive))
    owner.release()
    DirectoryLock(drive).release()


STORE = """
import time, deepnvme
store = deepnvme.swap.TensorStore({path!r})
print("holds", flush=True)
{then}
"""


@pytest.mark.parametrize(("program", "holder"), [(HOLDER, "DirectoryLock"), (STORE, "TensorStore")])
def test_another_process_is_refused_and_the_owner_named(drive, interpreters, program, holder):
    child = interpreters.start(program.format(path=str(drive), then="time.sleep(3600)"))
    try:
        interpreters.wait_for("holds")
        with pytest.raises(StoreLocked, match=rf"(?s)in use by the {holder} of process {child} on .*\); end that process, or"):
            DirectoryLock(drive)
    finally:
        os.kill(child, signal.SIGKILL)
        interpreters.wait(child)
    DirectoryLock(drive).release()


def test_a_lock_whose_holder_has_not_said_its_name_is_refused_all_the_same(drive):
    with (drive / LOCK_NAME).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreLocked, match="an unknown process"):
            DirectoryLock(drive)


def test_what_was_made_is_removed_and_what_was_there_stays(drive):
    DirectoryLock(drive / "a" / "b").release()
    assert list(drive.iterdir()) == []
    owner = DirectoryLock(drive / "a" / "b")
    (drive / "a" / "kept").touch()
    owner.release()
    assert list(drive.rglob("*")) == [drive / "a", drive / "a" / "kept"]


def test_a_directory_that_its_last_owner_removes_is_made_again(drive, monkeypatch):
    place, made = drive / "a", []

    def making(directory, *arguments, **options):
        made.append(directory)
        if len(made) > 1:  # the first is removed just after that
            mkdir(directory, *arguments, **options)

    mkdir = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", making)
    DirectoryLock(place).release()
    assert len(made) == 2
    assert list(drive.iterdir()) == []


def test_release_twice_leaves_the_next_owner_alone(drive):
    first = DirectoryLock(drive)
    first.release()
    second = DirectoryLock(drive)
    first.release()
    assert second.intact()
    with pytest.raises(StoreLocked):
        DirectoryLock(drive)
    second.release()


def test_an_owner_whose_directory_was_replaced_removes_nothing_of_the_new_owner(drive):
    place = drive / "place"
    first = DirectoryLock(place)
    place.rename(drive / "elsewhere")
    second = DirectoryLock(place)
    with pytest.raises(FileNotFoundError, match="removed while in use"):
        first.check()
    first.release()
    second.check()
    second.release()


def test_a_forked_child_does_not_keep_the_lock_of_a_dead_parent(drive, interpreters):
    then = """
if os.fork() == 0:
    time.sleep(3600)
    os._exit(0)
print("forked", flush=True)
os.kill(os.getpid(), 9)
"""
    # The child of a killed program outlives it: it is found and ended through its parent's process group.
    program = "import os\nos.setpgid(0, 0)\n" + HOLDER.format(path=str(drive), then=then)
    child = interpreters.start(program)
    try:
        assert interpreters.wait(child).returncode == -signal.SIGKILL
        DirectoryLock(drive).release()
    finally:
        os.killpg(child, signal.SIGKILL)


def test_a_child_that_ends_releases_nothing(drive):
    owner = DirectoryLock(drive)
    child = os.fork()
    if child == 0:
        owner.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert owner.intact()
    with pytest.raises(StoreLocked):
        DirectoryLock(drive)
    owner.release()
