"""Keys and values in memory: their shape, and a growing strip of consecutive positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each [batch, heads, positions, dim]."""
Memory = Callable[[int], torch.Tensor]
"""A function that returns a new uint8 tensor of one dimension with the given number of bytes, not initialised."""

_LEAST_GROWTH = 256 << 10
"""Least bytes by which a strip grows, because a step of generation adds only one position, of a few KiB."""


@dataclass(frozen=True)
class KVShape:
    """Batch size, heads, dims and dtype of a layer's keys and values; everything but the number of positions."""

    batch: int
    """Rows of the batch."""
    heads: tuple[int, int]
    """Number of heads of the keys and of the values."""
    dims: tuple[int, int]
    """Size of one head's key, and of its value."""
    dtype: torch.dtype
    """Dtype of keys and values."""

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> KVShape:
        """Return the shape of keys and values, each [batch, heads, positions, dim].

        Raises:
            ValueError: If dtypes, devices, batch sizes or numbers of positions differ, or a tensor has not 4 dimensions.
        """
        alike = (keys.dtype, keys.device, keys.ndim) == (values.dtype, values.device, 4)
        if values.ndim != 4 or not alike or keys.shape[:3:2] != values.shape[:3:2]:
            got = " and ".join(f"{tuple(states.shape)} {states.dtype} on {states.device}" for states in (keys, values))
            raise ValueError(f"keys and values must be [batch, heads, positions, dim] of one dtype on one device, got {got}")
        return cls(keys.shape[0], (keys.shape[1], values.shape[1]), (keys.shape[3], values.shape[3]), keys.dtype)

    @property
    def position_bytes(self) -> int:
        """Bytes of the keys and values of one position, for all rows of the batch."""
        return self.batch * sum(map(math.prod, zip(self.heads, self.dims, strict=True))) * self.dtype.itemsize

    def pair(self, memory: torch.Tensor, positions: int) -> Pair:
        """Return keys and values as contiguous views of ``memory``: first all keys, then all values.

        Args:
            memory: At least ``positions * position_bytes`` bytes (uint8, one dimension).
            positions: Number of positions.
        """
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written to outside of it
            elements = memory.view(self.dtype)
        states, start = [], elements.storage_offset()  # as_strided instead of slices and views: half the time, for each chunk
        for heads, dim in zip(self.heads, self.dims, strict=True):
            shape = (self.batch, heads, positions, dim)
            states.append(elements.as_strided(shape, (heads * positions * dim, positions * dim, dim, 1), start))
            start += math.prod(shape)
        return states[0], states[1]


def slice_positions(states: Pair, begin: int, end: int) -> Pair:
    """Return views of the keys and values from index ``begin`` to ``end`` among their positions."""
    keys, values = states
    return keys[:, :, begin:end], values[:, :, begin:end]


def in_one_thread(copying: Callable[[], None]) -> None:
    """Call ``copying`` with torch limited to one thread.

    One thread copies a few MiB at a time as fast as a drive reads. Measured on two cores that were also used by others: 34 MB in
    12 ms by one thread, in 50 ms by two, which wait for each other.
    """
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        copying()
    finally:
        torch.set_num_threads(before)


class Strip:
    """Consecutive positions of a layer in memory, with spare capacity behind them, so that appending seldom copies them.

    ``start`` is the first position, ``end`` the one after the last. The content of a view stays the same while positions are
    appended. Not thread-safe.

    Args:
        form: Shape and dtype of the keys and values.
        memory: Allocates the memory.
        start: The first position.
    """

    def __init__(self, form: KVShape, memory: Memory, start: int) -> None:
        self.form = form
        self.start = self.end = start
        self._make = memory
        self._capacity = 0
        self._origin = start  # the position that is at index 0 of the memory
        self._pair = form.pair(memory(0), 0)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, spare capacity included."""
        return self._capacity * self.form.position_bytes

    def nbytes_with(self, positions: int) -> int:
        """Return what ``nbytes`` would be after appending that many positions."""
        return self._capacity_with(positions) * self.form.position_bytes

    def view(self, begin: int, end: int) -> Pair:
        """Return views of the keys and values of positions from ``begin`` to ``end``, which must be in the strip."""
        return slice_positions(self._pair, begin - self._origin, end - self._origin)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append a copy of the keys and values of new positions, from any device."""
        new = keys.shape[2]
        if self._capacity_with(new) != self._capacity:
            self._replace(self._capacity_with(new), self.view(self.start, self.end))
        self.end += new
        for mine, theirs in zip(self.view(self.end - new, self.end), (keys, values), strict=True):
            mine.copy_(theirs)

    def keep(self, begin: int, end: int) -> None:
        """Remove the positions before ``begin`` and from ``end`` on. Memory is not freed."""
        self.start = min(max(self.start, begin), self.end)
        self.end = max(min(self.end, end), self.start)

    def select(self, rows: torch.Tensor) -> None:
        """Replace the batch by ``rows`` of it, in this order; a row may be selected several times. Copies the strip."""
        old = self.view(self.start, self.end)
        self.form = replace(self.form, batch=len(rows))
        self._replace(self._capacity, tuple(states.index_select(0, rows) for states in old))

    def _capacity_with(self, new: int) -> int:
        """Return the capacity, in positions, that a strip needs to append ``new`` ones; unchanged if they fit."""
        if self.end + new - self._origin <= self._capacity:
            return self._capacity
        wanted = self.end + new - self.start
        return wanted + max(wanted // 8, -(-_LEAST_GROWTH // max(self.form.position_bytes, 1)))

    def _replace(self, capacity: int, content: tuple[torch.Tensor, ...]) -> None:
        """Allocate memory for ``capacity`` positions, and copy the keys and values in ``content`` to its beginning."""
        self._pair = self.form.pair(self._make(capacity * self.form.position_bytes), capacity)
        self._capacity, self._origin = capacity, self.start
        for mine, theirs in zip(self.view(self.start, self.end), content, strict=True):
            mine.copy_(theirs)
