"""A read of rows for a caller: the memory that they are read into, and the tensor that they are delivered in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from deepnvme.memory.alignment import ALIGNMENT, padded
from deepnvme.memory.host import empty_aligned

from .layout import TableLayout
from .reading import Batch, FailedRow, RowReader

if TYPE_CHECKING:
    from deepnvme.ops.aio.async_io_op.tables import RowBatch

_HUGE_FROM = 4 << 20
"""Bytes of a result that is on huge pages: with others, 32 MiB of rows took twice as long, most of it to allocate pages."""


class PartialRows(NamedTuple):
    """What could be read, with ``errors="partial"``."""

    rows: torch.Tensor
    """As :meth:`Table.read` returns them. Those that could not be read have undefined values."""
    failed: tuple[FailedRow, ...]
    """Rows that could not be read, each once; empty if all could."""
    positions: torch.Tensor
    """Where these are in ``ids.flatten()``, int64, ascending."""


@dataclass(eq=False)
class RowRead:
    """Rows that are being read for a caller."""

    numbers: torch.Tensor
    rows: torch.Tensor
    """What is read, in host memory."""
    result: torch.Tensor
    """What the caller gets."""
    width: int
    """Bytes of each record that are copied, from its beginning."""
    admit: bool
    """Whether all rows stay in memory as far as there is room."""
    in_place: bool = True
    """Whether ``rows`` is the memory that ``result`` had when the read began, so that nothing has to be copied there."""
    batch: Batch | None = None
    reader: RowReader | None = None
    pid: int = 0
    generation: int = -1
    """The table's when it was started."""

    @classmethod
    def of_values(cls, numbers: torch.Tensor, out: torch.Tensor | None, layout: TableLayout) -> RowRead:
        """Return a read of rows without their states that has not begun.

        Args:
            numbers: Checked numbers of rows.
            out: Where the caller wants them, on any device; None for a new tensor.
            layout: The table's.

        Raises:
            TypeError: If ``out`` has another dtype.
            ValueError: If ``out`` has another shape.
        """
        dtype, shape = layout.values.dtype, (*numbers.shape, *layout.values.shape)
        if out is not None:
            if out.dtype != dtype:
                raise TypeError(f"out must be of the table's dtype {dtype}, got {out.dtype}")
            if tuple(out.shape) != shape:
                raise ValueError(f"out must have the shape {shape}, got {tuple(out.shape)}")
        if out is not None and _is_plain(out):
            return cls(numbers, out.detach(), out, layout.values.nbytes, admit=False)
        rows = _new_rows(shape, dtype, pinned=out is not None and out.device.type == "cuda")
        return cls(numbers, rows, rows if out is None else out, layout.values.nbytes, admit=False, in_place=out is None)

    @property
    def native(self) -> RowBatch:
        """The native part of the read, once it was started."""
        assert self.batch is not None
        return self.batch.native

    def delivered(self) -> torch.Tensor:
        """Return the caller's tensor, which has the rows that were read."""
        if not self.in_place:
            with torch.no_grad():
                self.result.copy_(self.rows)
        return self.result


def _is_plain(out: torch.Tensor) -> bool:
    """Return whether a tensor's memory is what its values say, so that rows can be copied to it as bytes."""
    return out.device.type == "cpu" and out.is_contiguous() and not out.is_conj() and not out.is_neg()


def _new_rows(shape: tuple[int, ...], dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    """Return host memory for rows."""
    nbytes = math.prod(shape) * dtype.itemsize
    if pinned or nbytes < _HUGE_FROM:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)
    return empty_aligned(padded(nbytes, ALIGNMENT))[:nbytes].view(dtype).view(shape)
