"""Tensors as bytes: which tensors can be stored, views of their memory, checksums, and copying many at once."""

from __future__ import annotations

import ctypes
import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deepnvme.ops import load_async_io

if TYPE_CHECKING:
    from typing_extensions import Buffer


def memory_of(tensor: torch.Tensor, start: int = 0, count: int | None = None) -> memoryview:
    """Return a memoryview of a contiguous CPU tensor's memory, which keeps the tensor alive.

    Args:
        tensor: Contiguous tensor of bytes (uint8) on the CPU.
        start: First byte of the view.
        count: Bytes in the view; None for all from ``start`` on.
    """
    nbytes = tensor.nbytes - start if count is None else count
    memory: Any = (ctypes.c_char * nbytes).from_address(tensor.data_ptr() + start)
    memory.tensor = tensor  # of a temporary one, as after .cpu(), the memory would be freed
    return memoryview(memory).cast("B")


def crc32(data: Buffer, crc: int = 0) -> int:
    """Return what ``zlib.crc32`` returns, computed at the speed of memory and, from 64 KiB on, without the GIL.

    From 16 MiB on, up to 4 threads compute it, and at most half as many as there are processors.

    Args:
        data: Contiguous bytes of one dimension, such as :func:`memory_of` a tensor.
        crc: The CRC-32 of the bytes that precede ``data``.
    """
    found: int = load_async_io().memory.crc32(data, crc)
    return found


def copy_many(destinations: array[int], sources: array[int], lengths: array[int]) -> None:
    """Copy ``lengths[i]`` bytes from address ``sources[i]`` to address ``destinations[i]``, for each i. Blocks until done.

    Gathers many tensors into one buffer, or scatters them, in one call. It runs at the speed of memory however small the
    pieces are, without the GIL. From 16 MiB on it uses one thread for each 8 MiB, but at most 8 and no more than the process
    has cores.

    Addresses and lengths are not checked. The caller must keep the memory allocated, and the arrays unchanged, until this
    returns. No range that is written to may overlap another range.

    Args:
        destinations: Host addresses, such as a CPU tensor's ``data_ptr()``, as an ``array.array("Q")`` or another contiguous
            buffer of uint64.
        sources: Host addresses, in the same form and of the same length.
        lengths: Bytes, in the same form and of the same length. Where a length is 0, its addresses may be anything.

    Raises:
        TypeError: If an argument is a buffer of another type.
        ValueError: If the arrays differ in length, or an address is 0.
    """
    load_async_io().memory.copy_many(destinations, sources, lengths)


def crc32_mismatches(memory: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, expected: torch.Tensor) -> list[int]:
    """Return the indices of ranges of memory whose CRC-32 is another one. Blocks, without the GIL, in this thread.

    Args:
        memory: Contiguous uint8 tensor of one dimension on the CPU.
        starts: First byte of each range, int64. Not checked.
        lengths: Bytes of each range, int64. Not checked.
        expected: CRC-32 of each range, int64.
    """
    found: list[int] = load_async_io().memory.crc32_mismatches(
        _words(starts + memory.data_ptr()), _words(lengths), _words(expected)
    )
    return found


def stack_ranges(
    memory: torch.Tensor, starts: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...],
    empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None,
) -> torch.Tensor:  # fmt: skip
    """Return tensors that lie in memory as one tensor, whose first dimension counts them. Blocks for a copy, without the GIL.

    Args:
        memory: Contiguous uint8 tensor of one dimension on the CPU, whose address is a multiple of the size of any dtype.
        starts: First byte of each tensor, int64. Not checked.
        dtype: Dtype of all tensors.
        shape: Shape of all tensors.
        empty: Returns a new tensor of a shape and dtype. None if the result need not be contiguous.

    Returns:
        A view of the memory if the tensors follow one another, or if ``empty`` is None and the distance between all of them is
        the same. Otherwise a copy. No two tensors of the result share bytes.
    """
    count, nbytes = len(starts), math.prod(shape) * dtype.itemsize
    if count and nbytes:
        begin = int(starts[0])
        step = int(starts[1]) - begin if count > 1 and empty is None else nbytes
        aligned = begin % dtype.itemsize == 0 and step % dtype.itemsize == 0
        if aligned and step >= nbytes and torch.equal(starts, begin + step * torch.arange(count)):
            values = memory[begin : begin + (count - 1) * step + nbytes].view(dtype)
            return values.as_strided((count, *shape), (step // dtype.itemsize, *contiguous_strides(shape)))
    stacked = (empty or _empty)((count, *shape), dtype)
    targets = stacked.data_ptr() + nbytes * torch.arange(count)
    lengths = torch.full_like(starts, nbytes)
    load_async_io().memory.copy_many(_words(targets), _words(starts + memory.data_ptr()), _words(lengths))
    return stacked


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def _words(numbers: torch.Tensor) -> memoryview:
    """Return an int64 tensor as a buffer of uint64."""
    return memory_of(flat_bytes(numbers.contiguous())).cast("Q")


_CHUNK = 64 << 20  # bytes copied from a device at a time for a checksum; in between, Ctrl-C is seen


def check_storable(name: str, tensor: object) -> None:
    """Check that a value is a dense tensor with data that can be stored.

    Args:
        name: What to call the tensor in the error.
        tensor: The value to check.

    Raises:
        TypeError: If it is not a tensor, or is sparse, nested, quantised, on the meta device, or a subclass that wraps other
            tensors.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"'{name}' must be a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "a quantized one" if tensor.is_quantized else "a nested one" if tensor.is_nested else tensor.layout
        raise TypeError(f"'{name}' must be a dense tensor, got {kind}; store the dense tensors that it is made of")
    if tensor.is_meta:
        raise TypeError(f"'{name}' is on the meta device and has no data to store")
    if type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
        raise TypeError(f"'{name}' is a {type(tensor).__name__}, which wraps others; store these (a DTensor's to_local())")


def flat_bytes(source: torch.Tensor | torch.UntypedStorage) -> torch.Tensor:
    """Return a one-dimensional view of the bytes of a contiguous tensor or of a storage."""
    if isinstance(source, torch.Tensor):
        return source.detach().reshape(-1).view(torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of this shape."""
    # To ask a tensor on the meta device takes longer than making a view, and ten thousand tensors may have as many shapes.
    strides = itertools.accumulate(reversed(shape[1:]), lambda stride, size: stride * max(size, 1), initial=1)
    return tuple(strides)[::-1] if shape else ()


def span_nbytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Return the bytes from the first element to the end of the last; 0 if there are no elements."""
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return 0 if 0 in shape else (last + 1) * itemsize


def viewed_as(out: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return ``out``, or a view of its bytes with another dtype and shape, to read a tensor into.

    Raises:
        TypeError: If ``out`` is not a tensor.
        ValueError: If ``out`` is not contiguous, has another number of bytes, or starts at an offset into its storage that is not
            a multiple of the dtype's size.
    """
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
    """Return the dtype with this name, given without "torch.".

    Raises:
        ValueError: If this version of torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype '{name}'")
    return dtype


def checksums(tensor: torch.Tensor, lengths: Iterable[int]) -> tuple[int, ...]:
    """Return running CRC-32 values of the consecutive parts of a contiguous tensor.

    Args:
        tensor: Contiguous tensor, on any device.
        lengths: Bytes of each part, in order.

    Returns:
        The CRC-32 of the first part, of the first two together, and so on. The last is the CRC-32 of all parts.
    """
    crc = 0
    running = []
    start = 0
    data = flat_bytes(tensor)
    for length in lengths:
        for begin in range(start, start + length, _CHUNK):
            part = data[begin : min(begin + _CHUNK, start + length)].cpu()
            with memory_of(part) as view:
                crc = crc32(view, crc)
        running.append(crc)
        start += length
    return tuple(running)
