"""What this machine offers: the ops, their backends, the software around them and the kernel's limits.

Nothing is compiled but small test programs, and torch is not imported: the whole takes well under a second.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from deepnvme._facts import Fact, human_size
from deepnvme.ops.op_builder import ALL_OPS, AsyncIOBuilder, GDSBuilder, OpBuilder, jit, packages, toolchain
from deepnvme.ops.op_builder.async_io import Backend
from deepnvme.ops.op_builder.cuda import Found, GdsProbe, installed_torch
from deepnvme.version import __version__

_SMALL_SHARED_MEMORY = 512 << 20  # DeepSpeed's threshold
_SMALL_MEMLOCK = 64 << 20  # the engine's staging buffers at their defaults
_FEW_AIO_EVENTS = 1024  # eight default handles
_AIO_LIMITS = Path("/proc/sys/fs")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CAP_IPC_LOCK = 14


@dataclass(frozen=True)
class Op:
    """One op: compiled ahead of time or not, and whether it can be compiled here; ``problems`` says why not."""

    name: str
    installed: bool
    compatible: bool
    problems: tuple[str, ...]


def ninja() -> Fact:
    path = jit.ninja()
    if path is None:
        return Fact("ninja", None, status="FAIL", problems=("ninja was not found, ops cannot be compiled: pip install ninja",))
    return Fact("ninja", path, status="OKAY")


def ops() -> list[Op]:
    return [_op(builder) for builder in ALL_OPS.values()]


def backends() -> list[Fact]:
    """Every backend of async_io, fastest first, the one that "auto" takes marked."""
    facts = [_backend(backend) for backend in AsyncIOBuilder().backends()]
    facts.append(Fact("threads", "usable", status="OKAY"))
    chosen = next(fact.name for fact in facts if fact.status == "OKAY")
    return [*facts, Fact("auto takes", chosen)]


def environment(gds: GdsProbe) -> list[Fact]:
    """torch, this package, compilers and CUDA."""
    torch = installed_torch()
    facts = []
    if torch is None:
        facts.append(Fact("torch version", None, status="FAIL", problems=("torch is not installed: pip install torch",)))
    else:
        facts += [Fact("torch install path", torch.path), Fact("torch version", torch.version)]
    facts += [
        Fact("deepnvme install path", str(Path(__file__).parent)),
        Fact("deepnvme info", __version__),
        _compiled_with(),
        _compiler(),
        Fact("torch cuda version", torch.cuda if torch else None),
        Fact("torch hip version", torch.hip if torch else None),
        _found("nvcc version", gds.nvcc, in_brief=True),
        _found("CUDA toolkit", gds.toolkit, note=gds.mismatch),
        _found("cufile header", gds.cufile_header),
        _found("cufile library", gds.cufile_library),
        _found("nvidia-fs driver", gds.nvidia_fs),
    ]
    return facts


def system() -> list[Fact]:
    """The kernel and the limits that matter to I/O."""
    return [
        Fact("kernel", f"{platform.system()} {platform.release()}"),
        _cpu(),
        _aio_events(),
        _memory_lock(),
        _huge_pages(),
        _shared_memory(),
    ]


def gds_probe() -> GdsProbe:
    return GDSBuilder().probe()


def _op(builder: OpBuilder) -> Op:
    obstacles = tuple(f"{builder.name}: {obstacle}" for obstacle in builder.obstacles())
    if not builder.sources() and not obstacles:  # Python alone
        return Op(builder.name, installed=True, compatible=True, problems=())
    built = builder.is_prebuilt()
    if built:
        return Op(builder.name, installed=True, compatible=True, problems=())
    if obstacles:
        return Op(builder.name, installed=False, compatible=False, problems=obstacles)
    remedy = f"it is compiled at first use, or ahead of time by: {builder.BUILD_VAR}=1 pip install . (where the sources are)"
    return Op(builder.name, installed=False, compatible=True, problems=(f"{builder.name}: {built.reason}; {remedy}",))


def _backend(backend: Backend) -> Fact:
    package, events = {"io_uring": ("liburing", _uring_remedy), "libaio": ("libaio", _aio_remedy)}[backend.name]
    if not backend.library:
        problem = f"compiled out, {package}'s header or library is not usable ({backend.library.reason})"
        return Fact(backend.name, "compiled out", status="NO", problems=(f"{problem}: {packages.remedy(package)}",))
    if not backend.kernel:
        problem = f"refused by the kernel, {backend.kernel.reason}"
        return Fact(backend.name, "refused", status="NO", problems=(f"{problem}: {events(backend.kernel.reason)}",))
    return Fact(backend.name, "usable", status="OKAY")


def _uring_remedy(reason: str) -> str:
    disabled = _read(Path("/proc/sys/kernel/io_uring_disabled"))
    if disabled not in (None, "0"):
        return "sudo sysctl -w kernel.io_uring_disabled=0"
    if "ENOMEM" in reason:
        return "ulimit -l unlimited"
    if "ENOSYS" in reason and disabled is None:
        return "use Linux 5.6 or later, or a container profile that allows it (docker run --security-opt seccomp=unconfined)"
    return (
        "a container's profile must allow io_uring_setup, io_uring_enter and io_uring_register "
        "(docker run --security-opt seccomp=unconfined)"
    )


def _aio_remedy(reason: str) -> str:
    if "EAGAIN" in reason:
        return "sudo sysctl -w fs.aio-max-nr=1048576"
    return "a container's profile must allow io_setup, io_submit and io_getevents (docker run --security-opt seccomp=unconfined)"


def _compiled_with() -> Fact:
    name = "deepnvme op compiled w."
    builder = AsyncIOBuilder()
    library = jit.prebuilt(builder.absolute_name())
    if library is not None and builder.is_prebuilt():
        content = library.read_bytes()
        # Every object file says in its .comment section what compiled it.
        compiler = re.search(rb"GCC: \([^)]*\) [\d.]+|[\w ]*clang version [\d.]+", content)
        parts = [compiler[0].decode(errors="replace")] if compiler else []
        parts += [library_name for library_name in ("liburing", "libaio") if f"{library_name}.so".encode() in content]
        return Fact(name, ", ".join(["ahead of time", *parts]))
    record = builder.cached_build()
    if record is not None:
        parts = [library for flag, library in (("-luring", "liburing"), ("-laio", "libaio")) if flag in record["link_flags"]]
        return Fact(name, ", ".join(["at first use", record["compiler"], *parts]))
    return Fact(name, None, "not compiled yet")


def _compiler() -> Fact:
    found = toolchain.find()
    if isinstance(found, toolchain.Toolchain):
        return Fact("C++ compiler", f"{' '.join(found.command)}, {found.version}")
    return Fact("C++ compiler", None, status="FAIL", problems=(f"{found.reason}: {packages.remedy('compiler')}",))


def _found(name: str, found: Found, note: str = "", in_brief: bool = False) -> Fact:
    if found.path is None or found.problem:
        return Fact(name, None, status="NO", problems=(found.problem,))
    text = found.version or "version unknown"
    return Fact(
        name, found.version if in_brief else found.path, text if in_brief else f"{text}, {found.path}",
        "WARNING" if note else "", (note,) if note else (),
    )  # fmt: skip


def _cpu() -> Fact:
    text = _read(Path("/proc/cpuinfo")) or ""
    model = re.search(r"^(?:model name|Model|cpu model|cpu)\s*:\s*(.+)$", text, re.MULTILINE)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Fact("CPU", f"{model[1] if model else platform.processor() or platform.machine()}, {usable} usable")


def _aio_events() -> Fact:
    name = "aio-max-nr, in use and allowed"
    used, allowed = _read(_AIO_LIMITS / "aio-nr"), _read(_AIO_LIMITS / "aio-max-nr")
    if used is None or allowed is None:
        problem = f"{_AIO_LIMITS}/aio-max-nr cannot be read: the libaio backend needs Linux"
        return Fact(name, None, "unknown", "WARNING", (problem,))
    text = f"{used} of {allowed}"
    if int(allowed) - int(used) < _FEW_AIO_EVENTS:
        problem = f"only {int(allowed) - int(used)} more events for the libaio backend: sudo sysctl -w fs.aio-max-nr=1048576"
        return Fact(name, text, status="WARNING", problems=(problem,))
    return Fact(name, text)


def _memory_lock() -> Fact:
    name = "memlock limit"
    try:
        import resource
    except ImportError:
        return Fact(name, None, "unknown", "WARNING", (f"{platform.system()} has no such limit: use Linux",))
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else human_size(soft)
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", _read(Path("/proc/self/status")) or "", re.MULTILINE)
    if capabilities and int(capabilities[1], 16) >> _CAP_IPC_LOCK & 1:
        return Fact(name, soft, f"{text} (not applied: this process has CAP_IPC_LOCK)")
    if soft == resource.RLIM_INFINITY or soft >= _SMALL_MEMLOCK:
        return Fact(name, soft, text)
    unprivileged = hard == resource.RLIM_INFINITY or hard >= _SMALL_MEMLOCK
    remedy = "ulimit -l unlimited" if hard == resource.RLIM_INFINITY else f"ulimit -l {hard // 1024}"
    if not unprivileged:
        remedy = (
            'echo "* - memlock unlimited" | sudo tee /etc/security/limits.d/memlock.conf, then log in again '
            "(docker run --ulimit memlock=-1)"
        )
    return Fact(name, soft, text, "WARNING", (f"pinned memory beyond {text} stays unlocked and may be swapped out: {remedy}",))


def _huge_pages() -> Fact:
    name = "transparent huge pages"
    text = _read(_HUGE_PAGES)
    if text is None:
        problem = f"{_HUGE_PAGES} is missing: use a kernel with CONFIG_TRANSPARENT_HUGEPAGE"
        return Fact(name, None, "unknown", "WARNING", (problem,))
    chosen = re.search(r"\[(\w+)\]", text)
    value = chosen[1] if chosen else text
    if value == "never":
        problem = f"pinned memory is slower in small pages: echo madvise | sudo tee {_HUGE_PAGES}"
        return Fact(name, value, status="WARNING", problems=(problem,))
    return Fact(name, value)


def _shared_memory() -> Fact:
    name = "shared memory (/dev/shm) size"
    try:
        status = os.statvfs("/dev/shm")
    except (OSError, AttributeError) as error:
        problem = f"/dev/shm cannot be examined ({error}): sudo mount -t tmpfs tmpfs /dev/shm"
        return Fact(name, None, "UNKNOWN", "WARNING", (problem,))
    size = status.f_frsize * status.f_blocks
    if size < _SMALL_SHARED_MEMORY:
        problem = "/dev/shm size might be too small, if running in docker increase to at least --shm-size='1gb'"
        return Fact(name, size, human_size(size), "WARNING", (problem,))
    return Fact(name, size, human_size(size))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
