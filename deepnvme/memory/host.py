"""Host memory: aligned and huge pages for direct I/O, address ranges, pages given early, the C library's heap given back."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import TYPE_CHECKING

from .alignment import ALIGNMENT

if TYPE_CHECKING:
    import torch

_HUGE_FROM = 4 << 20  # bytes: two huge pages can lie in it, whatever its address

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_MADV_POPULATE_WRITE = 23
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value


def empty_aligned(nbytes: int) -> torch.Tensor:
    """New memory for direct transfers: ``nbytes`` bytes (rounded up to ALIGNMENT before), contents undefined, of no pool."""
    import torch

    with torch.inference_mode(False):  # what is made in that mode cannot be written to outside of it
        if nbytes < _HUGE_FROM:
            memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu")
            start = -memory.data_ptr() % ALIGNMENT
            return memory[start : start + nbytes]
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)  # measured: 3.1 GB/s read into huge pages, 2.4 into ordinary ones
        memory = torch.frombuffer(pages, dtype=torch.uint8)
    give_pages(memory.data_ptr(), nbytes)
    return memory


def address_range(nbytes: int) -> torch.Tensor:
    """Addresses without memory behind them: zeros, which take nothing, and are not to be written to. ``nbytes``: not 0. Raises
    OSError."""
    memory = reserve_addresses(nbytes)
    map_over(memory.data_ptr(), nbytes, mmap.PROT_READ, mmap.MAP_ANONYMOUS, -1, 0)
    return memory


def reserve_addresses(nbytes: int) -> torch.Tensor:
    """The bytes of a new mapping of no file, which goes with their last view.

    The interpreter's object owns it from the start, and its end is no Python code: Ctrl-C finds no moment to leave it mapped.
    """
    import torch

    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


def map_over(address: int, length: int, protection: int, flags: int, descriptor: int, offset: int) -> None:
    """Put another mapping in place of one, or of a part of it."""
    if _libc.mmap(address, length, protection, flags | mmap.MAP_PRIVATE | _MAP_FIXED, descriptor, offset) == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap of {length} bytes at offset {offset}: {os.strerror(error)}")


def give_pages(address: int, nbytes: int) -> None:
    """Have the kernel find and clear the pages of new memory now, in this thread. Blocks, the GIL released. Memory that has its
    pages stays as it is; kernels before 5.14 give them when they are touched.

    A direct read into memory without pages waits for them block by block, and clears huge ones more than once: 2 GB took 4 times
    as long, and 6 times the processor's time.
    """
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(begin, address + nbytes - begin, _MADV_POPULATE_WRITE)


def give_back_heap() -> None:
    """Have the C library return what was freed. Large tensors leave holes that small ones break up, and are made elsewhere then:
    measured, the states of 16 M parameters that were made and freed 2 MiB at a time left 115 MiB behind."""
    if hasattr(_libc, "malloc_trim"):  # glibc
        _libc.malloc_trim(0)
