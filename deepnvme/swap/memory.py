"""Tensors as bytes: what can be stored, memory to read into, and files as memory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from deepnvme._tensor_memory import give_pages, memory_of

from .extents import ALIGNMENT
from .owner import naming

if TYPE_CHECKING:
    import torch

    from .data_file import DataFile
    from .space import Part

_HUGE_FROM = 4 << 20  # bytes: two huge pages can lie in it, whatever its address
_CHUNK = 16 << 20  # bytes of a device's tensor that are copied at a time for a checksum

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value


def check_storable(name: str, tensor: object) -> None:
    """Raises TypeError for what has no bytes to store."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"'{name}' must be a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "a quantized one" if tensor.is_quantized else tensor.layout
        raise TypeError(f"'{name}' must be a dense tensor, got {kind}; store the dense tensors that it is made of")
    if tensor.is_meta:
        raise TypeError(f"'{name}' is on the meta device and has no data to store")
    if type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
        raise TypeError(f"'{name}' is a {type(tensor).__name__}, which wraps others; store these (a DTensor's to_local())")


def storable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a dense copy of one that is not contiguous. Raises as :func:`check_storable`."""
    check_storable(name, tensor)
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        return tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor


def all_storable(tensors: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """:func:`storable` of each, and its address on the host, 0 for a device's. Everything about a tensor is asked at once:
    column by column took 2.7 times as long for ten thousand, which do not stay in the processor's cache from one to the next."""
    import torch

    usual, strided = (torch.Tensor, torch.nn.Parameter), torch.strided
    dense, addresses = [], []
    for name, tensor in tensors.items():
        plain = (
            type(tensor) in usual
            and tensor.layout is strided
            and tensor.is_contiguous()
            and not (tensor.is_quantized or tensor.is_meta or tensor.is_conj() or tensor.is_neg())
        )
        tensor = tensor if plain else storable(name, tensor)
        dense.append(tensor)
        addresses.append(tensor.data_ptr() if tensor.is_cpu else 0)
    return dense, addresses


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-D view of a contiguous tensor's bytes."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8)


def pieces(parts: Iterable[Part], tensor: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
    """The parts with what each holds of the bytes of a contiguous tensor."""
    start = 0
    for part in parts:
        all_of_it = start == 0 and part.nbytes == tensor.nbytes
        yield part, tensor if all_of_it else flat_bytes(tensor)[start : start + part.nbytes]
        start += part.nbytes


def seen_as(out: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """``out``, or a view of its bytes as another tensor. Raises TypeError or ValueError for one that cannot be read into."""
    import torch

    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a tensor, got {type(out).__name__}")
    nbytes = math.prod(shape) * dtype.itemsize
    if out.nbytes != nbytes or not out.is_contiguous():
        got = f"{out.nbytes} bytes of shape {tuple(out.shape)} with strides {out.stride()}"
        raise ValueError(f"out must be contiguous and of {nbytes} bytes, got {got}")
    out = out.detach()
    if out.dtype == dtype and tuple(out.shape) == shape:
        return out
    if (out.storage_offset() * out.element_size()) % dtype.itemsize:
        raise ValueError(f"out must start at a multiple of {dtype.itemsize} bytes into its storage to be seen as {dtype}")
    return flat_bytes(out).view(dtype).view(shape)


def dtype_named(name: str) -> torch.dtype:
    """Without "torch.". Raises ValueError for one that this torch does not have."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype '{name}'")
    return dtype


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


def checksums(tensor: torch.Tensor, lengths: Iterable[int]) -> tuple[int, ...]:
    """The CRC-32 of the first of the parts of a contiguous tensor, of the first two, and so on; the last is the whole's."""
    crc = 0
    running = []
    start = 0
    data = flat_bytes(tensor)
    for length in lengths:
        for begin in range(start, start + length, _CHUNK):
            part = data[begin : min(begin + _CHUNK, start + length)].cpu()
            with memory_of(part) as view:
                crc = zlib.crc32(view, crc)
        running.append(crc)
        start += length
    return tuple(running)


def map_files(parts: Iterable[tuple[DataFile, int, int]], nbytes: int) -> torch.Tensor:
    """Bytes that stand for those in the files, one part after the other: private, copied when written to.

    ``parts``: file, offset and length of each; all but the last are multiples of ALIGNMENT. The mapping goes with the last view
    of the tensor, and needs no descriptor. Raises OSError.
    """
    import torch

    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = _anonymous(nbytes)  # the whole range first, so that the parts can lie side by side in it
    place = memory.data_ptr()
    for file, offset, length in parts:
        with naming(file.path):
            size = os.fstat(file.descriptor).st_size
            if offset + length > size:  # a page past the end would end the process when it is touched
                text = f"bytes [{offset}, {offset + length}) are to be mapped, and the file was cut off at byte {size}"
                raise OSError(errno.EBADMSG, text)
            _map_over(place, length, mmap.PROT_READ | mmap.PROT_WRITE, 0, file.descriptor, offset)
        place += length
    return memory


def address_range(nbytes: int) -> torch.Tensor:
    """Addresses without memory behind them: zeros, which take nothing, and are not to be written to. ``nbytes``: not 0. Raises
    OSError."""
    memory = _anonymous(nbytes)
    _map_over(memory.data_ptr(), nbytes, mmap.PROT_READ, mmap.MAP_ANONYMOUS, -1, 0)
    return memory


def _anonymous(nbytes: int) -> torch.Tensor:
    """The bytes of a new mapping of no file, which goes with their last view.

    The interpreter's object owns it from the start, and its end is no Python code: Ctrl-C finds no moment to leave it mapped.
    """
    import torch

    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


def _map_over(address: int, length: int, protection: int, flags: int, descriptor: int, offset: int) -> None:
    """Put another mapping in place of one, or of a part of it."""
    if _libc.mmap(address, length, protection, flags | mmap.MAP_PRIVATE | _MAP_FIXED, descriptor, offset) == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap of {length} bytes at offset {offset}: {os.strerror(error)}")
