"""What a store's names hold, and what they are about to hold."""

from __future__ import annotations

import difflib
import errno
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deepnvme._listed import listed
from deepnvme.memory.tensor_bytes import checksums, dtype_named

from .allocator import FilesTooSmall, Parts, StoreAllocator, TensorPart
from .data_file import DataFile
from .futures import Failure, Operation
from .manifest import StoredTensor

if TYPE_CHECKING:
    import torch


class Catalog:
    """Names, and the space that their tensors take. Not thread-safe.

    Where tensors persist, a put writes to new space, and what was there before stays until it has ended well; and what the last
    commit refers to, until the next.

    A flush that fails says nothing of what is on the drive: the kernel lets go of what it could not write, reports it once, and
    goes on as if it had written it. What was put since the last flush that ended well is damaged then, until it is put again.

    Ctrl-C may end any method anywhere. Each thing is changed in one step of the interpreter, in an order in which what was begun
    is gone on with, or undone, when the operation that it belongs to is settled; the space follows (:class:`StoreAllocator`).
    """

    def __init__(self, files: Sequence[DataFile], persist: bool) -> None:
        self.entries: dict[str, CatalogEntry] = {}
        self.space = StoreAllocator(files, self._held)
        self._persist = persist
        self._referred: frozenset[TensorVersion] = frozenset()  # what a manifest on the drive may refer to, named here or not
        self._flushing: frozenset[TensorVersion] = frozenset()  # what the last flush was to flush
        self._flushed: frozenset[TensorVersion] = frozenset()  # what it has, or one before

    def restore(self, name: str, stored: StoredTensor) -> None:
        """Take a name over from a manifest. Raises ValueError for what cannot be."""
        entry = CatalogEntry(name)
        entry.version = TensorVersion.restored(stored)
        self.space.claim(entry.version.parts)
        self.entries[name] = entry

    def restored(self) -> None:
        """All names have been taken over."""
        self._referred = self._flushed = frozenset(self.snapshot().values())

    def entry(self, name: str) -> CatalogEntry:
        """Raises KeyError."""
        entry = self.entries.get(name)
        if entry is None:
            close = difflib.get_close_matches(name, list(self.entries)[:10_000], n=3) if isinstance(name, str) else []
            hint = f"; there is {', '.join(map(repr, close))}" if close else f", nor anything like it among {len(self.entries)}"
            raise KeyError(f"the store has no tensor {name!r}{hint}")
        return entry

    def readable(self, names: Sequence[str]) -> list[CatalogEntry]:
        """The entries. Raises KeyError, and OSError for a damaged one."""
        entries = [self.entry(name) for name in names]
        for entry in entries:
            if entry.damage is not None:
                text = f"{entry.name!r} is damaged, because it could not be written ({entry.damage}): put it again, or delete it"
                raise OSError(entry.damage.errno or errno.EIO, text, entry.damage.filename)
        return entries

    def conflicts(self, names: Sequence[str], writing: bool) -> set[Operation]:
        """What has to end before the names are read, or before they are written."""
        entries = [entry for entry in map(self.entries.get, names) if entry is not None]
        before = {entry.put for entry in entries}
        if writing:
            for gets in {entry.gets for entry in entries}:
                before.update(gets)
        return {operation for operation in before if operation is not None and not operation.settled}

    def remove(self, name: str) -> int:
        """Return the bytes that it had. Raises KeyError."""
        version = self.entry(name).newest
        self.space.begin_change()
        del self.entries[name]
        self._release(version)
        self.space.end_change()
        return version.info.nbytes

    # Putting.

    def begin_put(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        checksums: Sequence[tuple[int, ...] | None],
        operation: Operation,
    ) -> tuple[list[CatalogEntry], list[TensorVersion]]:
        """What the names are to hold: in place where that can be, else in new space.

        Raises FilesTooSmall with nothing changed. If interrupted, :meth:`end_put` undoes what was begun.
        """
        entries = [self.entries.get(name) or CatalogEntry(name) for name in names]
        found: list[TensorVersion | None] = []
        wanted = []
        for entry, tensor, sums in zip(entries, tensors, checksums, strict=True):
            size = tensor.nbytes
            old = None if self._persist else entry.version
            if old is None or old.info.nbytes != size:
                found.append(None)
                wanted.append(size)
                continue
            shape, dtype, _, _ = old.info
            same = sums is None and dtype == tensor.dtype and shape == tensor.shape
            found.append(old if same else TensorVersion(tensor.shape, tensor.dtype, size, old.parts, sums))
        self.space.begin_change()
        try:
            places = iter(self.space.allocate(wanted))
        except FilesTooSmall:
            self.space.end_change()
            raise
        versions = [
            version or TensorVersion(tensor.shape, tensor.dtype, tensor.nbytes, next(places), sums)
            for version, tensor, sums in zip(found, tensors, checksums, strict=True)
        ]
        operation.subjects = entries
        for entry, version in zip(entries, versions, strict=True):
            entry.put = operation
            if self._persist:
                entry.coming = version
                self.entries[entry.name] = entry
                continue
            entry.damage = None
            old, entry.version = entry.version, version
            self.entries[entry.name] = entry
            if old is not None and old.parts is not version.parts:
                self._release(old)
        self.space.end_change()
        return entries, versions

    def end_put(self, operation: Operation, failures: Sequence[Failure]) -> None:
        """``failures``: each with the entries that it is for. Called again where it was interrupted."""
        failed: dict[CatalogEntry, OSError] = {entry: error for error, subjects in reversed(failures) for entry in subjects}
        subjects: Sequence[CatalogEntry] = operation.subjects
        entries = [entry for entry in subjects if entry.put is operation and entry is self.entries.get(entry.name)]
        if not self._persist:
            for entry in entries if failed else ():
                entry.damage = failed.get(entry)
            return
        self.space.begin_change()
        for entry in entries:
            coming, old = entry.coming, entry.version
            if coming is None:
                continue
            if entry not in failed:
                entry.version = coming
                entry.damage = None
                entry.coming = None
                if old is not None and old is not coming:
                    self._release(old)
                continue
            if old is None:
                del self.entries[entry.name]
            else:
                entry.coming = None
            self._release(coming)
        self.space.end_change()

    # Committing.

    def snapshot(self) -> dict[str, TensorVersion]:
        """What the names hold, without what is under way."""
        return {name: entry.version for name, entry in self.entries.items() if entry.version is not None}

    def begin_flush(self) -> dict[str, TensorVersion]:
        """What is to be flushed, and then published; from here on a manifest may refer to it, too. Raises OSError if any of it is
        damaged."""
        damaged = [entry for entry in self.entries.values() if entry.damage is not None]
        if damaged:
            error = damaged[0].damage
            assert error is not None
            names = listed([entry.name for entry in damaged])
            why = f"these tensors are damaged, because they could not be written ({error})"
            text = f"{why}: {names}; put them again, or delete them, before you commit"
            raise OSError(error.errno or errno.EIO, text, error.filename)
        versions = self.snapshot()
        self._flushing = frozenset(versions.values())
        self._referred |= self._flushing
        return versions

    def end_flush(self, flush: Operation, failures: Sequence[Failure]) -> None:
        """``failures``: each with the files, as indices, that it is for. Called again where it was interrupted."""
        failed = {file: error for error, files in reversed(failures) for file in files}
        if failed:
            self._damage(failed)
        if flush.complete:
            lost = (version for version in self._flushing - self._flushed if _failure_of(version, failed)) if failed else ()
            self._flushed = self._flushing.difference(lost)

    def committed(self) -> None:
        """The manifest says just what was flushed: what it said before can go."""
        gone = self._referred - self._flushed
        self.space.begin_change()
        self._referred = self._flushed
        self.space.give_back(part for version in gone for part in version.parts)
        self.space.end_change()

    def _damage(self, failed: Mapping[int, OSError]) -> None:
        """Nothing in these files that was not flushed before can be believed, nor what is being read from it."""
        for entry in self.entries.values():
            for version in (entry.version, entry.coming):
                error = None if version is None or version in self._flushed else _failure_of(version, failed)
                if error is None:
                    continue
                copy = OSError(error.errno, error.strerror, error.filename)  # without the frames that it comes through
                under_way = entry.gets
                if version is entry.version:
                    entry.damage = copy
                if version is entry.coming and entry.put is not None:
                    under_way = (*under_way, entry.put)
                for operation in under_way:
                    operation.doubt = copy

    def _release(self, version: TensorVersion) -> None:
        """Within a change of the space."""
        if version not in self._referred:
            self.space.give_back(version.parts)

    def _held(self) -> Iterator[Parts]:
        for entry in self.entries.values():
            if entry.version is not None:
                yield entry.version.parts
            if entry.coming is not None:
                yield entry.coming.parts
        for version in self._referred:
            yield version.parts


def _failure_of(version: TensorVersion, failed: Mapping[int, OSError]) -> OSError | None:
    """The error of the first of its files that has one."""
    return next((failed[part.file] for part in version.parts if part.file in failed), None)


def note_gets(entries: Sequence[CatalogEntry], operation: Operation) -> None:
    """Note a get of each. Entries that were got together share what they note."""
    noted = {
        before: (*(other for other in before if not other.settled), operation) for before in {entry.gets for entry in entries}
    }
    for entry in entries:
        entry.gets = noted[entry.gets]


class CorruptTensor(OSError):
    """What was read is not what was put (EBADMSG); the message names the tensor, the filename is its file's."""


class TensorInfo(NamedTuple):
    """What a store knows of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    checksum: int | None
    """The CRC-32 of its bytes, if the store keeps checksums."""


class TensorVersion:
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
        found = checksums(tensor, [part.nbytes for part in self.parts])
        for part, expected, got in zip(self.parts, self.checksums, found, strict=True):
            if got != expected:
                where = f"in the {part.nbytes} bytes at offset {part.offset}"
                text = f"{name!r} is corrupt {where}: expected CRC-32 {expected:#010x}, found {got:#010x}; put it again"
                raise CorruptTensor(errno.EBADMSG, text, str(paths[part.file]))

    def stored(self) -> StoredTensor:
        """For a manifest."""
        parts = tuple((part.file, part.offset, part.nbytes) for part in self.parts)
        return StoredTensor(str(self.info.dtype).removeprefix("torch."), self.info.shape, parts, self.checksums)

    @classmethod
    def restored(cls, stored: StoredTensor) -> TensorVersion:
        """From a manifest. Raises ValueError for what cannot have been put."""
        dtype = dtype_named(stored.dtype)
        nbytes = math.prod(stored.shape) * dtype.itemsize
        parts = tuple(TensorPart(*part) for part in stored.parts)
        if sum(part.nbytes for part in parts) != nbytes:
            raise ValueError(f"{parts} are not the {nbytes} bytes of {stored.dtype} {stored.shape}")
        return cls(stored.shape, dtype, nbytes, parts, stored.checksums)


class CatalogEntry:
    """A name, and what is under way with it."""

    __slots__ = ("coming", "damage", "gets", "name", "put", "version")

    def __init__(self, name: str) -> None:
        self.name = name
        self.version: TensorVersion | None = None
        """What it holds, or will hold where a put cannot be undone. None until the first put of a persisted name has ended."""
        self.coming: TensorVersion | None = None
        """What a put under way will make it hold, where it can be undone."""
        self.put: Operation | None = None
        self.gets: tuple[Operation, ...] = ()
        self.damage: OSError | None = None
        """Why ``version`` cannot be believed: the error of its put, where that could not be undone, or of a flush."""

    @property
    def newest(self) -> TensorVersion:
        version = self.coming or self.version
        if version is None:
            raise RuntimeError(f"{self.name!r} has no version")  # never: an entry lives from its first put on
        return version
