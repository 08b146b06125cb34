"""A store's directories: locked, with a file open in each, and a manifest in the first if they persist."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deepnvme.engine import Engine

from . import data_file, manifest
from .data_file import DataFile
from .manifest import Manifest, Membership, Stored
from .membership import recognise
from .owner import Ownership

Directory = str | os.PathLike[str]


def weights_of(directories: Directory | Sequence[Directory] | Mapping[Directory, float]) -> dict[Path, float]:
    """By absolute path. Raises ValueError for none, one given twice, or a weight that is none."""
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


class Directories:
    """Taken from construction to :meth:`leave`, which happens at exit at the latest, and when this is dropped.

    What a dead owner left is removed, unless it persists: then ``known`` is its manifest. ``files`` are in the order of the store
    that was found, else as given. With ``read_only`` nothing is made, removed or owned. Raises as
    :class:`deepnvme.swap.TensorStore` does.
    """

    def __init__(self, weights: Mapping[Path, float], persist: bool, engine: Engine, read_only: bool = False) -> None:
        self._owners: list[Ownership] = []
        self.files: list[DataFile] = []
        self._published: list[bool] = []  # empty until a manifest is
        self._leaving = os.getpid(), self._published, self._owners, self.files
        self._finalizer = weakref.finalize(self, _leave, *self._leaving)
        try:
            self.known = self._find(weights, engine) if read_only else self._own(weights, persist, engine)
            self._identity = uuid.uuid4().hex if self.known is None else self.known.store
            if persist and self.known is None:
                self._join()
        except BaseException:
            self.leave()
            raise

    @property
    def left(self) -> bool:
        """Whether :meth:`leave` has done everything."""
        return not self._finalizer.alive

    def leave(self) -> None:
        """Close and unlock everything; remove what was not published. Idempotent, also where it was interrupted.

        Raises the first OSError from closing, when all is done.
        """
        errors = _leave(*self._leaving)
        self._finalizer.detach()
        if errors:
            raise errors[0]

    def publish(self, tensors: Mapping[str, Stored]) -> None:
        """Have the manifest say this, durably. Raises OSError, FileNotFoundError where a directory was removed."""
        for owner in self._owners:
            owner.check()
        self._published.append(True)
        manifest.publish(self._owners[0].directory, Manifest(self._identity, len(self._owners), tensors))

    def corrupt(self, why: str) -> manifest.CorruptManifest:
        """The error that says so of the manifest."""
        return manifest.CorruptManifest(self.files[0].directory / manifest.MANIFEST_NAME, why)

    def _own(self, weights: Mapping[Path, float], persist: bool, engine: Engine) -> Manifest | None:
        for directory in weights:
            self._owners.append(Ownership(directory))
        known = self._recognise(list(weights), persist)
        if known is not None:
            self._published.append(True)
        for owner in self._owners:
            self.files.append(DataFile(owner.directory, engine, weights[owner.directory]))
        return known

    def _find(self, weights: Mapping[Path, float], engine: Engine) -> Manifest:
        """The manifest is looked at when all files are locked: nobody replaces it any more."""
        self._published.append(True)
        for directory, weight in weights.items():
            try:
                self.files.append(DataFile(directory, engine, weight, read_only=True))
            except FileNotFoundError as error:
                text = "there is no store here, or not all of it: its data file is missing"
                raise FileNotFoundError(errno.ENOENT, text, str(directory)) from error
        known, order = recognise(list(weights))
        if known is None:
            text = "there is no store here that was ever committed: whoever began it was interrupted, or has not come to that"
            raise FileNotFoundError(errno.ENOENT, text, str(self.files[0].directory))
        self.files[:] = [self.files[index] for index in order]
        return known

    def _recognise(self, directories: Sequence[Path], persist: bool) -> Manifest | None:
        known, order = recognise(directories)
        self._owners[:] = [self._owners[index] for index in order]
        if known is None:
            for directory in directories:
                data_file.remove(directory)
                manifest.remove(directory)
        elif not persist:
            text = f"here is a persisted store of {len(known.tensors)} tensors: open it with persist=True, or remove its files"
            raise FileExistsError(errno.EEXIST, text, str(self._owners[0].directory))
        return known

    def _join(self) -> None:
        first = str(self._owners[0].directory)
        for index, owner in enumerate(self._owners[1:], 1):
            manifest.join(owner.directory, Membership(self._identity, index, first))


def _leave(process: int, published: list[bool], owners: Sequence[Ownership], files: Sequence[DataFile]) -> list[OSError]:
    """Return the errors of what could not be closed properly. Nothing in a forked child: all is the parent's there."""
    errors: list[OSError] = []
    if os.getpid() != process:
        return errors
    for owner, file in zip(owners, files, strict=False):  # as many, unless taking them failed half-way
        if not published:
            file.remove()
            with _noted(errors):
                if owner.intact():
                    manifest.remove(file.directory)
    for file in files:
        with _noted(errors):
            file.close()
    for owner in reversed(owners):
        with _noted(errors):
            owner.release()
    return errors


@contextlib.contextmanager
def _noted(errors: list[OSError]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        errors.append(error)
