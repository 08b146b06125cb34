"""A store's directories: locking them, opening a data file in each, and finding the manifest that says which belong together."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepnvme._interrupts import defer_interrupts
from deepnvme.engine import Engine
from deepnvme.files.directory_lock import DirectoryLock, DirectoryOwner, lock_directories
from deepnvme.files.identity import join, membership

from . import data_file, manifest
from .data_file import DataFile
from .manifest import MEMBERSHIP_NAME, CorruptManifest, StoredTensor, StoreManifest, load

Directory = str | os.PathLike[str]
"""A directory's path."""


def as_directories(directories: Directory | Sequence[Directory]) -> list[Path]:
    """Return one directory, or several, as absolute paths.

    Raises:
        TypeError: If a mapping is given: there are no shares to choose, since all directories get equal shares of the data.
        ValueError: If no directory is given, or one is given twice.
    """
    if isinstance(directories, Mapping):
        raise TypeError(f"directories must be a path or several, which have equal shares, got {directories!r}")
    given = [directories] if isinstance(directories, str | os.PathLike) else directories
    found = [Path(directory).resolve() for directory in given]
    if not found:
        raise ValueError("a store needs at least one directory, got none")
    for number, path in enumerate(found):
        if path in found[:number]:
            raise ValueError(f"'{path}' is given twice: a store uses a directory once")
    return found


class Volumes:
    """The directories of a store, locked from :meth:`open` to :meth:`leave`.

    The store's finalizer calls :meth:`leave` when the store is dropped, and at the interpreter's exit at the latest.

    Args:
        store: The store that uses the directories. Only a weak reference is kept.
    """

    left = True
    """Whether nothing is open or locked: True before :meth:`open`, and after :meth:`leave` has finished."""

    def __init__(self, store: object) -> None:
        self._owners: list[DirectoryLock] = []
        self.files: list[DataFile] = []
        """The data file of each directory, in the order of the manifest that was found, or else in the order given."""
        self._persisted: bool | None = None
        """Whether a manifest was found or published; None until this is known. If False, :meth:`leave` removes the files."""
        self._process = os.getpid()
        # It keeps this object alive, so that a garbage collection that finds the store does not close these files first.
        self._finalizer = weakref.finalize(store, self._finalize)

    def open(self, directories: Sequence[Path], persist: bool, engine: Engine, read_only: bool, owner: DirectoryOwner) -> None:
        """Lock the directories and open the data files. Call once.

        Files that a dead owner left are removed, unless they belong to a persistent store. With ``read_only``, nothing is
        created or removed, and the directories get no owner.

        This is not done by the constructor: the store must have this object first, to be able to leave the directories after
        Ctrl-C.

        Args:
            directories: The directories, as absolute paths.
            persist: Keep the files, and open a persistent store if there is one.
            engine: Opens the data files for transfers.
            read_only: Open a persistent store for reading.
            owner: The object that owns the directories, for the errors of other stores.

        Raises:
            The errors of :class:`deepnvme.swap.TensorStore`.
        """
        self.left = False
        try:
            if read_only:
                known: StoreManifest | None = self._open_committed(directories, engine, owner)
            else:
                known = self._claim(directories, persist, engine, owner)
            # The tensors in the manifest that was found.
            self.tensors: Mapping[str, StoredTensor] = {} if known is None else known.tensors
            self._next = uuid.uuid4().hex  # its identity from the first manifest on: no copy has it
            self._identity = self._next if known is None else known.store
            members = [membership(directory / MEMBERSHIP_NAME, CorruptManifest) for directory in self._directories()[1:]]
            if persist and any(member is None or member.previous for member in members):  # new, or a change was interrupted
                join(self._directories(), MEMBERSHIP_NAME, self._identity)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Close the data files, unlock the directories, and remove the files of a store without a manifest.

        Idempotent. A call after an interrupted one completes the work.

        Raises:
            OSError: An error from closing, after everything else is done.
        """
        if self.left:
            return
        failed: OSError | None = None
        try:
            if os.getpid() == self._process:  # in a forked child, everything belongs to the parent
                self._leave()
        except OSError as error:
            failed = error
        self.left = True
        self._finalizer.detach()
        if failed is not None:
            raise failed

    def _leave(self) -> None:
        """Remove files without a manifest, close the data files, and unlock the directories, whatever fails."""
        with contextlib.ExitStack() as stack:
            for owner in self._owners:
                stack.callback(owner.release)
            for file in self.files:
                stack.callback(file.close)
            for each, its_file in itertools.zip_longest(self._owners, self.files) if self._persisted is False else ():
                stack.callback(_remove, each, its_file)

    def _finalize(self) -> None:
        with contextlib.suppress(OSError), defer_interrupts():
            self.leave()

    def publish(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Replace the manifest by one with these tensors, durably.

        Raises:
            FileNotFoundError: If a directory was removed.
            OSError: From writing.
        """
        for owner in self._owners:
            owner.check()
        self._persisted = True
        if self._identity != self._next:
            # From now on this store differs from copies of it: their directories are not taken for its own any more. Until a
            # manifest is known to be published, it may have either identity.
            join(self._directories(), MEMBERSHIP_NAME, self._next, self._identity)
        manifest.publish(self._owners[0].directory, StoreManifest(self._next, len(self._owners), tensors))
        if self._identity != self._next:
            join(self._directories(), MEMBERSHIP_NAME, self._next)
            self._identity = self._next

    def _directories(self) -> list[Path]:
        """Return the directories in the order of the store."""
        return [owner.directory for owner in self._owners]

    def _claim(
        self, directories: Sequence[Path], persist: bool, engine: Engine, owner: DirectoryOwner
    ) -> StoreManifest | None:  # fmt: skip
        """Lock the directories as their owner, remove what a dead owner left there, and open the data files.

        Return the manifest that was found, or None.
        """
        lock_directories(directories, owner, self._owners)
        known, order = find_store(directories)
        by_directory = {locked.directory: locked for locked in self._owners}
        self._owners[:] = [by_directory[directories[index]] for index in order]
        if known is None:
            for directory in directories:
                data_file.remove(directory)
                manifest.remove(directory)
        elif not persist:
            text = f"here is a persisted store of {len(known.tensors)} tensors: open it with persist=True, or remove its files"
            raise FileExistsError(errno.EEXIST, text, str(self._owners[0].directory))
        self._persisted = known is not None
        for locked in self._owners:
            self.files.append(DataFile(locked.directory, engine, owner))
        return known

    def _open_committed(self, directories: Sequence[Path], engine: Engine, owner: DirectoryOwner) -> StoreManifest:
        """Open the data files for reading. Return the manifest.

        The manifest is read only after all data files are locked, when no other process can replace it any more.
        """
        for directory in directories:
            try:
                self.files.append(DataFile(directory, engine, owner, read_only=True))
            except FileNotFoundError as error:
                text = "there is no store here, or not all of it: its data file is missing"
                raise FileNotFoundError(errno.ENOENT, text, str(directory)) from error
        known, order = find_store(directories)
        if known is None:
            text = "there is a store here that was never committed: its writer was interrupted, or has yet to commit"
            raise FileNotFoundError(errno.ENOENT, text, str(self.files[0].directory))
        self.files[:] = [self.files[index] for index in order]
        return known


def _remove(owner: DirectoryLock, file: DataFile | None) -> None:
    """Remove the files of a store from a directory that it still has. ``file``: None if opening it was interrupted."""
    if file is not None:
        file.remove()
    if owner.intact():
        manifest.remove(owner.directory)
        if file is None:
            data_file.remove(owner.directory)


def find_store(directories: Sequence[Path]) -> tuple[StoreManifest | None, list[int]]:
    """Find the store that the directories belong to.

    Args:
        directories: Absolute paths.

    Returns:
        The store's manifest, or None if the directories hold no store; and the order of the store's directories, as indices
        into ``directories``.

    Raises:
        ValueError: If the directories are not exactly those of one store.
        OSError: From reading.
    """
    manifests = {index: manifest for index, directory in enumerate(directories) if (manifest := load(directory)) is not None}
    found_members = (membership(directory / MEMBERSHIP_NAME, CorruptManifest) for directory in directories)
    members = {index: member for index, member in enumerate(found_members) if member is not None}
    if not manifests:
        for index, member in members.items():
            if Path(member.first) not in directories:
                raise ValueError(
                    f"'{directories[index]}' belongs to the store whose manifest is in '{member.first}': give all its directories"
                )
        return None, list(range(len(directories)))  # memberships without a manifest are of a store that never committed: ignored
    first = next(iter(manifests))
    if len(manifests) > 1:
        listed = ", ".join(f"'{directories[index]}'" for index in manifests)
        raise ValueError(f"{listed} hold a store each: open one at a time")
    manifest = manifests[first]
    if manifest.directories != len(directories):
        raise ValueError(
            f"the store in '{directories[first]}' has {manifest.directories} directories, got {len(directories)}: give all"
        )
    order = [first]
    for wanted in range(1, manifest.directories):
        found = [index for index, member in members.items() if member.index == wanted and member.is_of(manifest.store)]
        if len(found) != 1:
            raise ValueError(
                f"directory {wanted} (from 0) of the store in '{directories[first]}', as it is now, is not among those given:"
                " give directories that were copied or moved together"
            )
        order += found
    return manifest, order
