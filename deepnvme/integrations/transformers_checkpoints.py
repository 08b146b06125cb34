"""Make transformers' ``Trainer`` write its checkpoints in the background.

    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    async_checkpoints(trainer)
    trainer.train()

``Trainer`` still decides what is saved, when, and which checkpoints are removed. Its ``_save_checkpoint`` runs with
``torch.save`` and ``save_file`` of safetensors replaced: large files are copied into pinned memory, and written while the
training goes on.

Invariants:

1. A checkpoint is made in a staging directory, ``.checkpoint.deepnvme-tmp`` in the output directory, and renamed to its name
   when all of its files are written, with ``fsync`` when they are on stable storage. An earlier checkpoint of that name is first
   renamed into the staging directory: a crash between these two renames leaves neither under the name.
2. Older checkpoints are removed after that. They are first renamed into the staging directory, so that a crash leaves no part of
   one under its name.
3. One checkpoint of an output directory is written at a time, whichever trainer of the process saves it: the next one waits.
   So whatever else the staging directory has is left by a crash or an error.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepnvme.checkpoint.background import SaveFuture, start, wait_for_saves
from deepnvme.checkpoint.formats.file_image import FileImage
from deepnvme.checkpoint.formats.pt_image import pt_image
from deepnvme.checkpoint.publication import SUFFIX, Destination
from deepnvme.checkpoint.safetensors_files import safetensors_image
from deepnvme.files.replacing import sync_directory

from .transformers_training import check_version

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

__all__ = ["async_checkpoints"]

_OVERRIDDEN = {
    "train": (),
    "_save_checkpoint": ("model", "trial"),
    "_get_output_dir": ("trial",),
    "_finalize_training": ("trial",),
}
"""Methods of ``Trainer`` that are overridden, with the names of the arguments that are used."""

_SMALL = 1 << 20
"""Files of fewer bytes are written by torch, while the training is held."""

_replacing = threading.Lock()
"""Held while functions of other modules are replaced."""


def async_checkpoints(trainer: Any, *, fsync: bool = True, aio_config: AioConfig | None = None) -> None:
    """Write a trainer's checkpoints in the background from now on.

    A save holds the training while model and optimizer states are copied into pinned memory, as by :func:`deepnvme.async_save`.
    A checkpoint appears in the output directory whole or not at all, with the files that it has otherwise. ``save_total_limit``,
    ``load_best_model_at_end`` and ``resume_from_checkpoint`` work as before, and ``train()`` returns when all checkpoints are
    written. The error of a save is raised by the next save, or at the end of ``train()``.

    ``TrainerCallback.on_save`` is called when a checkpoint is copied, and may not find it in the output directory yet.

    Args:
        trainer: A trainer of one process, also one of :func:`offload_training`.
        fsync: As for :func:`deepnvme.save`.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Raises:
        ImportError: If transformers, or accelerate that its trainer needs, is not installed.
        RuntimeError: If ``Trainer`` differs in this version of transformers, or this was called for the trainer before.
        ValueError: If an option of the trainer does not work with checkpoints that appear later.
    """
    check_version(_OVERRIDDEN, "async_checkpoints")
    _check(trainer)
    trainer.async_checkpoints = checkpoints = _Checkpoints(fsync, aio_config)
    trainer.__class__ = _saving(type(trainer), checkpoints)


def _saving(base: Any, checkpoints: _Checkpoints) -> type:
    """Return a subclass of a trainer's class that saves in the background."""

    class SavingTrainer(base):  # type: ignore[misc]
        """The trainer's class, with checkpoints that are published when they are written."""

        def train(self, *arguments: Any, **options: Any) -> Any:
            """Train as the base class does, after the saves of earlier trainings: it may resume from one of them."""
            checkpoints.wait(self.args.output_dir)
            return super().train(*arguments, **options)

        def _get_output_dir(self, trial: Any) -> Any:
            return str(checkpoints.saving.staging) if checkpoints.saving else super()._get_output_dir(trial)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            with checkpoints.save(Path(super()._get_output_dir(trial)), self.state, self.args.save_total_limit):
                super()._save_checkpoint(model, trial)

        def _finalize_training(self, trial: Any, *arguments: Any, **options: Any) -> Any:
            checkpoints.wait(self.args.output_dir)
            return super()._finalize_training(trial, *arguments, **options)

    SavingTrainer.__name__ = SavingTrainer.__qualname__ = base.__name__
    return SavingTrainer


class _Checkpoints:
    """The checkpoints of a trainer. The arguments are those of :func:`async_checkpoints`."""

    def __init__(self, fsync: bool, aio_config: AioConfig | None) -> None:
        self._fsync, self._aio_config = fsync, aio_config
        self.saving: _Checkpoint | None = None
        """The checkpoint whose files the trainer is saving now."""
        self._last: _Checkpoint | None = None

    @contextlib.contextmanager
    def save(self, output_dir: Path, state: Any, limit: int | None) -> Iterator[None]:
        """Make a checkpoint of what the ``with`` block saves. Waits for earlier ones, and raises the error of the last.

        Args:
            output_dir: Where the checkpoint is published.
            state: The ``TrainerState``.
            limit: ``save_total_limit``.
        """
        self.wait(output_dir)
        output_dir.mkdir(parents=True, exist_ok=True)
        new = self._last = _Checkpoint(output_dir, f"checkpoint-{state.global_step}", limit, self._fsync, self._aio_config)
        new.remove_staging()
        self.saving = new
        try:
            with _replaced(new):
                yield
            if state.best_model_checkpoint == str(new.source):
                state.best_model_checkpoint = str(new.target)
                state.save_to_json(str(new.source / "trainer_state.json"))
            new.best = state.best_model_checkpoint
            new.written()
        except BaseException:
            self._last = None  # its error is raised now
            new.discard()
            raise
        finally:
            self.saving = None

    def wait(self, output_dir: str | Path) -> None:
        """Wait until no trainer of this process writes checkpoints in a directory. Raises the error of this one's last, once."""
        wait_for_saves(output_dir)
        last, self._last = self._last, None
        if last is not None and (errors := last.errors()):
            last.discard()
            raise errors[0]


class _Checkpoint:
    """A checkpoint that is saved: a directory, which is published when all of its files are written.

    Args:
        output_dir: Where it is published.
        name: Its name there.
        limit: Most checkpoints to be kept, None for all.
        fsync: Whether its files are flushed before.
        aio_config: Settings of the engine; None for the profile of the drive.
    """

    def __init__(self, output_dir: Path, name: str, limit: int | None, fsync: bool, aio_config: AioConfig | None) -> None:
        self.staging = output_dir / f".checkpoint{SUFFIX}"
        self.source, self.target = self.staging / name, output_dir / name
        self.best: str | None = None
        """The best checkpoint, which is kept."""
        self._limit, self._fsync, self._aio_config = limit, fsync, aio_config
        self._lock = threading.Lock()
        self._unwritten = 1
        """Files that are being written, and one more until the trainer has saved everything."""
        self._files: list[SaveFuture] = []

    def start(self, path: str, make: Callable[[None], FileImage]) -> None:
        """Copy a file's image, and write it in the background. Raises what :func:`deepnvme.checkpoint.background.start` does."""
        with self._lock:
            self._unwritten += 1
        destination = Destination(Path(path).absolute(), self._fsync, end=self.written, aio_config=self._aio_config)
        self._files.append(start(destination, make))

    def written(self) -> None:
        """Publish the checkpoint if nothing of it is left to be written. Called by the training and by the saving thread."""
        with self._lock:
            self._unwritten -= 1
            if self._unwritten:
                return
        if self._fsync:
            for path in self.source.rglob("*"):
                if path.is_file():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
            sync_directory(self.source)
        if self.target.exists():  # of an earlier training in the same directory
            os.rename(self.target, self.staging / "replaced")
        os.rename(self.source, self.target)
        if self._fsync:
            sync_directory(self.target.parent)
        self._remove_older()
        self.remove_staging()

    def errors(self) -> list[BaseException]:
        """Wait until no file is being written, and return the errors, which are not reported elsewhere then."""
        return [error for each in self._files if (error := each.exception()) is not None]

    def discard(self) -> None:
        """Remove what there is of a checkpoint that has failed. Waits until no file is being written. Raises OSError."""
        self.errors()
        self.remove_staging()

    def remove_staging(self) -> None:
        """Remove the directory in which checkpoints are made. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.staging)

    def _remove_older(self) -> None:
        """Remove the checkpoints that transformers' ``rotate_checkpoints`` would remove."""
        if not self._limit or self._limit < 0:
            return
        sort_checkpoints = importlib.import_module("transformers.trainer_utils").sort_checkpoints
        checkpoints = sort_checkpoints(str(self.target.parent), use_mtime=True)
        kept = {checkpoints[-1], *([] if self.best is None else [str(Path(self.best))])}
        surplus = [each for each in checkpoints if each not in kept]
        for each in surplus[: max(len(checkpoints) - max(self._limit, len(kept)), 0)]:
            os.rename(each, self.staging / Path(each).name)


@contextlib.contextmanager
def _replaced(checkpoint: _Checkpoint) -> Iterator[None]:
    """Have the large files of a checkpoint written in the background, whoever saves them by torch or safetensors."""
    within = os.path.join(checkpoint.staging, "")
    modeling_utils: Any = importlib.import_module("transformers.modeling_utils")
    of_safetensors: Any = importlib.import_module("safetensors.torch")
    torch_save, save_file, safe_save_file = torch.save, of_safetensors.save_file, modeling_utils.safe_save_file

    def save(obj: object, f: Any, *arguments: Any, **options: Any) -> None:
        """Stand in for ``torch.save``: large files of the checkpoint are written in the background."""
        if isinstance(f, str) and f.startswith(within) and not arguments and not options:
            image = pt_image(obj, 2, None)
            if image.nbytes >= _SMALL:
                checkpoint.start(f, lambda across: image)
                return
        torch_save(obj, f, *arguments, **options)

    def save_tensors(tensors: dict[str, torch.Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
        """Stand in for ``save_file`` of safetensors: files of the checkpoint are written in the background."""
        if str(filename).startswith(within):
            checkpoint.start(filename, partial(safetensors_image, tensors, metadata))
        else:
            save_file(tensors, filename, metadata)

    with _replacing:
        try:
            torch.save, of_safetensors.save_file, modeling_utils.safe_save_file = save, save_tensors, save_tensors
            yield
        finally:
            torch.save, of_safetensors.save_file, modeling_utils.safe_save_file = torch_save, save_file, safe_save_file


def _check(trainer: Any) -> None:
    """Raise ValueError if a trainer's options do not allow it, and RuntimeError if it saves in the background already."""
    if hasattr(trainer, "async_checkpoints"):
        raise RuntimeError("the checkpoints of this trainer are written in the background already")
    arguments = trainer.args
    refused = {
        "several processes": arguments.world_size > 1,
        "DeepSpeed and FSDP": trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
        "push_to_hub, which uploads a checkpoint at once": arguments.push_to_hub,
        "enable_jit_checkpoint, which notes beside the files that they are not whole": getattr(
            arguments, "enable_jit_checkpoint", False
        ),
    }
    for what, is_so in refused.items():
        if is_so:
            raise ValueError(f"checkpoints cannot be written in the background with {what}")
