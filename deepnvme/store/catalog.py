"""Catalog of a store: the tensor stored under each name, and the tensor that a put in progress is storing there.

1. A tensor's space is freed once neither a catalog entry nor a manifest that may be on the drive refers to the tensor.
2. In a persistent store, a put writes to new space. The new tensor replaces the old one when all transfers of the put have
   succeeded.
3. A damaged tensor cannot be read or committed until its name is put again or deleted.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from deepnvme.memory.tensor_bytes import checksums, dtype_named
from deepnvme.telemetry.descriptions import shorten

from .allocator import Parts, StoreAllocator, TensorPart
from .data_file import DataFile
from .futures import Failure, Operation
from .manifest import MANIFEST_NAME, CorruptManifest, StoredTensor


class Catalog:
    """The names in a store, with their tensors and the file space of the tensors. Not thread-safe.

    In a persistent store, a put writes to new space. The previous tensor of the name is kept until the put has succeeded. A
    tensor that the last commit refers to is kept until the next commit.

    After a failed flush, the contents of the drive are unknown: the kernel drops the pages that it could not write, reports
    the error once, and then continues as if it had written them. So all tensors put since the last successful flush are
    marked damaged until they are put again.

    Args:
        files: The store's data files.
        tensors: Manifest entries published by the last commit, by name.
        persist: Whether the store persists.

    Raises:
        CorruptManifest: If the manifest's entry of a tensor is not valid.
    """

    def __init__(self, files: Sequence[DataFile], tensors: Mapping[str, StoredTensor], persist: bool) -> None:
        self.entries: dict[str, CatalogEntry] = {}
        self.space = StoreAllocator(files)
        self._persist = persist
        for name, stored in tensors.items():
            entry = CatalogEntry(name)
            try:
                entry.version = TensorVersion.restored(stored)
                self.space.claim(entry.version.parts)
            except ValueError as error:
                raise CorruptManifest(files[0].directory / MANIFEST_NAME, f"tensor {name!r}: {error}") from error
            self.entries[name] = entry
        committed = frozenset(self._versions().values())
        self._referred = committed  # what a manifest on the drive may refer to, even if no entry does
        self._flushing = committed  # what the last flush had to flush
        self._flushed = committed  # what that flush, or one before, has flushed

    def entry(self, name: str) -> CatalogEntry:
        """Return the entry of a name.

        Raises:
            KeyError: If the store has no such name.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise KeyError(f"the store has no tensor {name!r}, but {shorten(self.entries)}")
        return entry

    def readable(self, names: Sequence[str]) -> list[CatalogEntry]:
        """Return the entries of the names, all of which must be readable.

        Raises:
            KeyError: If the store has no such name.
            OSError: If a tensor is damaged.
        """
        entries = [self.entry(name) for name in names]
        for entry in entries:
            if entry.damage is not None:
                text = f"{entry.name!r} is damaged, because it could not be written ({entry.damage}): put it again, or delete it"
                raise OSError(entry.damage.errno or errno.EIO, text, entry.damage.filename)
        return entries

    def conflicts(self, names: Sequence[str], writing: bool) -> set[Operation]:
        """Return the operations that must end before the names can be read or, with ``writing``, written."""
        entries = [entry for entry in map(self.entries.get, names) if entry is not None]
        before = {entry.put for entry in entries}
        if writing:
            before.update(*{entry.gets for entry in entries})
        return {operation for operation in before if operation is not None and not operation.settled}

    def remove(self, name: str) -> int:
        """Remove a name and free its space. Return the bytes of its tensor. Raises KeyError."""
        version = self.entry(name).newest
        del self.entries[name]
        self._release(version)
        return version.info.nbytes

    # Puts.

    def begin_put(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        checksums: Sequence[tuple[int, ...] | None],
        operation: Operation,
    ) -> tuple[list[CatalogEntry], list[TensorVersion]]:
        """Allocate space for tensors, and register a put in progress under their names.

        If the store does not persist and the name has a tensor of the same size, that tensor's space is reused.

        Args:
            names: Names to put.
            tensors: The tensor for each name, dense.
            checksums: For each tensor, the running CRC-32 values of its parts, or None.
            operation: The put. Its ``subjects`` become the entries.

        Returns:
            The entry of each name, and the version that the put writes.

        Raises:
            FilesTooSmall: If files must grow first; nothing is changed then.
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
            found.append(TensorVersion(tensor.shape, tensor.dtype, size, old.parts, sums))
        places = iter(self.space.allocate(wanted))
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
        return entries, versions

    def end_put(self, operation: Operation, failures: Sequence[Failure]) -> None:
        """Complete a put whose transfers have ended, and undo it for the tensors that failed.

        In a store that does not persist, a failed put cannot be undone: the name is marked damaged instead.

        Args:
            operation: The put.
            failures: Each error, with the entries whose transfers failed with it.
        """
        if not failures and not self._persist:
            return
        failed: dict[CatalogEntry, OSError] = {entry: error for error, subjects in reversed(failures) for entry in subjects}
        subjects: Sequence[CatalogEntry] = operation.subjects
        entries = [entry for entry in subjects if entry.put is operation and entry is self.entries.get(entry.name)]
        if not self._persist:
            for entry in entries:
                entry.damage = failed.get(entry)
            return
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

    # Commits.

    def _versions(self) -> dict[str, TensorVersion]:
        """Return the current version of each name. Puts in progress do not count."""
        return {name: entry.version for name, entry in self.entries.items() if entry.version is not None}

    def begin_flush(self) -> dict[str, TensorVersion]:
        """Return the versions to flush and then to publish in a manifest.

        From this call on, a manifest on the drive may refer to these versions, so their space is not freed.

        Raises:
            OSError: If any tensor is damaged.
        """
        damaged = {entry.name: entry.damage for entry in self.entries.values() if entry.damage is not None}
        if damaged:
            error = next(iter(damaged.values()))
            why = f"these tensors are damaged, because they could not be written ({error})"
            text = f"{why}: {shorten(damaged)}; put them again, or delete them, before you commit"
            raise OSError(error.errno or errno.EIO, text, error.filename)
        versions = self._versions()
        self._flushing = frozenset(versions.values())
        self._referred |= self._flushing
        return versions

    def end_flush(self, flush: Operation, failures: Sequence[Failure]) -> None:
        """Record which versions a flush has made durable. Mark tensors as damaged if their file could not be flushed.

        Args:
            flush: The operation of the flush.
            failures: Each error, with the indices of the files whose flush failed with it.
        """
        failed = {file: error for error, files in reversed(failures) for file in files}
        if failed:
            self._damage(failed)
        if flush.complete:
            lost = (version for version in self._flushing - self._flushed if _failure_of(version, failed)) if failed else ()
            self._flushed = self._flushing.difference(lost)

    def committed(self) -> None:
        """Free the space that only the previous manifest refers to. Call once a manifest of the flushed versions is published."""
        gone = self._referred - self._flushed
        self._referred = self._flushed
        self.space.give_back(part for version in gone for part in version.parts)

    def _damage(self, failed: Mapping[int, OSError]) -> None:
        """Mark tensors as damaged if they lie in a file that failed to flush and no earlier flush has covered them.

        Operations in progress that read or write such a tensor fail. ``failed`` maps file indices to errors.
        """
        for entry in self.entries.values():
            for version in (entry.version, entry.coming):
                error = None if version is None or version in self._flushed else _failure_of(version, failed)
                if error is None:
                    continue
                copy = OSError(error.errno, error.strerror, error.filename)  # without the traceback and its frames
                if version is entry.version:
                    entry.damage = copy
                if version is entry.coming and entry.put is not None:
                    entry.put.fail(copy)
                for operation in entry.gets:
                    operation.fail(copy)

    def _release(self, version: TensorVersion) -> None:
        """Free the space of a version, unless a manifest may refer to it."""
        if version not in self._referred:
            self.space.give_back(version.parts)


def _failure_of(version: TensorVersion, failed: Mapping[int, OSError]) -> OSError | None:
    """Return the flush error of the first failed file that holds a part of the version; None if no such file failed."""
    return next((failed[part.file] for part in version.parts if part.file in failed), None)


def record_gets(entries: Sequence[CatalogEntry], operation: Operation) -> None:
    """Record a get in progress on the entries it reads."""
    for entry in entries:
        entry.gets = (*(other for other in entry.gets if not other.settled), operation)


class CorruptTensor(OSError):
    """The stored bytes of a tensor are not those that were put (EBADMSG): a checksum differs, or the data file is too short.

    The message names the tensor; ``filename`` is the data file.
    """


class TensorInfo(NamedTuple):
    """Shape, dtype, size and checksum of a stored tensor, known without reading the tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    checksum: int | None
    """CRC-32 of the tensor's bytes, if the store keeps checksums."""


class TensorVersion:
    """A tensor as one put has stored it: shape, dtype, checksums, and the parts of the data files with its bytes."""

    __slots__ = ("checksums", "info", "parts")

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, nbytes: int, parts: Parts, checksums: tuple[int, ...] | None
    ) -> None:
        crc = None if checksums is None else (checksums or (0,))[-1]
        self.info = TensorInfo(tuple(shape), dtype, nbytes, crc)
        self.parts = parts
        self.checksums = checksums
        """Running CRC-32 values: of the first part, of the first two together, and so on. None if the store keeps none."""

    def verify(self, name: str, tensor: torch.Tensor, paths: Sequence[Path]) -> None:
        """Compare a tensor that was read with the stored checksums. Do nothing if the store keeps none.

        Args:
            name: Name of the tensor, for the error.
            tensor: The tensor as it was read.
            paths: Paths of the store's files.

        Raises:
            CorruptTensor: If a checksum differs.
        """
        if self.checksums is None:
            return
        found = checksums(tensor, [part.nbytes for part in self.parts])
        for part, expected, got in zip(self.parts, self.checksums, found, strict=True):
            if got != expected:
                where = f"in the {part.nbytes} bytes at offset {part.offset}"
                text = f"{name!r} is corrupt {where}: expected CRC-32 {expected:#010x}, found {got:#010x}; put it again"
                raise CorruptTensor(errno.EBADMSG, text, str(paths[part.file]))

    def stored(self) -> StoredTensor:
        """Return the manifest entry for this version."""
        parts = tuple((part.file, part.offset, part.nbytes) for part in self.parts)
        return StoredTensor(str(self.info.dtype).removeprefix("torch."), self.info.shape, parts, self.checksums)

    @classmethod
    def restored(cls, stored: StoredTensor) -> TensorVersion:
        """Return the version that a manifest's entry describes.

        Raises:
            ValueError: If the entry is not valid.
        """
        dtype = dtype_named(stored.dtype)
        nbytes = math.prod(stored.shape) * dtype.itemsize
        parts = tuple(TensorPart(*part) for part in stored.parts)
        if sum(part.nbytes for part in parts) != nbytes:
            raise ValueError(f"{parts} are not the {nbytes} bytes of {stored.dtype} {stored.shape}")
        return cls(stored.shape, dtype, nbytes, parts, stored.checksums)


class CatalogEntry:
    """One name in a store, with its current tensor and the operations in progress on it."""

    __slots__ = ("coming", "damage", "gets", "name", "put", "version")

    def __init__(self, name: str) -> None:
        self.name = name
        self.version: TensorVersion | None = None
        """The current version of the tensor. In a persistent store, None until the first put of the name has succeeded.

        In a store that does not persist, a put sets it when it begins, because such a put cannot be undone.
        """
        self.coming: TensorVersion | None = None
        """The version that a put in progress is writing, in a persistent store. It replaces ``version`` when the put succeeds."""
        self.put: Operation | None = None
        """The most recent put of the name, in progress or settled. None if the tensor comes from a manifest."""
        self.gets: tuple[Operation, ...] = ()
        """Gets of the name. Settled ones are removed when the next get is recorded."""
        self.damage: OSError | None = None
        """Why ``version`` cannot be trusted: the error of a put that could not be undone, or of a flush. None if it is intact."""

    @property
    def newest(self) -> TensorVersion:
        """The version that a put in progress is writing, or else the current version."""
        version = self.coming or self.version
        assert version is not None  # an entry is made by its first put
        return version
