"""Tensors as bytes: which can be stored, views of their memory, checksums, and copies of many at once."""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array

    import torch


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


_CHUNK = 16 << 20  # bytes of a device's tensor that are copied at a time for a checksum


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
