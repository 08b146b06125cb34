"""A store's directories: locking them, opening a data file in each, and finding the manifest that says which belong together."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
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


def directory_weights(directories: Directory | Sequence[Directory] | Mapping[Directory, float]) -> dict[Path, float]:
    """Return the weight of each directory, by absolute path.

    Args:
        directories: A path, several paths, or a mapping from path to weight. Without a mapping, all weights are 1.

    Raises:
        ValueError: If no directory is given, one is given twice, or a weight is not positive and finite.
    """
    if isinstance(directories, str | os.PathLike):
        directories = [directories]
    given = list(directories.items()) if isinstance(directories, Mapping) else [(path, 1.0) for path in directories]
    weights: dict[Path, float] = {}
    for directory, weight in given:
        path = Path(directory).resolve()
        if path in weights:
            raise ValueError(f"'{directory}' is given twice: a store uses a directory once")
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"a directory's weight must be positive and finite, got {weight} for '{directory}'")
        weights[path] = weight
    if not weights:
        raise ValueError("a store needs at least one directory, got none")
    return weights


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

    def open(self, weights: Mapping[Path, float], persist: bool, engine: Engine, read_only: bool, owner: DirectoryOwner) -> None:
        """Lock the directories and open the data files. Call once.

        Files that a dead owner left are removed, unless they belong to a persistent store. With ``read_only``, nothing is
        created or removed, and the directories get no owner.

        This is not done by the constructor: the store must have this object first, to be able to leave the directories after
        Ctrl-C.

        Args:
            weights: Weight of each directory, by absolute path.
            persist: Keep the files, and open a persistent store if there is one.
            engine: Opens the data files for transfers.
            read_only: Open a persistent store for reading.
            owner: The object that owns the directories, for the errors of other stores.

        Raises:
            The errors of :class:`deepnvme.swap.TensorStore`.
        """
        self.left = False
        try:
            known = self._open_committed(weights, engine, owner) if read_only else self._claim(weights, persist, engine, owner)
            # The tensors in the manifest that was found.
            self.tensors: Mapping[str, StoredTensor] = {} if known is None else known.tensors
            self._identity = uuid.uuid4().hex if known is None else known.store
            self._renewed = known is None  # whether no copy of the store can have its identity
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
            OSError: The first error from closing, after everything else is done.
        """
        if self.left:
            return
        errors: list[OSError] = []
        if os.getpid() == self._process:  # in a forked child, everything belongs to the parent
            self._leave(errors)
        self.left = True
        self._finalizer.detach()
        if errors:
            raise errors[0]

    def _leave(self, errors: list[OSError]) -> None:
        """Remove files without a manifest, close the data files, and unlock the directories. Append errors to ``errors``."""
        for owner, file in itertools.zip_longest(self._owners, self.files) if self._persisted is False else ():
            with _noted(errors):
                if file is not None:
                    file.remove()
                if owner.intact():
                    manifest.remove(owner.directory)
                    if file is None:  # opening it was interrupted
                        data_file.remove(owner.directory)
        for file in self.files:
            with _noted(errors):
                file.close()
        for owner in reversed(self._owners):
            with _noted(errors):
                owner.release()

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
        previous = self._identity
        if not self._renewed and len(self._owners) > 1:
            # From now on this store differs from copies of it: their directories are not taken for its own any more.
            self._identity = uuid.uuid4().hex
            join(self._directories(), MEMBERSHIP_NAME, self._identity, previous)
        manifest.publish(self._owners[0].directory, StoreManifest(self._identity, len(self._owners), tensors))
        if self._identity != previous:
            join(self._directories(), MEMBERSHIP_NAME, self._identity)
            self._renewed = True

    def _directories(self) -> list[Path]:
        """Return the directories in the order of the store."""
        return [owner.directory for owner in self._owners]

    def _claim(self, weights: Mapping[Path, float], persist: bool, engine: Engine, owner: DirectoryOwner) -> StoreManifest | None:
        """Lock the directories as their owner, remove what a dead owner left there, and open the data files.

        Return the manifest that was found, or None.
        """
        lock_directories(weights, owner, self._owners)
        directories = list(weights)
        known, order = find_store(directories)
        by_directory = {locked.directory: locked for locked in self._owners}
        self._owners[:] = [by_directory[directories[index]] for index in order]
        if known is None:
            for directory in weights:
                data_file.remove(directory)
                manifest.remove(directory)
        elif not persist:
            text = f"here is a persisted store of {len(known.tensors)} tensors: open it with persist=True, or remove its files"
            raise FileExistsError(errno.EEXIST, text, str(self._owners[0].directory))
        self._persisted = known is not None
        for locked in self._owners:
            self.files.append(DataFile(locked.directory, engine, weights[locked.directory], owner))
        return known

    def _open_committed(self, weights: Mapping[Path, float], engine: Engine, owner: DirectoryOwner) -> StoreManifest:
        """Open the data files for reading. Return the manifest.

        The manifest is read only after all data files are locked, when no other process can replace it any more.
        """
        for directory, weight in weights.items():
            try:
                self.files.append(DataFile(directory, engine, weight, owner, read_only=True))
            except FileNotFoundError as error:
                text = "there is no store here, or not all of it: its data file is missing"
                raise FileNotFoundError(errno.ENOENT, text, str(directory)) from error
        known, order = find_store(list(weights))
        if known is None:
            text = "there is a store here that was never committed: its writer was interrupted, or has yet to commit"
            raise FileNotFoundError(errno.ENOENT, text, str(self.files[0].directory))
        self.files[:] = [self.files[index] for index in order]
        return known


@contextlib.contextmanager
def _noted(errors: list[OSError]) -> Iterator[None]:
    """Append an OSError from the ``with`` body to ``errors`` instead of raising it."""
    try:
        yield
    except OSError as error:
        errors.append(error)


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
