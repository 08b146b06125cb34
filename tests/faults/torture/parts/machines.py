"""Machines that lack something: io_uring, huge pages, /proc, room, rights. All works, or is refused, and what was there is whole.

Each try is a forked process on one of them. What it changes is its own (namespaces, limits, a filter of system calls), but for
the setting kernel.io_uring_disabled, which is put back: at 1 it concerns unprivileged processes alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from deepnvme.memory.system_memory import available_memory
from deepnvme.ops.op_builder import cache

from .. import Wrong
from ..round_trips import RoundTrips

SHORT = 1  # tests/faults/test_machines.py makes all of them
SECONDS = 120

_MIB = 1 << 20
_LITTLE = 256 * _MIB
_UNPRIVILEGED = 65534
_DISABLED = Path("/proc/sys/kernel/io_uring_disabled")
_GROUPS = Path("/sys/fs/cgroup")
_CLONE_NEWNS = 0x20000
_PR_SET_KEEPCAPS, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_SET_THP_DISABLE = 8, 22, 38, 41
_CAP_DAC_READ_SEARCH = 2
_CAPSET = {"x86_64": 126, "aarch64": 91}
_URING_CALLS = {"io_uring": 425, "io_uring's enter": 426, "io_uring's register": 427}
_CALLS = {"x86_64": {**_URING_CALLS, "libaio": 206}, "aarch64": {**_URING_CALLS, "libaio": 0}}

Setup = Callable[[Path, contextlib.ExitStack], object]


class Impossible(Exception):
    """This machine cannot be made into such a one; the text says what is missing."""


def requires() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root, for mounts and limits"
    return None


def warm_up() -> None:
    """Import what torch imports at an optimizer's first step, so that no process forked from here need: it takes seconds."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.AdamW([parameter]).step()


def attack(random: random.Random, directory: Path) -> None:
    warm_up()
    names = sorted(MACHINES)
    random.shuffle(names)
    for number, name in enumerate(names):
        (own := directory / str(number)).mkdir()  # one that cannot be had leaves what it made there
        with contextlib.suppress(Impossible):  # tests/faults/test_machines.py says of each what is missing
            return run(name, own)
    raise Wrong("none of the machines can be had")


def run(name: str, directory: Path) -> None:
    """Make the round trips on such a machine. Raises Impossible where there can be none, Wrong where a promise is not kept."""
    around, inside, allowed, expects_refusal = MACHINES[name]
    directory.chmod(0o755)
    with contextlib.ExitStack() as undo:
        place = around(directory, undo)
        said = directory / "said"
        said.touch()
        child = os.fork()
        if child == 0:
            _in_child(inside, place, said, allowed, expects_refusal)
        try:
            _, status = os.waitpid(child, 0)
        except BaseException:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        code, text = os.waitstatus_to_exitcode(status), said.read_text(errors="replace")
    if code == _IMPOSSIBLE:
        raise Impossible(text)
    if code != 0:
        raise Wrong(f"on a machine with {name} the process ended with {code}:\n{text}")


_IMPOSSIBLE = 77


def _in_child(inside: Setup, place: Path, said: Path, allowed: tuple[int, ...], expects_refusal: bool) -> None:
    code = 1
    output = said.open("w", buffering=1)  # before there is less room, and fewer rights
    try:
        with contextlib.ExitStack() as undo:
            try:
                inside(place, undo)
            except (Impossible, subprocess.CalledProcessError, OSError) as error:
                output.write(getattr(error, "stderr", None) or str(error))
                code = _IMPOSSIBLE
                return
            for known in ("transfers of .* go through the page cache", "mlock of .* was refused", "activations stay in memory"):
                warnings.filterwarnings("ignore", known, RuntimeWarning)
            warnings.filterwarnings("ignore", ".* is on tmpfs: this is memory", UserWarning)
            trips = RoundTrips(place, allowed)
            trips.run()
            if bool(trips.refused) != expects_refusal:
                raise Wrong(f"refused: {trips.refused}")
            code = 0
    except BaseException:
        traceback.print_exc(file=output)
    finally:
        output.flush()
        os._exit(code)


# Settings of a process


def _nothing(directory: Path, undo: contextlib.ExitStack) -> Path:
    return directory


def _prctl(option: int, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    values = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in (*arguments, 0, 0, 0, 0)]
    if libc.prctl(option, *values[:4]) != 0:
        raise Impossible(f"prctl {option} was refused: {os.strerror(ctypes.get_errno())}")


def _refuse_system_calls(*names: str, error: int = errno.EPERM) -> Setup:
    """As a container's profile does: EPERM, or ENOSYS."""

    def inside(directory: Path, undo: contextlib.ExitStack) -> None:
        numbers = _CALLS.get(platform.machine())
        if numbers is None:
            raise Impossible(f"system calls of {platform.machine()} are not known here")
        load, equals, answer = 0x20, 0x15, 0x06
        refuse, allow = 0x00050000 | error, 0x7FFF0000
        program = [(load, 0, 0, 0)]
        for name in names:
            program += [(equals, 0, 1, numbers[name]), (answer, 0, 0, refuse)]
        program.append((answer, 0, 0, allow))
        filters = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
        header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(filters)))
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _prctl(_PR_SET_SECCOMP, 2, ctypes.c_void_p(ctypes.addressof(header)))

    return inside


def _without_huge_pages(directory: Path, undo: contextlib.ExitStack) -> None:
    _prctl(_PR_SET_THP_DISABLE, 1)


def _limit(which: int, value: int) -> Setup:
    def inside(directory: Path, undo: contextlib.ExitStack) -> None:
        resource.setrlimit(which, (value, value))

    return inside


def _unprivileged(directory: Path, undo: contextlib.ExitStack) -> None:
    """Become nobody, who may read everything: the interpreter may lie in root's home."""
    if platform.machine() not in _CAPSET:
        raise Impossible(f"system calls of {platform.machine()} are not known here")
    for path in (directory, *directory.rglob("*")):
        os.chown(path, _UNPRIVILEGED, _UNPRIVILEGED)
    _prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(*[_UNPRIVILEGED] * 3)
    os.setresuid(*[_UNPRIVILEGED] * 3)
    libc = ctypes.CDLL(None, use_errno=True)
    header, kept = struct.pack("=Ii", 0x20080522, 0), 1 << _CAP_DAC_READ_SEARCH
    if libc.syscall(_CAPSET[platform.machine()], header, struct.pack("=6I", kept, kept, 0, 0, 0, 0)) != 0:
        raise Impossible(f"capset was refused: {os.strerror(ctypes.get_errno())}")


def _with_little_to_lock(directory: Path, undo: contextlib.ExitStack) -> None:
    _limit(resource.RLIMIT_MEMLOCK, 0)(directory, undo)
    _unprivileged(directory, undo)


# Namespaces and file systems


def _command(*words: object) -> str:
    if shutil.which(str(words[0])) is None:
        raise Impossible(f"needs {words[0]}")
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode != 0:
        raise Impossible(f"{words[0]} was refused: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


def _own_mounts() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise Impossible(f"a namespace of mounts was refused: {os.strerror(ctypes.get_errno())}")
    _command("mount", "--make-rprivate", "/")


def _without_proc(directory: Path, undo: contextlib.ExitStack) -> None:
    _own_mounts()
    _command("mount", "-t", "tmpfs", "tmpfs", "/proc")


def _with_a_read_only_home(directory: Path, undo: contextlib.ExitStack) -> None:
    _own_mounts()
    for place in {os.path.expanduser("~"), str(cache.root())}:
        _command("mount", "--bind", place, place)
        _command("mount", "-o", "remount,bind,ro", place)


def _small_tmpfs(directory: Path, undo: contextlib.ExitStack) -> Path:
    place = directory / "mounted"
    place.mkdir()
    _command("mount", "-t", "tmpfs", "-o", f"size={3 * _MIB}", "tmpfs", place)
    undo.callback(_command, "umount", place)
    return place


# Settings of the machine


def _uring_for_root_alone(directory: Path, undo: contextlib.ExitStack) -> Path:
    if not _DISABLED.exists():
        raise Impossible(f"needs {_DISABLED}")
    setting = undo.enter_context(_DISABLED.open())
    fcntl.flock(setting, fcntl.LOCK_EX)  # another torture would put back what this one has set
    before = _DISABLED.read_text()
    undo.callback(_DISABLED.write_text, before)
    _DISABLED.write_text("1" if int(before) < 1 else before)
    return directory


def _little_memory(directory: Path, undo: contextlib.ExitStack) -> Path:
    """A control group, for the child to enter."""
    for group, limit in ((_GROUPS / "memory", "memory.limit_in_bytes"), (_GROUPS, "memory.max")):
        if (group / "cgroup.procs").exists():
            own = group / f"deepnvme-torture-{os.getpid()}"
            own.mkdir()
            undo.callback(own.rmdir)
            if (own / limit).exists():
                (own / limit).write_text(str(_LITTLE))
                (directory / "group").write_text(str(own))
                return directory
    raise Impossible("needs control groups with the memory controller")


def _in_the_group(directory: Path, undo: contextlib.ExitStack) -> None:
    group = Path((directory / "group").read_text())
    (group / "cgroup.procs").write_text(str(os.getpid()))
    if available_memory() > _LITTLE:
        raise Wrong(f"{available_memory()} bytes are said to be available")


MACHINES: dict[str, tuple[Callable[[Path, contextlib.ExitStack], Path], Setup, tuple[int, ...], bool]] = {
    # around the process; in it; error numbers allowed; whether something is refused
    "io_uring disabled": (_uring_for_root_alone, _unprivileged, (), False),
    "io_uring refused by seccomp": (_nothing, _refuse_system_calls("io_uring"), (), False),
    "io_uring and libaio refused by seccomp": (_nothing, _refuse_system_calls("io_uring", "libaio"), (), False),
    "io_uring refused by seccomp as unknown": (_nothing, _refuse_system_calls("io_uring", error=errno.ENOSYS), (), False),
    "io_uring refused by seccomp once it is set up": (_nothing, _refuse_system_calls("io_uring's enter"), (), False),
    "io_uring without registered buffers": (_nothing, _refuse_system_calls("io_uring's register"), (), False),
    "no huge pages": (_nothing, _without_huge_pages, (), False),
    "no memory to lock": (_nothing, _with_little_to_lock, (), False),
    "few descriptors": (_nothing, _limit(resource.RLIMIT_NOFILE, 64), (), False),
    "small files": (_nothing, _limit(resource.RLIMIT_FSIZE, 2 * _MIB), (errno.EFBIG,), True),
    "no /proc": (_nothing, _without_proc, (), False),
    "a read-only home": (_nothing, _with_a_read_only_home, (), False),
    "a small tmpfs": (_small_tmpfs, _nothing, (errno.ENOSPC,), True),
    "little memory": (_little_memory, _in_the_group, (), False),
}
