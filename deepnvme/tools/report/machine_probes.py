"""Probes of ds_report for this machine: the ops, their backends, the installed software and the kernel's limits.

They compile only small test programs and do not import torch, so all of them together take about a second.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
from pathlib import Path

import psutil

from deepnvme.ops.op_builder import ALL_OPS, AsyncIOBuilder, OpBuilder, jit, packages, toolchain
from deepnvme.ops.op_builder.async_io import Backend
from deepnvme.ops.op_builder.cuda import Found, GdsProbe, installed_torch
from deepnvme.telemetry.descriptions import size_for_people
from deepnvme.version import __version__

from .facts import Fact, Value

_SMALL_SHARED_MEMORY = 512 << 20  # DeepSpeed's threshold
_SMALL_MEMLOCK = 64 << 20  # the engine's staging buffers at their defaults
_FEW_AIO_EVENTS = 1024  # eight default handles
AIO_LIMITS = Path("/proc/sys/fs")
CPUINFO = Path("/proc/cpuinfo")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CAP_IPC_LOCK = 14
_VECTOR_EXTENSIONS = {"avx", "avx2", "avx512f", "avx512bw", "asimd", "sve", "sve2"}


def ninja() -> Fact:
    """Return the path of ninja, which compiling ops requires."""
    path = jit.ninja()
    problem = "" if path else "ninja was not found, ops cannot be compiled: pip install ninja"
    return Fact.checked("ninja", path, "", problem, good="OKAY", bad="FAIL")


def ops() -> list[Fact]:
    """Return, for every op, whether it is installed, as the value, and whether it can work on this machine, as the status."""
    return [_op(builder) for builder in ALL_OPS.values()]


def backends() -> tuple[list[Fact], str | None]:
    """Return the backends of async_io, fastest first, and the name of the one that "auto" selects.

    The name is None if the op can be neither loaded nor compiled.
    """
    builder = AsyncIOBuilder()
    build = builder.existing_build()
    obstacles = tuple(builder.obstacles())
    if build is None and obstacles:
        return [Fact(name, "unusable", status="NO", problems=obstacles) for name in ("io_uring", "libaio", "threads")], None
    facts = [_backend(backend) for backend in builder.backends()]
    facts.append(Fact("threads", "usable", status="OKAY"))
    return facts, next(fact.name for fact in facts if fact.status == "OKAY")


def environment(gds: GdsProbe) -> list[Fact]:
    """Return the paths and versions of torch, this package, compilers, CUDA and cuFile.

    Args:
        gds: Which requirements of GPU-direct storage were found on this machine.
    """
    torch = installed_torch()
    without_torch = "" if torch else "torch is not installed: pip install torch"
    return [
        *([Fact("torch install path", torch.path)] if torch else []),
        Fact.checked("torch version", torch.version if torch else None, "", without_torch, bad="FAIL"),
        Fact("deepnvme install path", str(Path(__file__).parents[2])),
        Fact("deepnvme info", __version__, named="deepnvme_version"),
        _compiler(),
        # A missing torch is reported above.
        Fact.checked("torch cuda version", torch.cuda if torch else None, "", gds.without_cuda() if torch else "", bad=""),
        Fact("torch hip version", torch.hip if torch else None),
        _found("nvcc version", gds.nvcc, gds),
        _found("cufile library", gds.cufile_library, gds),
        _found("nvidia-fs driver", gds.nvidia_fs, gds),
    ]


def system() -> list[Fact]:
    """Return the facts about kernel, processors and limits that matter to I/O."""
    facts = [Fact("kernel", f"{platform.system()} {platform.release()}"), *_cpu(), _memory()]
    for name, key, probe in (
        ("aio-max-nr, events allowed", "aio_max_nr", _aio_events),
        ("memlock limit", "memlock_bytes", _memory_lock),
        ("transparent huge pages", "", _huge_pages),
        ("shared memory (/dev/shm) size", "shared_memory_bytes", _shared_memory),
    ):
        value, text, problem = probe()
        facts.append(Fact.checked(name, value, text, problem, key))
    return facts


def _op(builder: OpBuilder) -> Fact:
    """Return whether an op is installed, and whether it can work on this machine.

    An op is compatible unless a requirement is missing, or it is neither compiled nor can be compiled. A compatible op that is
    not installed has a problem as well: why it is not installed, and the command that installs it.
    """
    # An op without C++ sources needs no compiling.
    installed = builder.is_prebuilt() if builder.sources() else toolchain.Attempt(True)
    against = builder.lacking()
    to_install = []
    if not against and not installed:
        cached = builder.existing_build() is not None
        against = [] if cached else builder.obstacles()
        use = "an earlier build is in the cache" if cached else "it is compiled at first use"
        to_install = [f"{installed.reason}; {use}; to have it installed: {_ahead_of_time(builder)}"]
    problems = tuple(f"{builder.name}: {problem}" for problem in against or to_install)
    return Fact(builder.name, bool(installed), status="NO" if against else "OKAY", problems=problems)


def _ahead_of_time(builder: OpBuilder) -> str:
    """Return the command that installs the package with this op compiled ahead of time."""
    return f"{builder.BUILD_VAR}=1 pip install --force-reinstall --no-deps . (where the sources are)"


def _backend(backend: Backend) -> Fact:
    """Return a finding that says whether the kernel accepts a backend."""
    value, problem = "usable", ""
    if not backend.kernel:
        remedy = {"io_uring": _uring_remedy, "libaio": _aio_remedy}[backend.name](backend.kernel.reason)
        value, problem = "refused", f"refused by the kernel, {backend.kernel.reason}: {remedy}"
    return Fact.checked(backend.name, value, "", problem, good="OKAY", bad="NO")


def _uring_remedy(reason: str) -> str:
    """Return what to do if the kernel refuses io_uring."""
    if _read(Path("/proc/sys/kernel/io_uring_disabled")) not in (None, "0"):
        return packages.as_root("sysctl -w kernel.io_uring_disabled=0")
    if "5.6" in reason:
        return "use Linux 5.6 or later"
    calls = "io_uring_setup, io_uring_enter and io_uring_register"
    return f"use Linux 5.6 or later, whose container profile must allow {calls} (docker run --security-opt seccomp=unconfined)"


def _aio_remedy(reason: str) -> str:
    """Return what to do if the kernel refuses libaio."""
    if "EAGAIN" in reason:
        return packages.as_root("sysctl -w fs.aio-max-nr=1048576")
    return "a container's profile must allow io_setup, io_submit and io_getevents (docker run --security-opt seccomp=unconfined)"


def _compiler() -> Fact:
    """Return the C++ compiler that compiles ops, and its version."""
    found = toolchain.find()
    if isinstance(found, toolchain.Toolchain):
        return Fact("C++ compiler", f"{' '.join(found.command)}, {found.version}", named="cxx_compiler")
    builder = AsyncIOBuilder()
    library = builder.existing_build()
    if library is not None and builder.is_prebuilt():
        return Fact("C++ compiler", None, "none, and none is needed: the op is prebuilt", named="cxx_compiler")
    return Fact("C++ compiler", None, status="FAIL", problems=(toolchain.explained(found),), named="cxx_compiler")


def _found(name: str, found: Found, gds: GdsProbe) -> Fact:
    """Return the finding about one part of the CUDA software; on a machine with a GPU, also how to install a missing one."""
    if found.path is None or found.problem:
        return Fact(name, None, problems=(found.problem,) if gds.gpu else ())  # no status: only the gds op needs it
    return Fact(name, found.path, f"{found.version or 'version unknown'}, {found.path}")


def _cpu() -> list[Fact]:
    """Return the model of the processor, its vector extensions, and how many processors this process may use."""
    lines = (line.partition(":") for line in (_read(CPUINFO) or "").splitlines())
    found = {name.strip(): value.strip() for name, _, value in lines}
    flags = found.get("flags") or found.get("Features") or ""  # the latter on ARM
    vectors = sorted(_VECTOR_EXTENSIONS.intersection(flags.split()))
    return [
        Fact("CPU", found.get("model name") or platform.machine()),
        Fact("vector extensions", ", ".join(vectors) or None),
        Fact("CPUs usable", len(os.sched_getaffinity(0)), named="usable_cpus"),
    ]


def _memory() -> Fact:
    """Return the total and the available memory of this machine."""
    found = psutil.virtual_memory()
    text = f"{size_for_people(found.total)}, {size_for_people(found.available)} available"
    return Fact("memory", found.total, text, named="memory_bytes")


# Each of these returns a value, its text where that is another than str(value), and what is wrong with it, with the remedy.


def _aio_events() -> tuple[Value, str, str]:
    """Return the system's limit on libaio events, as (value, text, problem). Few left are a problem."""
    used, allowed = (_read(AIO_LIMITS / name) for name in ("aio-nr", "aio-max-nr"))
    if used is None or allowed is None:
        return None, "unknown", ""
    left = int(allowed) - int(used)
    problem = f"only {left} more events for the libaio backend: {packages.as_root('sysctl -w fs.aio-max-nr=1048576')}"
    return int(allowed), f"{allowed}, {used} in use", problem if left < _FEW_AIO_EVENTS else ""


def _memory_lock() -> tuple[Value, str, str]:
    """Return the limit on locked memory, as (value, text, problem). A small limit that applies to this process is a problem."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = soft == resource.RLIM_INFINITY
    text, value = "unlimited" if unlimited else size_for_people(soft), None if unlimited else soft
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", _read(Path("/proc/self/status")) or "", re.MULTILINE)
    if capabilities and int(capabilities[1], 16) >> _CAP_IPC_LOCK & 1:
        return value, f"{text} (not applied: this process has CAP_IPC_LOCK)", ""
    if unlimited or soft >= _SMALL_MEMLOCK:
        return value, text, ""
    remedy = "ulimit -l unlimited, after raising memlock in /etc/security/limits.conf (docker run --ulimit memlock=-1)"
    return value, text, f"pinned memory beyond {text} stays unlocked and may be swapped out: {remedy}"


def _huge_pages() -> tuple[Value, str, str]:
    """Return when the kernel uses transparent huge pages, as (value, text, problem). The setting "never" is a problem."""
    text = _read(HUGE_PAGES)
    if text is None:
        return None, "unknown", f"{HUGE_PAGES} is missing: use a kernel with CONFIG_TRANSPARENT_HUGEPAGE"
    chosen = re.search(r"\[(\w+)\]", text)
    value = chosen[1] if chosen else text
    problem = f"pinned memory is slower in small pages: echo madvise | {packages.as_root(f'tee {HUGE_PAGES}')}"
    return value, "", problem if value == "never" else ""


def _shared_memory() -> tuple[Value, str, str]:
    """Return the size of /dev/shm in bytes, as (value, text, problem). A small size is a problem."""
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError as error:
        remedy = packages.as_root("mount -t tmpfs tmpfs /dev/shm")
        return None, "UNKNOWN", f"/dev/shm cannot be examined ({error}): {remedy}"
    problem = "/dev/shm size might be too small, if running in docker increase to at least --shm-size='1gb'"
    return size, size_for_people(size), problem if size < _SMALL_SHARED_MEMORY else ""


def _read(path: Path) -> str | None:
    """Return the text of a file without surrounding white space; None if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
