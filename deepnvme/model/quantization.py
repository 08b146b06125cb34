"""Quantisation of weights to int8 or int4: half or a quarter of the bytes to read, dequantised to the model's dtype when read.

A weight is treated as a matrix of rows. A row is the last dimension, joined with the dimensions before it (the first excepted)
until it has 64 values. So a Linear or an Embedding has one row per output, fused experts (expert, out, in) one per expert and
output, a convolution one per output channel. All arithmetic is in float32, rounded to nearest, ties to even.

``"int8"``, symmetric by output channel::

    scale = amax(abs(row)) / 127                             # float32
    code  = round(clamp(row / scale, -127, 127))             # int8; 0 where scale is 0
    value = code * scale                                     # then rounded to the model's dtype

``"int4"``, asymmetric by groups of 128 values along the row (the last may be shorter), as in DeepSpeed's ZeRO-Inference::

    least = bfloat16(amin(group))
    scale = bfloat16((amax(group) - amin(group)) / 15)
    code  = round(clamp((group - least) / scale, 0, 15))     # 0 where scale is 0
    value = code * scale + least                             # two roundings, then to the model's dtype

A quantised weight is one range of bytes: scales, zeros up to a multiple of 64 bytes, then codes; both row by row, little-endian.
For int4 the scales are pairs (scale, least), and a group of n values has ceil(n / 2) bytes of codes: byte j holds value j in its
low four bits and value j + ceil(n / 2), or 0 if there is none, in its high four.

In host memory native kernels compute these formulas, bit for bit; on a device torch operations do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from deepnvme.memory.alignment import padded
from deepnvme.ops import load_async_io

__all__ = [
    "ALIGNMENT",
    "GROUP",
    "SCHEMES",
    "VALUES_AT_A_TIME",
    "QuantizedLayout",
    "Scheme",
    "dequantize",
    "dequantize_with_torch",
    "is_worth_quantizing",
    "quantize",
]

Scheme = Literal["int8", "int4"]
"""How a weight is quantised; the module's docstring has the formulas."""
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
"""All quantisation schemes."""
GROUP = 128
"""Number of int4 values that share a scale."""
ALIGNMENT = 64
"""Codes, and weights in an extent, begin at a multiple of this many bytes, for the processor's widest vectors."""

_LEAST_NUMEL = 4096
_LEAST_COLUMNS = 64
_LARGEST = 2.0**126
FLOAT_TYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""Dtypes that native kernels dequantise to, with the names that the kernels have for them."""
VALUES_AT_A_TIME = 1 << 22  # values dequantised at a time; torch needs some 12 bytes of temporary memory for each


@dataclass(frozen=True)
class QuantizedLayout:
    """Sizes and offsets of the scales and codes of a quantised weight."""

    scheme: Scheme
    """How the weight is quantised."""
    rows: int
    """Number of rows of the weight, seen as a matrix."""
    columns: int
    """Values in a row."""

    @classmethod
    def of(cls, scheme: Scheme, shape: Sequence[int]) -> QuantizedLayout:
        """Return the layout of a weight of this shape.

        Raises:
            ValueError: If the scheme is neither int8 nor int4, or the shape has fewer than 2 dimensions.
        """
        if scheme not in SCHEMES:
            raise ValueError(f"quantize must be one of {', '.join(SCHEMES)}, got {scheme!r}")
        if len(shape) < 2:
            raise ValueError(f"a weight of at least 2 dimensions can be quantised, got the shape {tuple(shape)}")
        first = len(shape) - 1
        while first > 1 and math.prod(shape[first:]) < _LEAST_COLUMNS:
            first -= 1
        columns = math.prod(shape[first:])
        return cls(scheme, math.prod(shape[:first]) if columns else 0, columns)

    @property
    def groups(self) -> int:
        """Number of int4 groups in a row."""
        return -(-self.columns // GROUP)

    @property
    def scales_nbytes(self) -> int:
        """Bytes of all scales of the weight together."""
        return self.rows * (4 if self.scheme == "int8" else 4 * self.groups)

    @property
    def row_of_codes(self) -> int:
        """Bytes of the codes of a row."""
        if self.scheme == "int8":
            return self.columns
        return self.columns // GROUP * (GROUP // 2) + -(-(self.columns % GROUP) // 2)

    @property
    def codes_at(self) -> int:
        """Where the codes begin, in bytes from the start of the quantised weight."""
        return padded(self.scales_nbytes, ALIGNMENT)

    @property
    def nbytes(self) -> int:
        """Bytes of the quantised weight, scales and codes."""
        return self.codes_at + self.rows * self.row_of_codes

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Return the ranges of rows, as (begin, end), that :func:`dequantize` processes one after the other.

        The order matters when the memory of its input and output overlaps.
        """
        step = max(1, VALUES_AT_A_TIME // max(1, self.columns))
        return ((begin, min(begin + step, self.rows)) for begin in range(0, self.rows, step))

    def distance(self, itemsize: int) -> int:
        """Return the bytes by which the output of :func:`dequantize` must begin before its input, at least, if they overlap.

        Args:
            itemsize: Bytes of an output value.
        """
        row = self.columns * itemsize
        return max(0, *(end * row - self.codes_at - begin * self.row_of_codes for begin, end in self.pieces()), 0)


def is_worth_quantizing(scheme: Scheme, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether a store quantises a weight of this shape and dtype.

    True for float32, float16 and bfloat16, at least 2 dimensions and 4096 values, if the weight becomes smaller.

    Raises:
        ValueError: If the scheme is neither int8 nor int4.
    """
    if dtype not in FLOAT_TYPES or len(shape) < 2 or math.prod(shape) < _LEAST_NUMEL:
        return False
    return QuantizedLayout.of(scheme, shape).nbytes < math.prod(shape) * dtype.itemsize


def quantize(
    weight: torch.Tensor, scheme: Scheme, out: torch.Tensor | None = None, *, name: str = "weight", threads: int | None = None
) -> torch.Tensor:
    """Quantise a weight. Blocks, with the GIL released.

    Args:
        weight: float32, float16 or bfloat16, at least 2 dimensions. Copied if it is not contiguous or not in host memory.
        scheme: "int8" or "int4".
        out: Where to write the result: contiguous uint8 of one dimension in host memory, with exactly
            ``QuantizedLayout.of(scheme, weight.shape).nbytes`` bytes. None to allocate it. Its content is undefined after an
            error.
        name: Name of the weight, for errors.
        threads: Most threads to use; None for as many as there are processors.

    Returns:
        The quantised bytes, a uint8 tensor of one dimension: ``out`` if it was given.

    Raises:
        ValueError: If a value is not finite or beyond 2**126 (the message names the weight and the index), or a size is
            wrong.
        TypeError: If ``weight`` or ``out`` has another dtype.
    """
    layout = QuantizedLayout.of(scheme, weight.shape)
    if weight.dtype not in FLOAT_TYPES:
        raise TypeError(f"'{name}' is {weight.dtype}: float32, float16 and bfloat16 can be quantised")
    if out is None:
        out = torch.empty(layout.nbytes, dtype=torch.uint8)
    _check_bytes(layout, out, on_host=True)
    values = weight.detach().to("cpu").contiguous()
    out[layout.scales_nbytes : layout.codes_at].zero_()
    described = _described(layout, values, out, out, (0, layout.rows))
    refused = load_async_io().quantization.quantize(described, processors(threads))
    if refused is not None:
        raise ValueError(_refusal(name, values, layout, refused))
    return out


def dequantize(scheme: Scheme, source: torch.Tensor, out: torch.Tensor, *, threads: int | None = None) -> None:
    """Dequantise a weight into a float32, float16 or bfloat16 tensor, whose memory may overlap that of the quantised bytes.

    In host memory, blocks until it is done, with the GIL released. On a device, enqueues torch operations on the current
    stream without waiting for them.

    Args:
        scheme: "int8" or "int4".
        source: Contiguous uint8 as :func:`quantize` returns it, at any address.
        out: The values: contiguous, of the weight's shape, on the device of ``source``. If ``out`` overlaps ``source``, then
            ``source`` is partly overwritten, and ``out`` has to begin at least ``QuantizedLayout.distance`` bytes before
            ``source`` (not checked). ``out`` may end where ``source`` ends.
        threads: Most threads that share the work in host memory, fewer if there is little to do; None for as many as there
            are processors.

    Raises:
        TypeError: If a dtype is wrong. Nothing has been written then.
        ValueError: If a shape, size or device is wrong. Nothing has been written then.
    """
    layout = QuantizedLayout.of(scheme, out.shape)
    if out.dtype not in FLOAT_TYPES:
        raise TypeError(f"out is {out.dtype}: float32, float16 and bfloat16 can be dequantised to")
    if source.device != out.device or not out.is_contiguous():
        raise ValueError(f"out must be contiguous and on {source.device}, got strides {out.stride()} on {out.device}")
    _check_bytes(layout, source)
    if out.device.type != "cpu":
        return dequantize_with_torch(layout, source, out)
    scales, pieces = source, [(0, layout.rows)]
    if out.data_ptr() < source.data_ptr() + source.nbytes and source.data_ptr() < out.data_ptr() + out.nbytes:  # they overlap
        scales, pieces = source[: layout.scales_nbytes].clone(), list(layout.pieces())
    described = [_described(layout, out, source, scales, rows) for rows in pieces]
    load_async_io().quantization.dequantize(described, processors(threads))


def dequantize_with_torch(layout: QuantizedLayout, source: torch.Tensor, out: torch.Tensor) -> None:
    """Dequantise one weight by torch operations, which are enqueued on a device's current stream.

    Args:
        layout: How the weight is quantised, and its number of rows and columns.
        source: Contiguous uint8 of ``layout.nbytes`` bytes: scales and codes.
        out: The values: contiguous, on the device of ``source``, whose memory it may overlap as for :func:`dequantize`.
    """
    scales = source[: layout.scales_nbytes].clone()  # copied: a view in another dtype requires an aligned address
    codes = source[layout.codes_at :].view(layout.rows, layout.row_of_codes)
    for begin, end in layout.pieces():
        rows = slice(begin, end)
        if layout.scheme == "int8":
            values = codes[rows].view(torch.int8).float() * scales.view(torch.float32)[rows, None]
        else:
            pairs = scales.view(torch.bfloat16).view(layout.rows, layout.groups, 2)[rows].float()
            scale, least = pairs.repeat_interleave(GROUP, dim=1)[:, : layout.columns].unbind(-1)
            values = _unpacked(codes[rows], layout.columns).float() * scale + least
        out.view(layout.rows, layout.columns)[rows] = values.to(out.dtype)


def _unpacked(codes: torch.Tensor, columns: int) -> torch.Tensor:
    """Unpack int4 codes: [rows, bytes] -> [rows, columns], values from 0 to 15."""
    whole = columns // GROUP * (GROUP // 2)
    groups = codes[:, :whole].reshape(len(codes), -1, GROUP // 2)
    last = codes[:, whole:]
    parts = (torch.cat((packed & 15, packed >> 4), dim=-1).view(len(codes), -1) for packed in (groups, last))
    return torch.cat(tuple(parts), dim=1)[:, :columns]


def _check_bytes(layout: QuantizedLayout, tensor: torch.Tensor, on_host: bool = False) -> None:
    """Raise TypeError or ValueError if a tensor cannot hold a weight quantised with this layout."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise TypeError(f"quantised weights are contiguous uint8 of one dimension, got {tensor.dtype} of {tuple(tensor.shape)}")
    if tensor.nbytes != layout.nbytes:
        what = f"{layout.rows} x {layout.columns} in {layout.scheme}"
        raise ValueError(f"quantised weights of {what} take {layout.nbytes} bytes, got {tensor.nbytes}")
    if on_host and tensor.device.type != "cpu":
        raise ValueError(f"weights are quantised in host memory, got {tensor.device}")


def _described(
    layout: QuantizedLayout, values: torch.Tensor, quantized: torch.Tensor, scales: torch.Tensor, rows: tuple[int, int]
) -> tuple[str | int, ...]:
    """Return the arguments that the native kernels take for a range of rows of a weight.

    They are: scheme, dtype, number of rows and columns, and the addresses of values, scales and codes.

    Args:
        layout: The weight's layout.
        values: The weight's values.
        quantized: The quantised bytes, of which only the codes are used.
        scales: Memory that begins with the scales.
        rows: First row of the range, and the row after the last.
    """
    begin, end = rows
    where = (
        values.data_ptr() + begin * layout.columns * values.element_size(),
        scales.data_ptr() + begin * (layout.scales_nbytes // max(1, layout.rows)),
        quantized.data_ptr() + layout.codes_at + begin * layout.row_of_codes,
    )
    return (layout.scheme, FLOAT_TYPES[values.dtype], end - begin, layout.columns, *where)


def _refusal(name: str, values: torch.Tensor, layout: QuantizedLayout, row: int) -> str:
    """Return the message about the first value in a row that cannot be quantised."""
    wrong = ~(values.view(layout.rows, layout.columns)[row].float().abs() <= _LARGEST)
    at = row * layout.columns + int(wrong.nonzero()[0])
    place = [int(index) for index in torch.unravel_index(torch.tensor(at), values.shape)]
    value = values[tuple(place)].item()
    return f"'{name}' holds {value} at {place}, and {layout.scheme} takes finite values up to 2**126: mend it, or do not quantise"


def processors(threads: int | None) -> int:
    """Return the number of threads to use: ``threads``, or the number of processors if None. Raises ValueError below 1."""
    if threads is None:
        return len(os.sched_getaffinity(0))
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    return threads
