"""What a store's names hold, and what they are about to hold."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .contents import Entry, Version
from .futures import Failure, Operation
from .manifest import Stored
from .space import Parts, Space

if TYPE_CHECKING:
    import torch


class Catalogue:
    """Names, and the space that their tensors take. Not thread-safe.

    Where tensors persist, a put writes to new space, and what was there before stays until it has ended well; and what the last
    commit refers to, until the next.
    """

    def __init__(self, space: Space, persist: bool) -> None:
        self.entries: dict[str, Entry] = {}
        self._space = space
        self._persist = persist
        self._retired: list[Parts] = []  # not the names' any more, but the last commit's

    def restore(self, name: str, stored: Stored) -> None:
        """Take a name over from a manifest. Raises ValueError for what cannot be."""
        entry = Entry(name)
        entry.version = Version.restored(stored)
        self._space.take(entry.version.parts)
        self.entries[name] = entry

    def entry(self, name: str) -> Entry:
        """Raises KeyError."""
        entry = self.entries.get(name)
        if entry is None:
            close = difflib.get_close_matches(name, list(self.entries)[:10_000], n=3) if isinstance(name, str) else []
            hint = f"; there is {', '.join(map(repr, close))}" if close else f", nor anything like it among {len(self.entries)}"
            raise KeyError(f"the store has no tensor {name!r}{hint}")
        return entry

    def readable(self, names: Sequence[str]) -> list[Entry]:
        """The entries. Raises KeyError, and OSError for a damaged one."""
        entries = [self.entry(name) for name in names]
        for entry in entries:
            if entry.damage is not None:
                text = f"{entry.name!r} is damaged, because its last put failed ({entry.damage}): put it again, or delete it"
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
        del self.entries[name]
        self._release(version)
        return version.info.nbytes

    # Putting.

    def plan(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], checksums: Sequence[tuple[int, ...] | None]
    ) -> tuple[list[Entry], list[Version]]:
        """What the names would hold: in place where that can be, else in new space. Raises OSError, and has taken none then."""
        entries = [self.entries.get(name) or Entry(name) for name in names]
        versions: list[Version | None] = []
        wanted = []
        for entry, tensor, sums in zip(entries, tensors, checksums, strict=True):
            size = tensor.nbytes
            old = None if self._persist else entry.version
            if old is None or old.info.nbytes != size:
                versions.append(None)
                wanted.append(size)
                continue
            shape, dtype, _, _ = old.info
            same = sums is None and dtype == tensor.dtype and shape == tensor.shape
            versions.append(old if same else Version(tensor.shape, tensor.dtype, size, old.parts, sums))
        places = iter(self._space.allocate(wanted))
        planned = [
            version or Version(tensor.shape, tensor.dtype, tensor.nbytes, next(places), sums)
            for version, tensor, sums in zip(versions, tensors, checksums, strict=True)
        ]
        return entries, planned

    def begin_put(self, entries: Sequence[Entry], versions: Sequence[Version], operation: Operation) -> None:
        """Have what was planned be under way."""
        for entry, version in zip(entries, versions, strict=True):
            self.entries[entry.name] = entry
            entry.put = operation
            entry.damage = None
            if self._persist:
                entry.coming = version
                continue
            if entry.version is not None and entry.version.parts is not version.parts:
                self._release(entry.version)
            entry.version = version

    def end_put(self, entries: Sequence[Entry], failures: Sequence[Failure]) -> None:
        """``failures``: each with the entries that it is for."""
        failed = {entry: error for error, subjects in reversed(failures) for entry in subjects}
        if not self._persist:
            for entry, error in failed.items():
                entry.damage = error
            return
        for entry in entries:
            coming, entry.coming = entry.coming, None
            old = entry.version
            if coming is None:
                continue
            if entry not in failed:
                entry.version = coming
                if old is not None:
                    self._release(old)
                continue
            self._release(coming)
            if old is None:
                del self.entries[entry.name]

    # Committing.

    def commit(self) -> dict[str, Stored]:
        """What a manifest is to say, which from here on may refer to it."""
        versions = {name: entry.version for name, entry in self.entries.items() if entry.version is not None}
        for version in versions.values():
            version.committed = True
        return {name: version.stored() for name, version in versions.items()}

    def committed(self) -> None:
        """The manifest says so: what it said before can go."""
        for parts in self._retired:
            self._space.give_back(parts)
        self._retired.clear()

    def _release(self, version: Version) -> None:
        if version.committed:
            self._retired.append(version.parts)
        else:
            self._space.give_back(version.parts)


def note_gets(entries: Sequence[Entry], operation: Operation) -> None:
    """Note a get of each. Entries that were got together share what they note."""
    noted = {
        before: (*(other for other in before if not other.settled), operation) for before in {entry.gets for entry in entries}
    }
    for entry in entries:
        entry.gets = noted[entry.gets]
