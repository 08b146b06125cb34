"""What of a sub-group's states is in no swap file, kept beside those files for whoever copies the folder as a checkpoint.

DeepSpeed copies the swap folder and nothing else of the optimizer. The steps taken, states too small to be swapped, and which
states there are at all would be lost with the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch.serialization import load as torch_load  # torch.load may be deepnvme.load by now

from deepnvme.checkpoint.formats.contents import CorruptCheckpoint, check_pickle, contents
from deepnvme.memory.tensor_bytes import dtype_named


@dataclass
class SavedStates:
    """``kept``: states in memory, by name. ``swapped``: shape, stride, dtype of those in files. ``order``: of all the names."""

    kept: dict[str, Any]
    swapped: dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype]]
    order: list[str]


def path_of(folder: str, param_id: str) -> str:
    return os.path.join(folder, f"{param_id}.states.pt")


def save(path: str, states: SavedStates) -> None:
    """Replace the file in one step. Values that torch.load would not take by default are left out."""
    kept = {name: value for name, value in states.kept.items() if isinstance(value, torch.Tensor | int | float | str | None)}
    swapped = {name: (list(shape), stride, str(dtype).split(".")[1]) for name, (shape, stride, dtype) in states.swapped.items()}
    beside = f"{path}.{os.getpid()}"
    try:
        torch.save({"kept": kept, "swapped": swapped, "order": states.order}, beside)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def load(path: str) -> SavedStates | None:
    """None where there is no file. Raises OSError naming it if it cannot be read or is none of these."""
    try:
        found = contents(path)  # or torch would read one of an older format, and unpack what takes much memory
        if not found.stored or found.script:
            raise ValueError("it is not of torch.save")
        check_pickle(path, found)
        saved = torch_load(path, weights_only=True)
        swapped = {
            name: (torch.Size(shape), tuple(stride), dtype_named(dtype))
            for name, (shape, stride, dtype) in saved["swapped"].items()
        }
        return SavedStates(saved["kept"], swapped, saved["order"])
    except FileNotFoundError:
        return None
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, CorruptCheckpoint):
            raise
        raise OSError(errno.EIO, "is damaged, or not of this package", path) from error
