"""A store's files together: where a new tensor is laid, and what is left for more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .data_file import DataFile
from .extents import Extents, padded
from .striping import STRIPED_FROM, emptiest, shares

_RUN = 4 << 20
"""Bytes of small tensors that are laid side by side in one directory before the next one has its turn."""


class Part(NamedTuple):
    """Where some of a tensor's bytes lie."""

    file: int
    """An index into the store's files."""
    offset: int
    nbytes: int


class FilesTooSmall(Exception):
    """What was to be taken lies past the end of these files: it is free again, for whoever comes first once they have grown."""

    def __init__(self, sizes: Sequence[tuple[DataFile, int]]) -> None:
        super().__init__(f"{len(sizes)} files are too small")
        self.sizes = sizes
        """Bytes that each has to have."""


Parts = tuple[Part, ...]
"""A tensor's, in the order of its bytes; none if it has no bytes."""


class Space:
    """Not thread-safe. No method waits for the drive, but :meth:`trim`.

    What is taken follows from ``held``, which says what somebody holds; the extents are only a faster way to know. Whoever
    changes both calls :meth:`change` before and :meth:`changed` after. Where Ctrl-C or another exception came in between, the
    extents are made anew from what is held then, so that no byte is taken twice, and none stays taken.
    """

    def __init__(self, files: Sequence[DataFile], held: Callable[[], Iterable[Parts]]) -> None:
        self.files = files
        self._weights = [file.weight for file in files]
        self._held = held
        self._changing = False

    def change(self) -> None:
        self.mend()
        self._changing = True

    def changed(self) -> None:
        self._changing = False

    def mend(self) -> None:
        """Have the extents be what they were to be, if a change of them was interrupted."""
        if not self._changing:
            return
        extents = [Extents() for _ in self.files]
        for part in sorted({part for parts in self._held() for part in parts}):
            extents[part.file].take_at(part.offset, padded(part.nbytes))
        for file, known in zip(self.files, extents, strict=True):
            file.extents = known
        self._changing = False

    def lengths(self, nbytes: int) -> list[int]:
        """Of the parts that a new tensor would have."""
        if self._is_striped(nbytes):
            return [share for share in shares(nbytes, self._weights) if share]
        return [nbytes] if nbytes else []

    def allocate(self, sizes: Sequence[int]) -> list[Parts]:
        """Parts for a new tensor of each size, neighbours where possible. Raises FilesTooSmall. Within a change."""
        placed: list[Parts] = [()] * len(sizes)
        run: list[int] = []
        length = 0
        for index, nbytes in enumerate(sizes):
            if self._is_striped(nbytes):
                placed[index] = self._take_striped(nbytes)
            elif nbytes:
                run.append(index)
                length += nbytes
                if length >= _RUN:
                    self._take_run(run, sizes, placed)
                    run, length = [], 0
        self._take_run(run, sizes, placed)
        sizes_wanted = [(file, file.extents.end) for file in self.files if file.extents.end > file.capacity]
        if sizes_wanted:
            for parts in placed:
                self.give_back(parts)
            raise FilesTooSmall(sizes_wanted)
        return placed

    def take(self, parts: Iterable[Part]) -> None:
        """Take just these. Raises ValueError where that is taken, or not in the file."""
        for part in parts:
            if not 0 <= part.file < len(self.files):
                raise ValueError(f"there are {len(self.files)} directories, and none with index {part.file}")
            if part.offset + part.nbytes > self.files[part.file].capacity:
                raise ValueError(f"{part.nbytes} bytes at {part.offset} are past the end of '{self.files[part.file].path}'")
            self.files[part.file].extents.take_at(part.offset, padded(part.nbytes))

    def give_back(self, parts: Iterable[Part]) -> None:
        """Within a change."""
        for part in parts:
            self.files[part.file].extents.give_back(part.offset, padded(part.nbytes))

    def sizes_for(self, nbytes: int) -> list[tuple[DataFile, int]]:
        """Of the files, for tensors of ``nbytes`` bytes in all."""
        return [(file, padded(share)) for file, share in zip(self.files, shares(nbytes, self._weights), strict=True)]

    def trim(self) -> None:
        """Give back what lies past the last tensor of each file. Raises OSError."""
        self.mend()
        for file in self.files:
            file.trim(file.extents.end)

    def _is_striped(self, nbytes: int) -> bool:
        return nbytes >= STRIPED_FROM and len(self.files) > 1

    def _take_striped(self, nbytes: int) -> Parts:
        return tuple(
            Part(index, self.files[index].extents.take(padded(share)), share)
            for index, share in enumerate(shares(nbytes, self._weights))
            if share
        )

    def _take_run(self, run: Sequence[int], sizes: Sequence[int], placed: list[Parts]) -> None:
        if run:
            chosen = emptiest([file.extents.used for file in self.files], self._weights)
            offsets = self.files[chosen].extents.take_run([padded(sizes[index]) for index in run])
            for index, offset in zip(run, offsets, strict=True):
                placed[index] = (Part(chosen, offset, sizes[index]),)
