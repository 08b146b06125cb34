"""A directory seen through a file system that fails on command. Needs FUSE: /dev/fuse, libfuse3 and a C compiler."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from .patience import PATIENCE

# libfuse itself and a small C program, rather than a Python binding of it: requests of several threads are answered at a time,
# none waits for an interpreter, and it outlives the process under test to unmount behind it.
_SOURCE = Path(__file__).resolve().parents[1] / "native" / "faulty_filesystem.c"

Mode = Literal["direct", "cached", "writeback"]
MODES: tuple[Mode, ...] = ("direct", "cached", "writeback")
"""How reads and writes come to the file system: all as they are made; through the page cache, but for those with O_DIRECT; and
through a page cache that keeps writes until fsync, which then reports their errors."""


class FaultyFilesystem:
    """``path`` shows the files of ``behind``."""

    def __init__(self, path: Path, behind: Path, process: subprocess.Popen[str]) -> None:
        self.path = path
        self.behind = behind
        self._process = process
        self._lock = threading.Lock()

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def fail(
        self,
        operations: str,
        error: int = errno.EIO,
        *,
        effect: Literal["error", "short", "hang", "lie"] = "error",
        value: int | None = None,
        skip: int = 0,
        times: int = 1,
        probability: float = 1.0,
        seed: int = 0,
        name: str = "*",
    ) -> None:
        """Have operations fail from here on. Of several faults the one that was set first holds.

        ``operations``: names with commas between, of lookup, getattr, setattr, ftruncate, mkdir, unlink, rmdir, rename, link,
        open, create, read, write, flush, release, fsync, opendir, readdir, fsyncdir, statfs, fallocate.
        ``effect``: "error", with ``error``; "short": at most ``value`` bytes are moved, in mode direct (an asynchronous write is
        EIO then, says the kernel); "hang": it waits for ``value`` ms, or until :meth:`heal` if that is 0, two minutes at most;
        "lie": a write is dropped, and is said to be done.
        ``skip``: so many are left out. ``times``: how many fail at most; -1 is all. ``probability``: of each, by ``seed``.
        ``name``: a shell pattern for the last part of the path.
        """
        number = error if effect == "error" else value or 0
        answer = self._ask(f"fault {operations} {effect} {number} {skip} {times} {round(probability * 1e6)} {seed} {name}")
        if answer != "ok":
            raise ValueError(answer)

    def heal(self) -> list[str]:
        """End all faults, and what hangs. Returns what has failed since the last time, each as ``operation:EIO`` or
        ``operation:effect``."""
        met = (entry.split(":") for entry in self._ask("heal").split())
        return [f"{operation}:{errno.errorcode[int(what)] if what.isdigit() else what}" for operation, what in met]

    def resume(self) -> None:
        """End what hangs, and the faults that made it hang. Faults of other effects stay."""
        self._ask("resume")

    def counts(self) -> dict[str, int]:
        """Operations of each kind so far."""
        pairs = (entry.split("=") for entry in self._ask("count").split())
        return {operation: int(number) for operation, number in pairs}

    def _ask(self, command: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the faulty file system has ended with {self._process.wait()}")
        return answer.strip()


@functools.cache
def obstacle() -> str | None:
    """What is missing here for a faulty file system, or None."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "needs /dev/fuse"
    if shutil.which("umount" if os.geteuid() == 0 else "fusermount3") is None:
        return "needs root, or fusermount3"
    try:
        with tempfile.TemporaryDirectory() as directory, faulty_filesystem(Path(directory)):
            return None
    except RuntimeError as error:
        return str(error)


@contextlib.contextmanager
def faulty_filesystem(directory: Path, mode: Mode = "direct") -> Iterator[FaultyFilesystem]:
    """Made in ``directory``, and removed: also when this process is killed, but for its files. Raises RuntimeError saying what is
    missing, and AssertionError in the end if a descriptor was left open in it.
    """
    program = _program()
    path, behind = directory / "faulty", directory / "behind"
    path.mkdir()
    behind.mkdir()
    process = subprocess.Popen(
        [program, str(behind), str(path), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is not for it
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != "mounted\n":
            raise RuntimeError(f"cannot be mounted: {process.stderr.read().strip()}")
        made = FaultyFilesystem(path, behind, process)
        try:
            yield made
        finally:
            made.heal()
            left = _unmount(path)
            process.communicate()  # closes its input: it unmounts in any case, and ends
    shutil.rmtree(behind)
    path.rmdir()
    assert not left, f"what was opened in it is open still: {left}"


def _unmount(path: Path) -> str:
    """Why it cannot be unmounted; empty if it is. Requests that have ended may be let go of a moment later."""
    command = ["umount"] if os.geteuid() == 0 else ["fusermount3", "-u"]
    deadline = time.monotonic() + PATIENCE
    while True:
        done = subprocess.run([*command, str(path)], capture_output=True, text=True)
        if done.returncode == 0:
            return ""
        if time.monotonic() > deadline:
            return f"{done.stderr.strip()} {_opened_in(path)}"
        gc.collect()  # the frames of an exception that is not needed any more have what they opened
        time.sleep(0.05)


def _opened_in(path: Path) -> list[str]:
    """What this process has open or mapped there."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    mapped = [line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()]
    return [name for name in (*links, *mapped) if name.startswith(f"{path}/")]


@functools.cache
def _program() -> str:
    directory = tempfile.TemporaryDirectory(prefix="deepnvme-fuse-")
    _kept.append(directory)
    program = str(Path(directory.name) / "faulty_filesystem")
    compiler = os.environ.get("CC") or "cc"
    try:
        done = subprocess.run(
            [*compiler.split(), "-O1", "-o", program, str(_SOURCE), "-lfuse3", "-lpthread"], capture_output=True, text=True
        )
    except FileNotFoundError:
        raise RuntimeError(f"needs a C compiler: {compiler} is not found") from None
    if done.returncode != 0:
        missing = "fuse3/fuse_lowlevel.h: No such file" in done.stderr or "-lfuse3" in done.stderr
        raise RuntimeError("needs libfuse3-dev" if missing else f"{_SOURCE.name} cannot be compiled:\n{done.stderr}")
    return program


_kept: list[tempfile.TemporaryDirectory[str]] = []
"""Removed at exit."""
