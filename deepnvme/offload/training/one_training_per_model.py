"""A model has one training: another one closes it, or is refused."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from deepnvme.files.directory_lock import DirectoryOwner

if TYPE_CHECKING:
    from .training import OffloadedTraining


@dataclass(frozen=True)
class _Training:
    """The last training of a model."""

    training: weakref.ref[OffloadedTraining]
    close: weakref.WeakMethod[Callable[[DirectoryOwner], None]]
    """Closes it for another one. Raises OSError."""
    owner: DirectoryOwner
    process: int


_trainings: weakref.WeakKeyDictionary[nn.Module, _Training] = weakref.WeakKeyDictionary()


def register(training: OffloadedTraining, owner: DirectoryOwner, close: Callable[[DirectoryOwner], None]) -> None:
    """Remember a training as its model's.

    Args:
        training: The training.
        owner: Names it in errors.
        close: Method of the training that closes it for another one.
    """
    _trainings[training.model] = _Training(weakref.ref(training), weakref.WeakMethod(close), owner, os.getpid())


def close_training_of(model: nn.Module, successor: DirectoryOwner, has_values: bool) -> None:
    """Close the training that a model has already, if any, for another one.

    Args:
        model: The model.
        successor: The other one.
        has_values: Whether it has values for the model, so that those of the first training are not needed.

    Raises:
        RuntimeError: If the model has a training of another thread or process, or the other one has no values.
        OSError: If closing fails.
    """
    found = _trainings.get(model)
    training, close = (None, None) if found is None else (found.training(), found.close())
    if found is None or training is None or close is None or training.closed:
        return
    if found.owner.of_other_thread or os.getpid() != found.process or not has_values:
        raise RuntimeError(
            f"this {type(model).__name__} is trained by {found.owner}: call its close(restore=True), which puts the values of its"
            f" {training.steps} steps into memory, before another one is made of it; or give a checkpoint, and make it in the"
            " same thread"
        )
    close(successor)
