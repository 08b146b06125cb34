"""FP8 weights as checkpoints have them: ``float8_e4m3fn``, and a scale for each block of a matrix, in a tensor of its own.

::

    value = float32(code) * float32(scale)      # then rounded to the model's dtype, to nearest, ties to even

A block is a range of rows and of columns, such as 128 x 128 (DeepSeek-V3, Qwen3), a whole row, or the whole matrix. The last
blocks of a matrix may be smaller. A weight of more than two dimensions, such as packed experts, is several matrices.

In host memory a native kernel computes this formula, bit for bit; on a device torch operations do. A NaN stays a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from deepnvme.ops import load_async_io

from .quantization import FLOAT_TYPES, VALUES_AT_A_TIME, processors

__all__ = ["FP8_BLOCK", "ScaledMatrices", "dequantize_fp8", "dequantize_matrices", "distance_fp8", "float32_scales"]

FP8_BLOCK = 128, 128
"""Rows and columns of a block, unless a checkpoint says otherwise."""


@dataclass(frozen=True)
class ScaledMatrices:
    """FP8 matrices of one shape, each with a grid of scales. They are a weight, or a part of the values of a weight."""

    count: int
    """Number of matrices."""
    rows: int
    """Rows of a matrix."""
    columns: int
    """Columns of a matrix."""
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    begin: int = 0
    """Index of the first value in the weight."""

    @classmethod
    def of(cls, shape: Sequence[int], scales: Sequence[int], block: tuple[int, int] = FP8_BLOCK) -> ScaledMatrices:
        """Return the matrices of a weight.

        Args:
            shape: Shape of the weight, [..., rows, columns].
            scales: Shape of the scales: [..., ceil(rows / block rows), ceil(columns / block columns)]. In each of the two last
                dimensions there may be one scale instead, or one for each row or column. [rows], [1] and [] are possible, too.
            block: Rows and columns of a block.

        Raises:
            ValueError: If the scales have another shape.
        """
        *several, rows, columns = shape if len(shape) > 1 else (1, *shape)
        *others, high, wide = scales if len(scales) > 1 else (*(scales or (1,)), 1)
        blocks = _block_of(rows, high, block[0]), _block_of(columns, wide, block[1])
        if others != several or None in blocks:
            wanted = (*several, -(-rows // block[0]), -(-columns // block[1]))
            text = f"a weight of shape {tuple(shape)} has scales of shape {wanted} for blocks of {block[0]} x {block[1]}"
            raise ValueError(f"{text}, or one scale for each row, or one; got the shape {tuple(scales)}")
        return cls(math.prod(several), rows, columns, (blocks[0] or 1, blocks[1] or 1))

    @property
    def numel(self) -> int:
        """Number of values in all matrices together."""
        return self.count * self.rows * self.columns

    @property
    def grid(self) -> tuple[int, int, int]:
        """Shape of the scales: matrices, blocks along the rows, blocks along the columns."""
        return self.count, -(-self.rows // self.block[0]), -(-self.columns // self.block[1])

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """Return the ranges of rows, as (matrix, begin, end), that are dequantised one after the other.

        Each begins with a block, unless the matrix is one block. The order matters when the memory of input and output overlaps.
        """
        step = max(1, VALUES_AT_A_TIME // max(1, self.columns))
        if self.rows > self.block[0]:
            step = max(1, step // self.block[0]) * self.block[0]
        return ((matrix, row, min(row + step, self.rows)) for matrix in range(self.count) for row in range(0, self.rows, step))

    def narrow(self, begin: int, numel: int) -> ScaledMatrices:
        """Return the matrices that are ``numel`` values of a weight from ``begin`` on; their first value has the index 0.

        Raises:
            ValueError: If these values are not whole matrices.
        """
        first, rest = divmod(begin - self.begin, self.rows * self.columns)
        count, odd = divmod(numel, self.rows * self.columns)
        if rest or odd or not 0 <= first <= first + count <= self.count:
            raise ValueError(f"{numel} values from {begin} on are no whole matrices of {self.rows} x {self.columns}")
        return replace(self, count=count, begin=0)


def _block_of(size: int, scales: int, block: int) -> int | None:
    """Return how many rows (or columns) share a scale, of ``size`` that have ``scales``; None if the numbers do not fit."""
    if scales == -(-size // block):
        return block
    return {1: max(size, 1), size: 1}.get(scales)


def distance_fp8(parts: Iterable[ScaledMatrices], itemsize: int) -> int:
    """Return the bytes by which the output of :func:`dequantize_matrices` must begin before its input, at least, if they overlap.

    Args:
        parts: The parts of the weight, in their order.
        itemsize: Bytes of an output value.
    """
    distance = 0
    for part in parts:
        for matrix, begin, end in part.ranges():
            first = part.begin + matrix * part.rows * part.columns
            distance = max(distance, (first + end * part.columns) * itemsize - first - begin * part.columns)
    return distance


def float32_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scales as contiguous float32 in memory of their own. Powers of two may be stored as their exponents (uint8)."""
    if scales.dtype == torch.uint8:
        return (scales.to(torch.float32) - 127).exp2()
    return scales.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def dequantize_fp8(
    weight: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    *,
    block: tuple[int, int] = FP8_BLOCK,
    threads: int | None = None,
) -> None:
    """Dequantise an FP8 weight.

    In host memory, blocks until it is done, with the GIL released. On a device, enqueues torch operations on the current
    stream without waiting for them.

    Args:
        weight: Contiguous, float8_e4m3fn.
        scales: The scales, any floating point dtype, or uint8 for exponents of two. Their shape is as for
            :meth:`ScaledMatrices.of`.
        out: The values: contiguous, of the weight's shape and device, floating point.
        block: Rows and columns of a block.
        threads: Most threads that share the work in host memory; None for as many as there are processors.

    Raises:
        TypeError: If a dtype is wrong. Nothing has been written then.
        ValueError: If a shape or device is wrong. Nothing has been written then.
    """
    if weight.dtype != torch.float8_e4m3fn:
        raise TypeError(f"weight must be float8_e4m3fn, got {weight.dtype}")
    if weight.shape != out.shape or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous and of the shape of out, {tuple(out.shape)}, got {tuple(weight.shape)}")
    part = ScaledMatrices.of(weight.shape, scales.shape, block)
    dequantize_matrices(weight.view(torch.uint8).flatten(), [(part, float32_scales(scales.to(out.device)))], out, threads)


def dequantize_matrices(
    codes: torch.Tensor, parts: Sequence[tuple[ScaledMatrices, torch.Tensor]], out: torch.Tensor, threads: int | None = None
) -> None:
    """Dequantise an FP8 weight whose parts have scales of their own; its memory may overlap that of ``out``.

    Blocks or not as :func:`dequantize_fp8`.

    Args:
        codes: Contiguous uint8 of one dimension, a byte for each value, at any address. If ``out`` overlaps ``codes``, ``out``
            begins at least :func:`distance_fp8` bytes before ``codes`` (not checked).
        parts: The parts in the order of their values, each with its scales: contiguous float32 in memory of their own.
        out: As for :func:`dequantize_fp8`.
        threads: As for :func:`dequantize_fp8`.

    Raises:
        TypeError: If ``out`` is not of floating point. Nothing has been written then.
        ValueError: If a size or device is wrong. Nothing has been written then.
    """
    if not out.dtype.is_floating_point:
        raise TypeError(f"out is {out.dtype}: FP8 is dequantised to floating point")
    if codes.device != out.device or not out.is_contiguous():
        raise ValueError(f"out must be contiguous and on {codes.device}, got strides {out.stride()} on {out.device}")
    scaled = sum(part.numel for part, _ in parts)
    if not codes.numel() == out.numel() == scaled:
        raise ValueError(f"{codes.numel()} codes with scales for {scaled} are no {out.numel()} values")
    for part, scales in parts:
        if scales.numel() != math.prod(part.grid):
            raise ValueError(f"{part} has {math.prod(part.grid)} scales, got {scales.numel()}")
    if out.device.type != "cpu" or out.dtype not in FLOAT_TYPES:
        return _dequantize_with_torch(codes, parts, out)
    described = []
    for part, scales in parts:
        _, high, wide = part.grid
        for matrix, begin, end in part.ranges():
            first = part.begin + (matrix * part.rows + begin) * part.columns
            where = (
                out.data_ptr() + first * out.element_size(),
                scales.data_ptr() + (matrix * high + begin // part.block[0]) * wide * scales.element_size(),
                codes.data_ptr() + first,
            )
            described.append(("fp8", FLOAT_TYPES[out.dtype], end - begin, part.columns, *where, *part.block))
    load_async_io().quantization.dequantize(described, processors(threads))


def _dequantize_with_torch(codes: torch.Tensor, parts: Sequence[tuple[ScaledMatrices, torch.Tensor]], out: torch.Tensor) -> None:
    """Dequantise by torch operations. Arguments as for :func:`dequantize_matrices`."""
    values = out.view(-1)
    for part, scales in parts:
        grids = scales.view(part.grid)
        for matrix, begin, end in part.ranges():
            first = part.begin + (matrix * part.rows + begin) * part.columns
            numel = (end - begin) * part.columns
            block, wide = part.block
            grid = grids[matrix, begin // block : -(-end // block)]
            # By the number of a scale, since a block may be larger than the matrix.
            rows = torch.arange(end - begin, device=out.device) // block
            columns = torch.arange(part.columns, device=out.device) // wide
            found = codes[first : first + numel].view(torch.float8_e4m3fn).float().view(end - begin, part.columns)
            values[first : first + numel] = (found * grid[rows][:, columns]).to(out.dtype).flatten()
