"""Bookkeeping of the used and free extents of one file. It does no I/O."""

from __future__ import annotations

from bisect import bisect_left, insort

from deepnvme.memory.alignment import ALIGNMENT


class ExtentMap:
    """The used and the free extents of one file, which can grow. Not thread-safe.

    Lengths and offsets are multiples of ALIGNMENT. Allocation is best-fit; adjacent holes are merged.
    """

    def __init__(self) -> None:
        self._end = 0
        self._holes: list[tuple[int, int]] = []  # (offset, length), ascending; no hole reaches the end
        self._lengths: list[tuple[int, int]] = []  # (length, offset) of the holes, ascending
        self._free = 0

    @property
    def end(self) -> int:
        """End of the last used extent, in bytes from the start of the file: the size that the file must have."""
        return self._end

    @property
    def used(self) -> int:
        """Bytes of all allocated extents together."""
        return self._end - self._free

    def take(self, length: int) -> int:
        """Allocate an extent of ``length`` bytes in the smallest hole that holds it, else past the end. Return its offset."""
        _check_length(length)
        place = bisect_left(self._lengths, (length, 0))
        if place == len(self._lengths):
            self._end += length
            return self._end - length
        _, offset = self._lengths[place]
        self._cut(offset, offset, length)
        return offset

    def take_at(self, offset: int, length: int) -> None:
        """Mark the ``length`` bytes at ``offset`` as used.

        Raises:
            ValueError: If any of them is already used, or the range is not aligned.
        """
        _check_length(length)
        if offset < 0 or offset % ALIGNMENT:
            raise ValueError(f"an extent starts at a multiple of {ALIGNMENT}, got {offset}")
        if offset >= self._end:
            hole, self._end = self._end, offset + length
            if offset > hole:
                self._add(hole, offset - hole)
            return
        place = bisect_left(self._holes, (offset + 1,))
        hole, size = self._holes[place - 1] if place > 0 else (0, 0)
        if hole + size < offset + length:
            raise ValueError(f"bytes {offset} to {offset + length} are taken, at least in part")
        self._cut(hole, offset, length)

    def give_back(self, offset: int, length: int) -> None:
        """Free bytes that are in use: a whole extent, a part of one, or several adjacent ones.

        Raises:
            ValueError: If any of the bytes is not in use, or the range is not aligned.
        """
        _check_length(length)
        place = bisect_left(self._holes, (offset,))
        before, size = self._holes[place - 1] if place > 0 else (0, -1)
        after = self._holes[place][0] if place < len(self._holes) else self._end
        start, stop = offset, offset + length
        if start < 0 or start % ALIGNMENT or before + size > start or after < stop:
            raise ValueError(f"bytes {offset} to {offset + length} are not taken, at least in part")
        if before + size == start:
            self._remove(before)
            start = before
        if after == stop < self._end:
            stop += self._remove(after)
        if stop == self._end:
            self._end = start
        else:
            self._add(start, stop - start)

    def holes(self) -> list[tuple[int, int]]:
        """Return (offset, length) of each hole, ascending."""
        return list(self._holes)

    def _cut(self, hole: int, offset: int, length: int) -> None:
        """Allocate the ``length`` bytes at ``offset`` in the hole that starts at ``hole``."""
        stop = hole + self._remove(hole)
        if offset > hole:
            self._add(hole, offset - hole)
        if stop > offset + length:
            self._add(offset + length, stop - offset - length)

    def _add(self, offset: int, length: int) -> None:
        """Record a hole of ``length`` bytes at ``offset``. It must not touch another hole: the caller merges neighbours."""
        insort(self._holes, (offset, length))
        insort(self._lengths, (length, offset))
        self._free += length

    def _remove(self, offset: int) -> int:
        """Remove the hole at ``offset``, and return its length."""
        _, length = self._holes.pop(bisect_left(self._holes, (offset,)))
        del self._lengths[bisect_left(self._lengths, (length, offset))]
        self._free -= length
        return length


def _check_length(length: int) -> None:
    """Raise ValueError unless the length is a positive multiple of ALIGNMENT."""
    if length <= 0 or length % ALIGNMENT:
        raise ValueError(f"an extent's length is a positive multiple of {ALIGNMENT}, got {length}")
