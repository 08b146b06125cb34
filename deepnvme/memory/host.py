"""Host memory: aligned and huge pages for direct I/O, address ranges, pages populated early, and trimming of the C heap."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time

import torch

from .alignment import ALIGNMENT

_HUGE_FROM = 4 << 20  # bytes: memory this long can use huge pages, whatever its address

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_MADV_NOHUGEPAGE = 15
_MADV_POPULATE_WRITE = 23
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value


def empty_aligned(nbytes: int) -> torch.Tensor:
    """Return a new tensor of uninitialised bytes on the CPU, aligned to ALIGNMENT for direct I/O. It belongs to no pool.

    From 4 MiB on, the memory is on huge pages if the kernel has them, and its pages are populated before this returns
    (see :func:`prefault`).

    Args:
        nbytes: Bytes. Must already be a multiple of ALIGNMENT.
    """
    with torch.inference_mode(False):  # a tensor made in inference mode cannot be written to outside of it
        if nbytes < _HUGE_FROM:
            memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu")
            start = -memory.data_ptr() % ALIGNMENT
            return memory[start : start + nbytes]
        memory = huge_pages(nbytes)
    prefault(memory.data_ptr(), nbytes)
    return memory


def huge_pages(nbytes: int, skipped: int = 0) -> torch.Tensor:
    """Return a new uint8 tensor of zeros on the CPU, on huge pages if the kernel has them. Pages are populated when touched.

    Args:
        nbytes: Bytes of the tensor.
        skipped: Bytes to leave unused between a page boundary and the start of the tensor and its storage.
    """
    return torch.frombuffer(private_mapping(skipped + nbytes), dtype=torch.uint8, offset=skipped)


def private_mapping(nbytes: int) -> mmap.mmap:
    """Return a new mapping of zeros, on huge pages if the kernel has them. They are populated when they are touched.

    Raises:
        OSError: If the kernel refuses.
    """
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # Python does not know of huge pages, or the kernel has none
        pages.madvise(mmap.MADV_HUGEPAGE)  # measured: 3.1 GB/s read into huge pages, 2.4 into ordinary ones
    return pages


def address_range(nbytes: int) -> torch.Tensor:
    """Return a tensor of zeros that takes up addresses but no memory. It is read-only: writing to it ends the process.

    Args:
        nbytes: Bytes of the range; not 0.

    Raises:
        OSError: If the addresses cannot be mapped.
    """
    memory = reserve_addresses(nbytes)
    map_over(memory.data_ptr(), nbytes, mmap.PROT_READ, mmap.MAP_ANONYMOUS, -1, 0)
    return memory


def reserve_addresses(nbytes: int) -> torch.Tensor:
    """Return a new private anonymous mapping as a tensor of bytes. It is unmapped with the last view of the tensor.

    The interpreter's mmap object owns the mapping from the start, and no Python code runs when it is unmapped. So there is no
    moment at which Ctrl-C could leave it mapped.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


def map_over(address: int, length: int, protection: int, flags: int, descriptor: int, offset: int) -> None:
    """Replace a mapping, or a part of one, by another private mapping (``mmap`` with MAP_FIXED).

    Args:
        address: Where to map.
        length: Bytes to map.
        protection: ``PROT_`` flags.
        flags: ``MAP_`` flags besides MAP_PRIVATE and MAP_FIXED.
        descriptor: The file to map, or -1.
        offset: Bytes from the start of the file.

    Raises:
        OSError: If the kernel refuses.
    """
    if _libc.mmap(address, length, protection, flags | mmap.MAP_PRIVATE | _MAP_FIXED, descriptor, offset) == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap of {length} bytes at offset {offset}: {os.strerror(error)}")


def prefault(address: int, nbytes: int) -> None:
    """Allocate and clear the pages of new memory now, in this thread, by the kernel. Blocks, without holding the GIL.

    Pages that are already allocated stay as they are. Before Linux 5.14 this has no effect: pages are allocated when they are
    touched.

    A direct read into memory without pages waits for the pages of each I/O block, and clears huge pages more than once:
    reading 2 GB took 4 times as long, and 6 times the CPU time.
    """
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(begin, address + nbytes - begin, _MADV_POPULATE_WRITE)


def populate_huge_pages(address: int, nbytes: int) -> bool:
    """Populate memory from :func:`huge_pages`, unless huge pages were slow within the last second. Blocks.

    A virtual machine reports free huge pages to its host, which takes their memory away. Measured: huge pages that the host
    had taken came at 0.5 GB/s, other huge pages at 7 GB/s. Ordinary pages, which are not reported, came at 2.2 GB/s.

    Returns:
        Whether the memory is populated. If not, it gets ordinary pages when it is touched or prefaulted.
    """
    global _slow_until
    if time.monotonic() < _slow_until:
        begin = address // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(begin, address + nbytes - begin, _MADV_NOHUGEPAGE)
        return False
    begun = time.thread_time()  # without the time in which other threads have the processor
    prefault(address, nbytes)
    if nbytes >= _HUGE_FROM and nbytes < (time.thread_time() - begun) * _FAST_HUGE_PAGES:
        _slow_until = time.monotonic() + 1
    return True


_FAST_HUGE_PAGES = 3e9
"""Bytes a second. Memory that is populated more slowly has no huge pages, or huge pages that are slower than ordinary ones."""
_slow_until = 0.0
"""Until when (``time.monotonic()``) huge pages are not used for the parts of a read."""


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2, as its ten numbers. The ninth is the freed bytes that the heap keeps."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


_mallinfo2 = getattr(_libc, "mallinfo2", None)  # glibc 2.33 and later
if _mallinfo2 is not None:
    _mallinfo2.restype = _MallocInfo


def trim_heap(beyond: int = 0) -> None:
    """Return freed memory of the C heap to the system, if the heap keeps more than ``beyond`` bytes of it.

    Later allocations need new pages, which take 0.2 s for each GB. Without glibc nothing happens; before glibc 2.33, nothing
    happens if ``beyond`` is not 0.

    Freeing large tensors leaves holes in the heap. Small allocations break the holes up, so that the next large tensors do not
    fit. Measured: making and freeing the optimizer states of 16 M parameters 2 MiB at a time left 115 MiB behind.
    """
    if hasattr(_libc, "malloc_trim") and (not beyond or (_mallinfo2 is not None and _mallinfo2().numbers[8] > beyond)):
        _libc.malloc_trim(0)
