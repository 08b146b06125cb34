"""A file that is recycled: nobody who sees it sees what is written over it, and it is given back where it cannot serve."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme import Engine
from deepnvme.checkpoint import publication
from deepnvme.checkpoint.publication import Destination, Publication

from ..support.interpreters import Interpreters

NEW = bytes(range(256)) * 40


@pytest.fixture
def old(drive: Path) -> Path:
    path = drive / "old"
    path.write_bytes(b"old" * 10_000)
    return path


def publish(path: Path, recycle: Path, engine: Engine) -> int:
    """NEW; the inode of the file."""
    with Publication(Destination(path, recycle=lambda: recycle), len(NEW), engine) as new:
        assert not recycle.exists()
        engine.write(torch.frombuffer(bytearray(NEW), dtype=torch.uint8), new.file, 0).result()
        new.publish()
    assert path.read_bytes() == NEW
    assert [entry.name for entry in path.parent.iterdir() if entry.name.endswith(publication.SUFFIX)] == []
    return path.stat().st_ino


@pytest.mark.parametrize("nbytes", [0, 100, 30_000, len(NEW)])
def test_its_blocks_serve_again_whatever_its_length(drive: Path, engine: Engine, nbytes: int) -> None:
    old = drive / "old"
    old.write_bytes(b"o" * nbytes)
    inode = old.stat().st_ino
    assert publish(drive / "new", old, engine) == inode


@pytest.mark.parametrize("hold", [
    lambda file: file, lambda file: mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ),
])  # fmt: skip
def test_who_has_it_open_or_mapped_goes_on_to_see_what_was_there(old: Path, engine: Engine, hold: Callable[[Any], Any]) -> None:
    with open(old, "rb") as file:
        held = hold(file)
        inode = old.stat().st_ino
        if held is not file:
            file.close()
        assert publish(old.parent / "new", old, engine) != inode
        assert held.read() == b"old" * 10_000
        held.close()


def test_its_other_name_keeps_what_was_there(old: Path, engine: Engine) -> None:
    os.link(old, old.parent / "kept")
    publish(old.parent / "new", old, engine)
    assert (old.parent / "kept").read_bytes() == b"old" * 10_000


@pytest.mark.parametrize("kind", ["symbolic link", "directory"])
def test_what_is_no_regular_file_is_left_alone(old: Path, engine: Engine, kind: str) -> None:
    other = old.parent / "other"
    if kind == "directory":
        other.mkdir()
    else:
        other.symlink_to(old)
    with Publication(Destination(old.parent / "new", recycle=lambda: other), 5, engine) as new:
        new.publish()
    assert sorted(entry.name for entry in old.parent.iterdir()) == ["new", "old", "other"]
    assert old.read_bytes() == b"old" * 10_000


def test_one_that_may_not_be_written_to_is_removed(old: Path, interpreters: Interpreters) -> None:
    old.chmod(0o444)
    old.parent.chmod(0o777)
    program = f"""
        import pathlib, deepnvme
        from deepnvme.checkpoint.publication import Destination, Publication
        if os.geteuid() == 0:
            os.setgid(65534); os.setuid(65534)
        old = pathlib.Path({str(old)!r})
        with Publication(Destination(old.parent / "new", recycle=lambda: old), 5, deepnvme.Engine()) as new:
            new.publish()
    """
    interpreters.run(program).check()
    assert [entry.name for entry in old.parent.iterdir()] == ["new"]


def test_one_that_is_gone_is_no_obstacle(drive: Path, engine: Engine) -> None:
    publish(drive / "new", drive / "gone", engine)


def test_its_old_name_is_durably_gone_before_it_is_written_to(old: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a power cut could leave that name to a file half overwritten."""
    synced = []
    monkeypatch.setattr(publication, "sync_directory", lambda directory: synced.append(sorted(os.listdir(directory))))
    with Publication(Destination(old.parent / "new", recycle=lambda: old), len(NEW), engine) as new:
        assert synced == [[new.temporary.name]]


def test_a_child_forked_while_a_file_was_written_does_not_keep_it_from_being_recycled(drive: Path, engine: Engine) -> None:
    with Publication(Destination(drive / "first"), len(NEW), engine) as new:
        names = {number: os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}
        child = [os.dup(int(number)) for number, name in names.items() if name == str(new.temporary)]
        assert child  # as a fork has them: with the same lock
        new.publish()
    other = os.open(drive / "first", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    assert publish(drive / "second", drive / "first", engine)
    for descriptor in child:
        os.close(descriptor)


def test_who_opens_it_while_that_is_found_out_does_no_harm(old: Path, interpreters: Interpreters) -> None:
    """As whoever looks for leftovers does: the kernel tells the holder of a lease by a signal that ends a process."""
    interpreters.run(f"""
        import fcntl, pathlib, deepnvme
        from deepnvme.checkpoint.publication import Destination, Publication

        old, control, refused = pathlib.Path({str(old)!r}), fcntl.fcntl, []

        def opened_by_another(descriptor, command, argument):
            result = control(descriptor, command, argument)
            if command == fcntl.F_SETLEASE and argument == fcntl.F_WRLCK:
                try:
                    os.open(f"/proc/self/fd/{{descriptor}}", os.O_RDWR | os.O_NONBLOCK)
                except BlockingIOError as error:
                    refused.append(error)
            return result

        fcntl.fcntl, inode, path = opened_by_another, old.stat().st_ino, old.parent / "new"
        with Publication(Destination(path, recycle=lambda: old), 5, deepnvme.Engine()) as new:
            new.publish()
        assert len(refused) == 1
        assert path.stat().st_ino == inode  # nobody else had it
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # nothing is left of the lease
    """).check()
