"""Space allocation for a store's tensors: in which data file, at which offset, and how much of a striped tensor in each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from deepnvme.memory.alignment import padded
from deepnvme.memory.tensor_bytes import flat_bytes

from .data_file import DataFile
from .extents import ExtentMap


class TensorPart(NamedTuple):
    """A contiguous range of a data file that holds a tensor or a part of one."""

    file: int
    """Index into the store's data files."""
    offset: int
    """Bytes from the start of the file."""
    nbytes: int
    """Bytes of the tensor in this part."""


class FilesTooSmall(Exception):
    """The data files must grow before an allocation can succeed. The allocation was undone.

    The caller grows the files and tries again; another thread may get the new space first.
    """

    def __init__(self, sizes: Sequence[tuple[DataFile, int]]) -> None:
        super().__init__(f"{len(sizes)} files are too small")
        self.sizes = sizes
        """Each file that is too small, and the size in bytes that it must have."""


Parts = tuple[TensorPart, ...]
"""The parts of one tensor, in the order of its bytes; empty if it has no bytes."""


class StoreAllocator:
    """Allocates parts of tensors in a store's data files. Not thread-safe; only :meth:`trim` waits for the drive.

    Args:
        files: The store's data files, one for each directory.
    """

    def __init__(self, files: Sequence[DataFile]) -> None:
        self.files = files
        self._extents = [ExtentMap() for _ in files]

    def used(self) -> tuple[int, ...]:
        """Return the bytes in use in each file, in whole pages."""
        return tuple(extents.used for extents in self._extents)

    def part_sizes(self, nbytes: int) -> list[int]:
        """Return the bytes of each part that a new tensor of ``nbytes`` bytes would be split into."""
        return [share for share in self._striped(nbytes) or [nbytes] if share]

    def allocate(self, sizes: Sequence[int]) -> list[Parts]:
        """Allocate parts for several tensors, the small ones in the emptiest directory.

        Args:
            sizes: Bytes of each tensor.

        Returns:
            The parts of each tensor, in the same order.

        Raises:
            FilesTooSmall: If files must grow first; nothing is allocated then. The caller grows them without holding the store's
                lock.
        """
        placed: list[Parts] = []
        for nbytes in sizes:
            striped = self._striped(nbytes)
            if not striped:
                striped = [0] * len(self.files)
                striped[min(range(len(self.files)), key=lambda file: self._extents[file].used)] = nbytes
            taken = ((file, share) for file, share in enumerate(striped) if share)
            placed.append(tuple(TensorPart(file, self._extents[file].take(padded(share)), share) for file, share in taken))
        too_small = [(file, size) for file, size in self._sizes() if size > file.capacity]
        if too_small:
            self.give_back(itertools.chain.from_iterable(placed))
            raise FilesTooSmall(too_small)
        return placed

    def claim(self, parts: Iterable[TensorPart]) -> None:
        """Mark the parts that a manifest lists as used.

        Raises:
            ValueError: If a part is already used, ends past the end of its file, or is in a file that does not exist.
        """
        for part in parts:
            if not 0 <= part.file < len(self.files):
                raise ValueError(f"there are {len(self.files)} directories, and none with index {part.file}")
            if part.offset + part.nbytes > self.files[part.file].capacity:
                raise ValueError(f"{part.nbytes} bytes at {part.offset} are past the end of '{self.files[part.file].path}'")
            self._extents[part.file].take_at(part.offset, padded(part.nbytes))

    def give_back(self, parts: Iterable[TensorPart]) -> None:
        """Free the space of these parts for later allocations."""
        for part in parts:
            self._extents[part.file].give_back(part.offset, padded(part.nbytes))

    def sizes_for(self, nbytes: int) -> list[tuple[DataFile, int]]:
        """Return the size in bytes that each file must have to hold tensors of ``nbytes`` bytes in all."""
        return [(file, padded(share)) for file, share in zip(self.files, shares(nbytes, len(self.files)), strict=True)]

    def trim(self) -> None:
        """Truncate each file after its last tensor. Raises OSError."""
        for file, size in self._sizes():
            file.trim(size)

    def _sizes(self) -> list[tuple[DataFile, int]]:
        """Return the size in bytes that each file must have to hold its tensors."""
        return [(file, extents.end) for file, extents in zip(self.files, self._extents, strict=True)]

    def _striped(self, nbytes: int) -> list[int]:
        """Return the bytes of a tensor in each directory; an empty list if the tensor is too small to be striped."""
        return shares(nbytes, len(self.files)) if nbytes >= STRIPED_FROM and len(self.files) > 1 else []


STRIPED_FROM = 4 << 20
"""Smallest size, in bytes, of a tensor that is split over all directories.

A smaller tensor gains nothing from several drives: one drive moves 1 MiB in less than the time between two requests.
"""


def split_tensor(parts: Iterable[TensorPart], tensor: torch.Tensor) -> Iterator[tuple[TensorPart, torch.Tensor]]:
    """Yield each part, with a view of the bytes of a contiguous tensor that belong to it."""
    start = 0
    for part in parts:
        all_of_it = start == 0 and part.nbytes == tensor.nbytes
        yield part, tensor if all_of_it else flat_bytes(tensor)[start : start + part.nbytes]
        start += part.nbytes


def shares(nbytes: int, count: int) -> list[int]:
    """Split ``nbytes`` into one contiguous part for each directory, of nearly equal sizes.

    Each part ends at a multiple of ALIGNMENT, except the last non-empty part.

    Args:
        nbytes: Bytes to split.
        count: Number of directories.

    Returns:
        Bytes of each part, in order. They sum to ``nbytes``; some may be 0.
    """
    bounds = [min(padded(nbytes * part // count), nbytes) for part in range(count)]
    return [stop - start for start, stop in itertools.pairwise((*bounds, nbytes))]
