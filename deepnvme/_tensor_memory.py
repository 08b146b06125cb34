"""The bytes of host tensors: one's as Python sees them, without numpy, which need not be there; and those of many, copied."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array

    import torch

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_POPULATE_WRITE = 23
_PAGE = mmap.PAGESIZE


def memory_of(tensor: torch.Tensor, start: int = 0, count: int | None = None) -> memoryview:
    """``count`` bytes from ``start`` on, or all, of a contiguous tensor of bytes. Valid for as long as the tensor is."""
    nbytes = tensor.nbytes - start if count is None else count
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr() + start)).cast("B")


def copy_many(destinations: array[int], sources: array[int], lengths: array[int]) -> None:
    """Copy ``lengths[i]`` bytes from the address ``sources[i]`` to ``destinations[i]``, for each i; blocks until done.

    At the speed of memory however small the pieces: gathers tensors into a buffer, or scatters them, in one call. Without the
    GIL, and from 16 MiB on with the help of a second thread.

    The three are as long, each an ``array.array("Q")`` (or another contiguous buffer of uint64), and addresses of the host, such
    as a CPU tensor's ``data_ptr()``. Nothing checks them: whoever calls keeps the memory allocated, and the arrays unchanged,
    until this returns. No range that is written to may overlap another. Where the length is 0 the addresses may be anything.

    Raises TypeError for buffers of anything else, ValueError for different lengths of the arrays or an address of 0.
    """
    from deepnvme.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder().load().copy_many(destinations, sources, lengths)


def give_pages(address: int, nbytes: int) -> None:
    """Have the kernel find and clear the pages of new memory now, in this thread. Blocks, the GIL released. Memory that has its
    pages stays as it is; kernels before 5.14 give them when they are touched.

    A direct read into memory without pages waits for them block by block, and clears huge ones more than once: 2 GB took 4 times
    as long, and 6 times the processor's time.
    """
    begin = address // _PAGE * _PAGE
    _libc.madvise(begin, address + nbytes - begin, _MADV_POPULATE_WRITE)
