"""Whether this kernel lets this process use io_uring and Linux AIO: tried, because a container's seccomp filter may
refuse what the kernel's settings allow."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

from .toolchain import Attempt

# The same on every architecture but alpha.
_IO_URING_SETUP, _IO_URING_ENTER, _IO_URING_REGISTER = 425, 426, 427
_REGISTER_PROBE, _OPERATIONS = 8, 256  # IORING_REGISTER_PROBE, and the most operations that it tells of
_FEATURES, _OF_LINUX_5_6 = 5, 1 << 3  # a field of struct io_uring_params, and its IORING_FEAT_RW_CUR_POS
_IO_SETUP = {"x86_64": (206, 207), "aarch64": (0, 1), "riscv64": (0, 1), "loongarch64": (0, 1), "ppc64le": (227, 228),
             "s390x": (243, 244)}  # fmt: skip


def io_uring() -> Attempt:
    """Try io_uring: set up a ring of two entries, enter it, query its operations, and drop it. Never raises."""
    parameters = (ctypes.c_uint32 * 30)()  # struct io_uring_params, all zero
    result = _syscall("io_uring_setup", _IO_URING_SETUP, ctypes.c_uint(2), parameters)
    if isinstance(result, Attempt):
        return result
    ring, zero = ctypes.c_int(result), ctypes.c_uint(0)
    try:
        if not parameters[_FEATURES] & _OF_LINUX_5_6:
            return Attempt(False, "io_uring_setup works, but is of a kernel before Linux 5.6, without read and write")
        entered = _syscall("io_uring_enter", _IO_URING_ENTER, ring, zero, zero, zero, None, ctypes.c_size_t(0))
        if isinstance(entered, Attempt):
            return entered
        probe = (ctypes.c_uint64 * (2 + _OPERATIONS))()  # struct io_uring_probe, all zero
        asked = _syscall(
            "io_uring_register", _IO_URING_REGISTER, ring, ctypes.c_uint(_REGISTER_PROBE), probe, ctypes.c_uint(_OPERATIONS)
        )
        return asked if isinstance(asked, Attempt) else Attempt(True)
    finally:
        os.close(result)


def linux_aio() -> Attempt:
    """Try Linux AIO: set up a context of one event, and destroy it. Never raises."""
    if sys.platform == "linux" and platform.machine() not in _IO_SETUP:
        return Attempt(False, f"io_setup was not tried: its number on {platform.machine()} is not known here")
    setup, destroy = _IO_SETUP.get(platform.machine(), (0, 0))
    context = ctypes.c_ulong(0)
    result = _syscall("io_setup", setup, ctypes.c_uint(1), ctypes.byref(context))
    if isinstance(result, Attempt):
        return result
    _syscall("io_destroy", destroy, context)
    return Attempt(True)


def _syscall(name: str, number: int, *arguments: object) -> int | Attempt:
    """Make a system call; return its result, or a failed Attempt that names the error."""
    if sys.platform != "linux":
        return Attempt(False, f"{name} needs Linux, this is {platform.system()}")
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(ctypes.c_long(number), *arguments)
    if result >= 0:
        return result
    code = ctypes.get_errno()
    return Attempt(False, f"{name} failed with {errno.errorcode.get(code, code)} ({os.strerror(code)})")
