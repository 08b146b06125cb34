"""Which bytes of one file are taken. No file is touched here."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from deepnvme.memory.alignment import ALIGNMENT


class ExtentMap:
    """The taken and the free extents of a file that can grow. Lengths and offsets are multiples of ALIGNMENT.

    Space is taken where it fits best; neighbouring holes are one hole. Not thread-safe.
    """

    def __init__(self) -> None:
        self._end = 0
        self._holes: dict[int, int] = {}  # offset -> length; none reaches the end
        self._offsets: list[int] = []  # of the holes, ascending
        self._lengths: list[tuple[int, int]] = []  # (length, offset) of the holes, ascending
        self._free = 0

    @property
    def end(self) -> int:
        """Where the last taken extent ends: the size that the file must have."""
        return self._end

    @property
    def used(self) -> int:
        """Bytes taken."""
        return self._end - self._free

    def take(self, length: int) -> int:
        """Take an extent, and return its offset: in the smallest hole that holds it, else past the end."""
        _check_length(length)
        place = bisect_left(self._lengths, (length, 0))
        if place == len(self._lengths):
            self._end += length
            return self._end - length
        _, offset = self._lengths[place]
        self._cut(offset, offset, length)
        return offset

    def take_run(self, lengths: Sequence[int]) -> list[int]:
        """Take several extents, side by side unless that left much of the file unused; return their offsets.

        One hole may hold all, else they go past the end: reading them together in one request is worth some space. But where a
        quarter of the file is holes, they are filled first, one extent at a time.
        """
        whole = sum(lengths)
        fits = bool(self._lengths) and self._lengths[-1][0] >= whole
        if whole == 0 or (not fits and self._free * 4 > self._end):
            return [self.take(length) for length in lengths]
        for length in lengths:
            _check_length(length)
        offset = self.take(whole)
        offsets = []
        for length in lengths:
            offsets.append(offset)
            offset += length
        return offsets

    def take_at(self, offset: int, length: int) -> None:
        """Take just these bytes. Raises ValueError if any of them is taken."""
        _check_length(length)
        if offset < 0 or offset % ALIGNMENT:
            raise ValueError(f"an extent starts at a multiple of {ALIGNMENT}, got {offset}")
        if offset >= self._end:
            hole, self._end = self._end, offset + length
            if offset > hole:
                self._add(hole, offset - hole)
            return
        place = bisect_left(self._offsets, offset + 1) - 1
        hole = self._offsets[place] if place >= 0 else 0
        if place < 0 or hole + self._holes[hole] < offset + length:
            raise ValueError(f"bytes {offset} to {offset + length} are taken, at least in part")
        self._cut(hole, offset, length)

    def give_back(self, offset: int, length: int) -> None:
        """Free bytes that were taken; a part of an extent, or several neighbours, will do. Raises ValueError if they are free."""
        _check_length(length)
        place = bisect_left(self._offsets, offset)
        before = self._offsets[place - 1] if place > 0 else None
        after = self._offsets[place] if place < len(self._offsets) else None
        overlaps = after is not None and after < offset + length
        if before is not None and before + self._holes[before] > offset:
            overlaps = True
        if offset < 0 or offset % ALIGNMENT or offset + length > self._end or overlaps:
            raise ValueError(f"bytes {offset} to {offset + length} are not taken, at least in part")
        start, stop = offset, offset + length
        if before is not None and before + self._holes[before] == start:
            self._remove(before)
            start = before
        if after is not None and after == stop:
            stop += self._remove(after)
        if stop == self._end:
            self._end = start
        else:
            self._add(start, stop - start)

    def holes(self) -> list[tuple[int, int]]:
        """(offset, length) of each, ascending."""
        return [(offset, self._holes[offset]) for offset in self._offsets]

    def _cut(self, hole: int, offset: int, length: int) -> None:
        """Take ``length`` bytes at ``offset`` out of the hole that starts at ``hole``."""
        stop = hole + self._remove(hole)
        if offset > hole:
            self._add(hole, offset - hole)
        if stop > offset + length:
            self._add(offset + length, stop - offset - length)

    def _add(self, offset: int, length: int) -> None:
        self._holes[offset] = length
        insort(self._offsets, offset)
        insort(self._lengths, (length, offset))
        self._free += length

    def _remove(self, offset: int) -> int:
        length = self._holes.pop(offset)
        del self._offsets[bisect_left(self._offsets, offset)]
        del self._lengths[bisect_left(self._lengths, (length, offset))]
        self._free -= length
        return length


def _check_length(length: int) -> None:
    if length <= 0 or length % ALIGNMENT:
        raise ValueError(f"an extent's length is a positive multiple of {ALIGNMENT}, got {length}")
