"""Lightning's checkpoints at the speed of the drive: a ``CheckpointIO`` on :func:`deepnvme.save` and :func:`deepnvme.async_save`.

    trainer = lightning.Trainer(plugins=[NVMeCheckpointIO(asynchronous=True)])

Lightning still decides what is saved, when, and which checkpoints are removed. The files are those of its own ``CheckpointIO``:
each reads what the other has written.

A removal waits for the saves before it. Lightning removes the previous checkpoint as soon as the next one is handed over; in the
background that one may not be whole yet, and a crash would leave none.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from deepnvme.checkpoint.background import raise_unseen, start, wait_for_saves
from deepnvme.checkpoint.formats.pt_image import pt_image
from deepnvme.checkpoint.loading import load
from deepnvme.checkpoint.publication import Destination
from deepnvme.checkpoint.saving import save

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

TESTED = "2.6"
"""Version of Lightning that the tests ran with."""

try:
    import lightning
    from lightning.fabric.plugins import CheckpointIO
except ImportError as error:
    raise ImportError(f"deepnvme.integrations.lightning needs Lightning (pip install lightning=={TESTED}.*): {error}") from error
if not Version("2.5") <= Version(lightning.__version__) < Version("3"):
    raise ImportError(
        f"deepnvme.integrations.lightning is for Lightning 2.5 to 2.x (tested with {TESTED}), and found {lightning.__version__}"
    )

__all__ = ["NVMeCheckpointIO"]

_removing = threading.Lock()
"""Held while it is decided who removes a checkpoint: the caller, or the saving thread. Global, so that plugins can be pickled."""


class _Removals:
    """Checkpoints to be removed when one background save is published."""

    def __init__(self, saved: Path) -> None:
        self.saved = saved
        self._paths: list[str] = []
        self._published = False

    def add(self, path: str) -> bool:
        """Leave a removal to the saving thread. Return False if the save is published already."""
        with _removing:
            if not self._published:
                self._paths.append(path)
            return not self._published

    def run(self) -> None:
        """Remove the checkpoints. Called by the saving thread after it has published the save. Raises OSError."""
        with _removing:
            self._published = True
        for path in self._paths:
            try:
                Path(path).unlink(missing_ok=True)
            except OSError as error:
                what = f"{self.saved.name} is saved, but an earlier checkpoint cannot be removed: {error.strerror}"
                raise OSError(error.errno, what, error.filename) from error


class NVMeCheckpointIO(CheckpointIO):
    """A ``CheckpointIO`` whose checkpoints appear under their names whole or not at all, written by direct I/O.

    With ``asynchronous=True`` a save holds the training while the checkpoint is copied into pinned memory, and is written while
    the training goes on, as by :func:`deepnvme.async_save`. Its error is raised by the next save, or when the trainer ends.
    ``ModelCheckpoint`` and loggers do not find a checkpoint that is still being written: the name of each should be its own, with
    the ``{step}`` for instance. ``ModelCheckpoint`` adds a version such as ``-v1`` only to names of files that are there.

    For strategies that save through a ``CheckpointIO`` (one device, DDP). FSDP's and DeepSpeed's have files of their own.

    Args:
        asynchronous: Save in the background.
        fsync: As for :func:`deepnvme.save`.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.
    """

    def __init__(self, asynchronous: bool = True, *, fsync: bool = True, aio_config: AioConfig | None = None) -> None:
        self._asynchronous, self._fsync, self._aio_config = asynchronous, fsync, aio_config
        self._removals: _Removals | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings: background saves stay with the process that has started them."""
        return {**self.__dict__, "_removals": None}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint. Blocks until it is written or, in the background, until it is copied.

        Raises:
            TypeError: If there are ``storage_options``.
            ValueError: If the path is remote, or a symbolic link, whose target would be replaced.
            Exception: The error of an earlier background save, or an error of :func:`deepnvme.save`.
        """
        if storage_options is not None:
            raise TypeError("NVMeCheckpointIO takes no storage_options: its checkpoints are files of a local file system")
        where = Path(_local(path)).absolute()
        if where.is_symlink():
            raise ValueError(f"'{where}' is a symbolic link, as save_last='link' makes: remove it, or use another name")
        where.parent.mkdir(parents=True, exist_ok=True)
        if not self._asynchronous:
            save(checkpoint, where, fsync=self._fsync, aio_config=self._aio_config)
            return
        removals = _Removals(where)
        destination = Destination(where, self._fsync, end=removals.run, aio_config=self._aio_config)
        start(destination, partial(pt_image, checkpoint, 2, None))
        self._removals = removals

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, after the saves to its path. Blocks. Arguments and errors are those of :func:`deepnvme.load`."""
        wait_for_saves(_local(path))
        loaded: dict[str, Any] = load(path, map_location, weights_only=weights_only, aio_config=self._aio_config)
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, when the saves so far are published; it stays if the last of them fails. Raises OSError."""
        if self._removals is None or not self._removals.add(_local(path)):
            Path(path).unlink(missing_ok=True)

    def teardown(self) -> None:
        """Wait for the background saves, and raise the error of one that failed."""
        if self._removals is not None:
            wait_for_saves(self._removals.saved)  # the last: they are written in order
        raise_unseen()


def _local(path: str | os.PathLike[str]) -> str:
    """Return the path. Raises ValueError if it is a URL."""
    if "://" in os.fspath(path):
        raise ValueError(f"NVMeCheckpointIO is for local file systems, got '{os.fspath(path)}'")
    return os.fspath(path)
