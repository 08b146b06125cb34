"""The checkpoints of a training run: one file for each step, of which the newest are kept."""

from __future__ import annotations

import errno
import operator
import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from deepnvme.memory.pool import BufferPool

from ._shared_engine import shared_engine
from .background import SaveFuture, raise_unseen, refuse_group, start
from .destination import Destination
from .formats.archive import archive
from .formats.file_image import FileImage
from .formats.sharding import Across
from .loading import load
from .publication import Publication, sync_directory
from .saving import save_to

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})\.pt")
_IN_FLIGHT = 2


class CheckpointManager:
    """The checkpoints of a run, in a directory: for each step an ordinary .pt file, ``step-00000100.pt`` and so on.

    >>> manager = deepnvme.CheckpointManager("/mnt/nvme/run", keep=3)
    >>> manager.save(step, model.state_dict(), asynchronous=True)
    >>> model.load_state_dict(manager.load())

    ``directory``: made if it is missing. ``keep``: at least 1; the checkpoints of so many highest steps are kept.

    When a save begins and ``keep`` are there, that of the lowest step is given up: the new one is written over its blocks,
    which is faster than into new ones. So at any time, after any kill or power cut, ``keep - 1`` whole ones are there at least.
    With ``keep=1`` the old one stays until the new one is there. One that anybody has open or mapped, or that has another
    name (``ln step-00000100.pt best.pt``), is not written over but removed.

    What has such a name is whole, and nothing else is recorded: several processes may save into one directory at a time, and
    others load from it. Thread-safe.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.directory = Path(os.path.abspath(directory))
        self.keep = keep
        missing = [path for path in (self.directory, *self.directory.parents) if not path.exists()]
        self.directory.mkdir(parents=True, exist_ok=True)
        for made in missing:
            sync_directory(made.parent)

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be. Raises ValueError for a negative one."""
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"a step must not be negative, got {step}")
        return self.directory / f"step-{step:08}.pt"

    def steps(self) -> list[int]:
        """Of the checkpoints that are there, ascending."""
        return sorted(int(found[1]) for name in os.listdir(self.directory) if (found := _NAME.fullmatch(name)))

    def latest(self) -> int | None:
        """The highest step, or None where there is no checkpoint."""
        return max(self.steps(), default=None)

    @overload
    def save(
        self, step: int, obj: object, *, asynchronous: Literal[False] = False, fsync: bool = True, checksum: bool = False,
        pool: BufferPool | None = None, lazy: bool = False, group: ProcessGroup | None = None,
    ) -> None: ...  # fmt: skip
    @overload
    def save(
        self, step: int, obj: object, *, asynchronous: Literal[True], fsync: bool = True, checksum: bool = False,
        pool: BufferPool | None = None, lazy: bool = False,
    ) -> SaveFuture: ...  # fmt: skip
    def save(
        self,
        step: int,
        obj: object,
        *,
        asynchronous: bool = False,
        fsync: bool = True,
        checksum: bool = False,
        pool: BufferPool | None = None,
        lazy: bool = False,
        group: ProcessGroup | None = None,
    ) -> SaveFuture | None:
        """Save ``obj`` as the checkpoint of ``step``, in place of one that is there; then remove those of the lowest other steps
        that are too many.

        Blocks like :func:`deepnvme.save`, with a ``group`` too; or, ``asynchronous``, returns like :func:`deepnvme.async_save`,
        with two in flight at most. The options and errors are theirs; an OSError from the removal says that the new one is saved.
        """
        destination = _Step(self.path(step), fsync, self, step)

        def make(across: Across | None) -> FileImage:
            return archive(obj, pickle, 2, checksum, across=across)

        if not asynchronous:
            save_to(destination, make, pool, group=group)
            return None
        if group is not None:
            refuse_group()
        raise_unseen()
        return start(destination, make(None), pool, lazy, _IN_FLIGHT)

    def load(self, step: int | None = None, **options: Any) -> Any:
        """Load the checkpoint of a step, by default the latest, with the options of :func:`deepnvme.load`.

        Raises FileNotFoundError where it is not there, and what :func:`deepnvme.load` raises.
        """
        chosen = self.latest() if step is None else step
        if chosen is None or not self.path(chosen).exists():
            there = ", ".join(map(str, self.steps())) or "none"
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise FileNotFoundError(errno.ENOENT, f"{wanted}; there are those of: {there}", str(self.directory))
        return load(self.path(chosen), **options)

    # Whatever other threads and processes do: who lists the steps late finds fewer than keep and gives none up, and who listed
    # them early finds that the one he has chosen is gone, and takes no other.

    def _given_up(self, step: int) -> Path | None:
        others = [other for other in self.steps() if other != step]
        return self.path(others[0]) if len(others) >= self.keep > 1 else None

    def _remove_surplus(self, step: int) -> None:
        steps = self.steps()
        for other in [other for other in steps if other != step][: max(len(steps) - self.keep, 0)]:
            try:
                self.path(other).unlink(missing_ok=True)
            except OSError as error:
                what = f"{self.path(step).name} is saved, but one that is too many cannot be removed: {error.strerror}"
                raise OSError(error.errno, what, error.filename) from error


@dataclass(frozen=True)
class _Step(Destination):
    manager: CheckpointManager
    step: int

    def begin(self, nbytes: int) -> Publication:
        recycle = self.manager._given_up(self.step)
        return Publication(self.path, nbytes, shared_engine(), fsync=self.fsync, recycle=recycle)

    def end(self) -> None:
        self.manager._remove_surplus(self.step)
