"""Keys and values in memory: what they look like, and a strip of positions that grows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each [batch, heads, positions, dim]."""
Memory = Callable[[int], torch.Tensor]
"""Makes so many bytes (uint8, one dimension) of undefined content."""

_LEAST_GROWTH = 256 << 10
"""Bytes that a strip grows by at least: a step of generation adds one position, of a few KiB."""


@dataclass(frozen=True)
class KVShape:
    """What the keys and values of a layer look like, but for how many positions there are."""

    batch: int
    heads: tuple[int, int]
    """Of keys and values."""
    dims: tuple[int, int]
    """Of one head's key and value."""
    dtype: torch.dtype

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> KVShape:
        """Raises ValueError for tensors that are not a layer's keys and values."""
        alike = (keys.dtype, keys.device, keys.ndim) == (values.dtype, values.device, 4)
        if values.ndim != 4 or not alike or keys.shape[:3:2] != values.shape[:3:2]:
            got = " and ".join(f"{tuple(states.shape)} {states.dtype} on {states.device}" for states in (keys, values))
            raise ValueError(f"keys and values must be [batch, heads, positions, dim] of one dtype on one device, got {got}")
        return cls(keys.shape[0], (keys.shape[1], values.shape[1]), (keys.shape[3], values.shape[3]), keys.dtype)

    @property
    def position_bytes(self) -> int:
        """Of the keys and values of one position."""
        return self.batch * sum(map(math.prod, zip(self.heads, self.dims, strict=True))) * self.dtype.itemsize

    def with_batch(self, batch: int) -> KVShape:
        return replace(self, batch=batch)

    def pair(self, memory: torch.Tensor, positions: int) -> Pair:
        """Views of bytes: the keys first, then the values, each contiguous."""
        shapes = [(self.batch, heads, positions, dim) for heads, dim in zip(self.heads, self.dims, strict=True)]
        with torch.inference_mode(False):  # what is made in that mode cannot be written to outside of it
            elements = memory[: positions * self.position_bytes].view(self.dtype)
        keys, values = elements.split([math.prod(shape) for shape in shapes])  # type: ignore[no-untyped-call]
        return keys.view(shapes[0]), values.view(shapes[1])


def in_one_thread(copying: Callable[[], None]) -> None:
    """Have only this thread copy, a few MiB at a time: it does that as fast as a drive reads. Measured on two cores that others
    used as well: 34 MB in 12 ms, and by two threads, which wait for each other, in 50."""
    before = torch.get_num_threads()
    try:  # from before the change on, whatever interrupts it
        torch.set_num_threads(1)
        copying()
    finally:
        torch.set_num_threads(before)


class Strip:
    """Consecutive positions of a layer, with room for more behind them, so that appending moves nothing.

    ``start``, ``end``: the first position and the one after the last. A view stays as it is while positions are appended.
    """

    def __init__(self, form: KVShape, memory: Memory, start: int) -> None:
        self.form = form
        self.start = self.end = start
        self._make = memory
        self._capacity = 0
        self._origin = start  # the position at index 0
        self._pair = form.pair(memory(0), 0)

    @property
    def nbytes(self) -> int:
        """Of memory, the room included."""
        return self._capacity * self.form.position_bytes

    def nbytes_with(self, positions: int) -> int:
        """``nbytes`` after so many are appended."""
        return self._capacity_with(positions) * self.form.position_bytes

    def view(self, begin: int, end: int) -> Pair:
        """Positions from ``begin`` to ``end``, which are here."""
        keys, values = self._pair
        part = slice(begin - self._origin, end - self._origin)
        return keys[:, :, part], values[:, :, part]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy them, from any device."""
        new = keys.shape[2]
        if self._capacity_with(new) != self._capacity:
            self._move(self._capacity_with(new))
        self.end += new
        for mine, theirs in zip(self.view(self.end - new, self.end), (keys, values), strict=True):
            mine.copy_(theirs)

    def keep(self, begin: int, end: int) -> None:
        """Forget the positions outside."""
        self.start = min(max(self.start, begin), self.end)
        self.end = max(min(self.end, end), self.start)

    def select(self, rows: torch.Tensor) -> None:
        """Have these rows of the batch, in this order; a row may come several times."""
        old = self.view(self.start, self.end)
        self.form = self.form.with_batch(len(rows))
        self._replace(self._capacity, tuple(states.index_select(0, rows) for states in old))

    def _capacity_with(self, new: int) -> int:
        if self.end + new - self._origin <= self._capacity:
            return self._capacity
        wanted = self.end + new - self.start
        return wanted + max(wanted // 8, -(-_LEAST_GROWTH // max(self.form.position_bytes, 1)))

    def _move(self, capacity: int) -> None:
        self._replace(capacity, self.view(self.start, self.end))

    def _replace(self, capacity: int, content: tuple[torch.Tensor, ...]) -> None:
        self._pair = self.form.pair(self._make(capacity * self.form.position_bytes), capacity)
        self._capacity, self._origin = capacity, self.start
        for mine, theirs in zip(self.view(self.start, self.end), content, strict=True):
            mine.copy_(theirs)
