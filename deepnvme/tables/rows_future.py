"""The future of a read of rows, with the checks of row numbers and the memory for the result."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch

from deepnvme.memory.alignment import ALIGNMENT, padded
from deepnvme.memory.host import empty_aligned
from deepnvme.ops import load_async_io

from .layout import Column
from .reading import RowRead, RowsUnreadable
from .row_scales import RowScales

if TYPE_CHECKING:
    from .session import TableSession

_HUGE_FROM = 4 << 20
"""Results of at least this many bytes are on huge pages: on others, 32 MiB of rows took twice as long, mostly for page faults."""


def check_integers(ids: torch.Tensor) -> None:
    """Raise TypeError if row numbers are not integers."""
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise TypeError(f"ids must be integers, got {ids.dtype}")


def checked_ids(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Check row numbers, and return them as contiguous int64 on the CPU.

    Args:
        ids: Integers of any shape, on any device; or anything that ``torch.as_tensor`` takes.
        rows: Number of rows of the table.

    Returns:
        The numbers, in the shape of ``ids``. May be ``ids`` itself.

    Raises:
        TypeError: If ``ids`` are not integers.
        IndexError: If a number is not in 0 to ``rows - 1``. The message names the first one, with its position in ``ids``.
    """
    if not isinstance(ids, torch.Tensor):
        ids = torch.as_tensor(ids)
    check_integers(ids)
    numbers = ids.detach().to("cpu", torch.int64).contiguous()
    outside = load_async_io().tables.first_outside(numbers.data_ptr(), numbers.numel(), rows)
    if outside is not None:
        where = torch.unravel_index(torch.tensor(outside), numbers.shape) if numbers.dim() else ()
        which = f"ids[{', '.join(str(int(each)) for each in where)}]" if numbers.dim() else "ids"
        held = f"the rows 0 to {rows - 1}" if rows else "no rows"
        raise IndexError(f"{which} is {ids.flatten()[outside].item()}, and the table has {held}")
    return numbers


def values_for(numbers: torch.Tensor, out: torch.Tensor | None, values: Column) -> torch.Tensor:
    """Return the tensor for the values of rows: ``out``, or a new one.

    Raises:
        TypeError: If ``out`` has another dtype.
        ValueError: If ``out`` has another shape.
    """
    shape = (*numbers.shape, *values.shape)
    if out is None:
        return _host_memory(shape, values.dtype)
    if out.dtype != values.dtype:
        raise TypeError(f"out must be of the table's dtype {values.dtype}, got {out.dtype}")
    if tuple(out.shape) != shape:
        raise ValueError(f"out must have the shape {shape}, got {tuple(out.shape)}")
    return out


class RowsFuture:
    """The future of a read of rows: returned by :meth:`Table.read_async`."""

    _read: RowRead | None = None
    _pid = 0

    def __init__(
        self, session: TableSession, numbers: torch.Tensor, result: torch.Tensor, width: int, keep: bool = False,
        scales: RowScales | None = None,
    ) -> None:  # fmt: skip
        """Prepare a read, without starting it.

        Args:
            session: The table's session.
            numbers: Checked row numbers.
            result: The caller's tensor, on any device.
            width: Bytes of each record that are read, from its beginning.
            keep: Whether all rows stay in memory as far as there is room.
            scales: Scales of rows in FP8, which are dequantised; None for other rows.
        """
        self._session: TableSession | None = session
        self._numbers, self._result, self._width, self._keep = numbers, result, width, keep
        # Rows are copied as bytes, to the storage that the tensor has now.
        self._in_place = result.device.type == "cpu" and result.is_contiguous() and not result.is_conj() and not result.is_neg()
        self._scales = scales
        if scales is not None:
            self._in_place = False
            self._rows = _host_memory(tuple(result.shape), torch.float8_e4m3fn)
        elif self._in_place:
            self._rows = result.detach()
        else:
            self._rows = _host_memory(tuple(result.shape), result.dtype, pinned=result.device.type == "cuda")

    def start(self) -> None:
        """Start reading. Raises as :meth:`Table.read_async`."""
        try:
            self._start()
        except BaseException:
            self._abandon()
            raise

    def read_now(self) -> RowsUnreadable | None:
        """Start reading, and wait for the rows. Returns the error if some rows could not be read, else None."""
        try:
            self._start()
            return self._wait()
        except BaseException:
            self._abandon()
            raise

    def rows(self) -> torch.Tensor:
        """Copy the rows that were read to the caller's tensor, if they are not there yet, and return that tensor."""
        if self._scales is not None:
            assert self._session is not None
            self._scales.dequantize(self._session.layout.rows, self._numbers, self._rows, self._result)
        elif not self._in_place:
            with torch.no_grad():
                self._result.copy_(self._rows)
        return self._result

    def done(self) -> bool:
        """Return whether all rows are in memory, so that :meth:`result` does not wait for the drive. Never blocks."""
        read = self._read
        return read is None or all(part.future.done() for part in list(read.parts))

    def result(self) -> torch.Tensor:
        """Wait for the rows, and return them as a tensor of shape ``ids.shape + table.row_shape``, the same one each time.

        Raises:
            RowsUnreadable: If some rows could not be read.
        """
        if self._session is not None:
            failure = self._wait()
            if failure is not None:
                raise failure
            self.rows()
            self._session = self._read = None
        return self._result

    def _start(self) -> None:
        session = self._session
        assert session is not None
        with session.lock:
            reader = session.reader_here()
            self._pid = os.getpid()
            self._read = reader.new_read(self._numbers, self._rows, self._width, self._keep)
            reader.start(self._read)

    def _wait(self) -> RowsUnreadable | None:
        """Wait for the rows, reading them again if they may mix old and new bytes because of a write.

        Returns:
            The error if some rows could not be read; else None.
        """
        session = self._session
        assert session is not None
        while True:
            if self._pid == os.getpid():  # a forked child has not what its parent has read
                assert self._read is not None
                session.reader.finish(self._read)
                with session.lock:
                    if not self._read.native.stale:
                        return session.reader.failure_of(self._read)
            self._start()

    def _abandon(self) -> None:
        """Copy no further rows to the caller's memory, so that the caller may use it for something else."""
        if self._session is not None and self._read is not None and self._pid == os.getpid():
            self._session.reader.abandon(self._read)


def _host_memory(shape: tuple[int, ...], dtype: torch.dtype, pinned: bool = False) -> torch.Tensor:
    """Return uninitialised host memory for rows; on huge pages if it is large and not pinned."""
    nbytes = math.prod(shape) * dtype.itemsize
    if pinned or nbytes < _HUGE_FROM:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)
    return empty_aligned(padded(nbytes, ALIGNMENT))[:nbytes].view(dtype).view(shape)
