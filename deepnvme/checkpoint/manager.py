"""Keep the newest checkpoints of a training run in a directory, one file per step."""

from __future__ import annotations

import errno
import operator
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from deepnvme._former_names import former_names
from deepnvme.files.replacing import sync_directory
from deepnvme.telemetry.descriptions import printable, representation
from deepnvme.telemetry.progress import ProgressOption

from .background import SaveFuture, start
from .formats.pt_image import pt_image
from .loading import load
from .publication import Destination
from .saving import save_to

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deepnvme.drives.aio_config import AioConfig

_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})\.pt")


class CheckpointManager:
    """The checkpoints of a training run: a directory with one ordinary .pt file per step, such as ``step-00000100.pt``.

    >>> manager = deepnvme.CheckpointManager("/mnt/nvme/run", keep=3)
    >>> manager.save(step, model.state_dict(), asynchronous=True)
    >>> model.load_state_dict(manager.load())

    If ``keep`` checkpoints exist when a save begins, the checkpoint of the lowest step is given up: its file becomes the
    new checkpoint and is overwritten in place, which is faster than allocating new space on the drive. So at least
    ``keep - 1`` whole checkpoints exist at any time, also after a kill or a power cut. With ``keep=1`` the old checkpoint
    stays until the new one is complete. A checkpoint that any process has open or mapped, or that has another name
    (``ln step-00000100.pt best.pt``), is removed instead of being overwritten.

    A file that is named like a checkpoint is always whole, and the directory has no other state. So several processes may
    save into one directory at the same time, and others may load from it. Thread-safe.

    Args:
        path: Directory of the checkpoints; created if it is missing.
        keep: How many checkpoints are kept: those of the highest steps. At least 1.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Raises:
        ValueError: If ``keep`` is less than 1.
    """

    @former_names(directory="path", config="aio_config")
    def __init__(self, path: str | os.PathLike[str], keep: int = 3, *, aio_config: AioConfig | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.directory = Path(os.path.abspath(path))
        self.keep = keep
        self.aio_config = aio_config
        missing = [each for each in (self.directory, *self.directory.parents) if not each.exists()]
        self.directory.mkdir(parents=True, exist_ok=True)
        for made in missing:
            sync_directory(made.parent)

    def __repr__(self) -> str:
        return representation(
            self,
            lambda: f"in '{printable(self.directory)}'",
            lambda: f"keep={self.keep}",
            lambda: f"steps {', '.join(map(str, self.steps())) or 'none'}",
        )

    def path(self, step: int) -> Path:
        """Return the path of a step's checkpoint, which may not exist.

        Raises:
            ValueError: If the step is negative.
            TypeError: If the step is not an integer.
        """
        try:
            step = operator.index(step)
        except TypeError:
            raise TypeError(f"step must be an integer, got {type(step).__name__}") from None
        if step < 0:
            raise ValueError(f"a step must not be negative, got {step}")
        return self.directory / f"step-{step:08}.pt"

    def steps(self) -> list[int]:
        """Return the steps of the existing checkpoints, ascending."""
        return sorted(int(found[1]) for name in os.listdir(self.directory) if (found := _NAME.fullmatch(name)))

    def latest(self) -> int | None:
        """Return the highest step that has a checkpoint, or None if there is none."""
        return max(self.steps(), default=None)

    @overload
    def save(
        self, step: int, obj: object, *, asynchronous: Literal[False] = False, fsync: bool = True, checksum: bool | None = None,
        group: ProcessGroup | None = None, progress: ProgressOption = None,
    ) -> None: ...  # fmt: skip
    @overload
    def save(
        self, step: int, obj: object, *, asynchronous: Literal[True], fsync: bool = True, checksum: bool | None = None,
    ) -> SaveFuture: ...  # fmt: skip
    def save(
        self,
        step: int,
        obj: object,
        *,
        asynchronous: bool = False,
        fsync: bool = True,
        checksum: bool | None = None,
        group: ProcessGroup | None = None,
        progress: ProgressOption = None,
    ) -> SaveFuture | None:
        """Save ``obj`` as the checkpoint of ``step``, then remove the checkpoints of the lowest other steps beyond ``keep``.

        Replaces an existing checkpoint of the same step. Blocks like :func:`deepnvme.save`. With ``asynchronous=True`` it
        returns like :func:`deepnvme.async_save`.

        Args:
            step: Training step, not negative.
            obj: Any object that pickles.
            asynchronous: Save in the background.
            fsync: As for :func:`deepnvme.save`.
            checksum: As for :func:`deepnvme.save`.
            group: As for :func:`deepnvme.save`. Not with ``asynchronous``.
            progress: As for :func:`deepnvme.save`. No effect with ``asynchronous``.

        Returns:
            The future of the save if ``asynchronous``, otherwise None.

        Raises:
            TypeError: If ``step`` is not an integer.
            ValueError: If ``group`` is given with ``asynchronous``.
            OSError: From saving. If a surplus checkpoint cannot be removed, the message says that the new one is saved.
            Exception: Any other error of :func:`deepnvme.save` or :func:`deepnvme.async_save`.
        """
        recycle, end = partial(self._recyclable, step), partial(self._remove_surplus, step)
        destination = Destination(self.path(step), fsync, recycle=recycle, end=end, aio_config=self.aio_config)
        make = partial(pt_image, obj, 2, checksum)
        if asynchronous:
            if group is not None:
                raise ValueError("the ranks of a group save together and at once: leave out asynchronous, or use NVMeWriter")
            return start(destination, make)
        save_to(destination, make, progress, group)
        return None

    @former_names(config="aio_config")
    def load(self, step: int | None = None, **options: Any) -> Any:
        """Load the checkpoint of a step, by default the latest.

        Args:
            step: Training step. None is the highest that has a checkpoint.
            **options: Options of :func:`deepnvme.load`.

        Raises:
            FileNotFoundError: If there is no such checkpoint.
            Exception: Any error of :func:`deepnvme.load`.
        """
        chosen = self.latest() if step is None else step
        if chosen is None or not self.path(chosen).exists():
            steps = ", ".join(map(str, self.steps()))
            text = f"no checkpoint of step {step}; existing steps: {steps}"
            text = text if steps else "there are no checkpoints in this directory"
            raise FileNotFoundError(errno.ENOENT, text, str(self.directory))
        return load(self.path(chosen), **{"aio_config": self.aio_config, **options})

    # This is safe from other threads and processes that save into the directory. A save that lists the steps after another has
    # given one up finds fewer than keep, and gives none up. A save that listed them before finds that its choice is gone, and
    # chooses no other.

    def _recyclable(self, step: int) -> Path | None:
        """Return the checkpoint whose file the save of ``step`` may overwrite, or None."""
        others = [other for other in self.steps() if other != step]
        return self.path(others[0]) if len(others) >= self.keep > 1 else None

    def _remove_surplus(self, step: int) -> None:
        """Remove checkpoints beyond ``keep``: those of the lowest steps, except for the one of ``step``."""
        steps = self.steps()
        for other in [other for other in steps if other != step][: max(len(steps) - self.keep, 0)]:
            try:
                self.path(other).unlink(missing_ok=True)
            except OSError as error:
                what = f"{self.path(step).name} is saved, but one that is too many cannot be removed: {error.strerror}"
                raise OSError(error.errno, what, error.filename) from error
