"""Read and write a file, beside a sub-group's swap files, with the states that are not in swap files.

DeepSpeed's checkpoints have a copy of the swap folder and nothing else of the optimizer. Without this file, the number of steps,
states too small to be swapped, and the list of states would be lost with the process.
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
    """The content of a sub-group's file: states that are not swapped, and a description of those that are."""

    kept: dict[str, Any]
    """Values of the states that stay in memory, by name."""
    swapped: dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype]]
    """Shape, stride and dtype of the states in swap files, by name."""
    order: list[str]
    """All names, in the order of the optimizer's state."""


def path_of(folder: str, param_id: str) -> str:
    """Return the path of a sub-group's file in the folder of its swap files."""
    return os.path.join(folder, f"{param_id}.states.pt")


def save(path: str, states: SavedStates) -> None:
    """Write the file, replacing an older one atomically. Raises OSError.

    Values that ``torch.load`` does not accept by default (``weights_only=True``) are left out.
    """
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
    """Read the file; return None if it does not exist.

    Raises OSError naming the file if it cannot be read, is damaged, or was not written by :func:`save`.
    """
    try:
        # Checked first: torch.load also reads files of older formats, and unpacks compressed ones of any size.
        found = contents(path)
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
