"""Scales of rows in FP8, which stay in memory while the rows are read from the drive."""

from __future__ import annotations

import torch

from deepnvme.model.fp8 import FP8_BLOCK, ScaledMatrices, dequantize_matrices, float32_scales

from .layout import Column


class RowScales:
    """Scales with which rows in FP8 are dequantised as they are read: see :meth:`Table.open`.

    Args:
        scales: The scales, in any floating point dtype, or uint8 for exponents of two: one for the table, one for each row,
            or one for each block of rows and columns, [ceil(rows / block rows), ceil(columns / block columns)]. A float32 copy
            stays in memory.
        dtype: Dtype of the values, of floating point.
        block: Rows and columns of a block.

    Raises:
        TypeError: If ``dtype`` is not of floating point.
    """

    def __init__(self, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16, *, block: tuple[int, int] = FP8_BLOCK) -> None:
        if not dtype.is_floating_point:
            raise TypeError(f"dtype is {dtype}: FP8 is dequantised to floating point")
        self.dtype = dtype
        """Dtype of the values."""
        self._shape, self._block = tuple(scales.shape), block
        self._scales = float32_scales(scales.detach().cpu())

    def check(self, rows: int, values: Column) -> None:
        """Check that these are scales of the rows of a table.

        Args:
            rows: Number of rows of the table.
            values: Dtype and shape of a row in its file.

        Raises:
            ValueError: If they are not.
        """
        if values.dtype != torch.float8_e4m3fn or len(values.shape) != 1:
            raise ValueError(f"scales are for rows of float8_e4m3fn with one dimension, got {values.dtype} of {values.shape}")
        self._matrices(rows, values.shape[0])

    def dequantize(self, rows: int, numbers: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
        """Dequantise some rows of a table. Blocks.

        Args:
            rows: Number of rows of the table.
            numbers: Row numbers (int64), of any shape.
            codes: The rows as they were read, of shape ``(*numbers.shape, columns)``, contiguous, on the CPU.
            out: The values: of the shape of ``codes``, :attr:`dtype`, any strides, any device.
        """
        columns = codes.shape[-1]
        whole = self._matrices(rows, columns)
        _, high, wide = whole.grid
        scales = self._scales.view(high, wide)[numbers.flatten() // whole.block[0]]
        some = ScaledMatrices(1, numbers.numel(), columns, (1, whole.block[1]))
        values = out if out.is_contiguous() and out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype)
        dequantize_matrices(codes.view(torch.uint8).view(-1), [(some, scales)], values.detach())
        if values is not out:
            with torch.no_grad():
                out.copy_(values)

    def _matrices(self, rows: int, columns: int) -> ScaledMatrices:
        return ScaledMatrices.of((rows, columns), self._shape, self._block)
