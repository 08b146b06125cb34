"""What is under a name."""

from __future__ import annotations

import errno
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import memory
from .futures import Operation
from .manifest import Stored
from .space import Part, Parts

if TYPE_CHECKING:
    import torch


class CorruptTensor(OSError):
    """What was read is not what was put (EBADMSG); the message names the tensor, the filename is its file's."""


class TensorInfo(NamedTuple):
    """What a store knows of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    checksum: int | None
    """The CRC-32 of its bytes, if the store keeps checksums."""


class Version:
    """What was put under a name once."""

    __slots__ = ("checksums", "info", "parts")

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, nbytes: int, parts: Parts, checksums: tuple[int, ...] | None
    ) -> None:
        crc = None if checksums is None else (checksums or (0,))[-1]
        self.info = TensorInfo(tuple(shape), dtype, nbytes, crc)
        self.parts = parts
        self.checksums = checksums
        """After each part."""

    def verify(self, name: str, tensor: torch.Tensor, paths: Sequence[Path]) -> None:
        """Raise CorruptTensor if the tensor, as it was read, does not have the checksums. ``paths``: of the store's files."""
        if self.checksums is None:
            return
        found = memory.checksums(tensor, [part.nbytes for part in self.parts])
        for part, expected, got in zip(self.parts, self.checksums, found, strict=True):
            if got != expected:
                where = f"in the {part.nbytes} bytes at offset {part.offset}"
                text = f"{name!r} is corrupt {where}: expected CRC-32 {expected:#010x}, found {got:#010x}; put it again"
                raise CorruptTensor(errno.EBADMSG, text, str(paths[part.file]))

    def stored(self) -> Stored:
        """For a manifest."""
        parts = tuple((part.file, part.offset, part.nbytes) for part in self.parts)
        return Stored(str(self.info.dtype).removeprefix("torch."), self.info.shape, parts, self.checksums)

    @classmethod
    def restored(cls, stored: Stored) -> Version:
        """From a manifest. Raises ValueError for what cannot have been put."""
        dtype = memory.dtype_named(stored.dtype)
        nbytes = math.prod(stored.shape) * dtype.itemsize
        parts = tuple(Part(*part) for part in stored.parts)
        if sum(part.nbytes for part in parts) != nbytes:
            raise ValueError(f"{parts} are not the {nbytes} bytes of {stored.dtype} {stored.shape}")
        return cls(stored.shape, dtype, nbytes, parts, stored.checksums)


class Entry:
    """A name, and what is under way with it."""

    __slots__ = ("coming", "damage", "gets", "name", "put", "version")

    def __init__(self, name: str) -> None:
        self.name = name
        self.version: Version | None = None
        """What it holds, or will hold where a put cannot be undone. None until the first put of a persisted name has ended."""
        self.coming: Version | None = None
        """What a put under way will make it hold, where it can be undone."""
        self.put: Operation | None = None
        self.gets: tuple[Operation, ...] = ()
        self.damage: OSError | None = None
        """Why ``version`` cannot be believed: the error of its put, where that could not be undone, or of a flush."""

    @property
    def newest(self) -> Version:
        version = self.coming or self.version
        if version is None:
            raise RuntimeError(f"{self.name!r} has no version")  # never: an entry lives from its first put on
        return version
