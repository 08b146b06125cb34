"""What people write themselves today: a file for each tensor that autograd saves, by ``torch.save`` and ``torch.load``."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import torch


class TorchSaveHooks(torch.autograd.graph.saved_tensors_hooks):
    """Saves each tensor to a file of its own at once, loads it when backward asks for it, and removes the file then.

    Args:
        model: Its parameters stay in memory.
        directory: Where the files are made.
        min_bytes: Smaller tensors stay in memory.
        drive: Whether each file is synced and dropped from the page cache as it is written, so that the bytes go to the drive and
            come from there. Otherwise they may never leave memory.
    """

    def __init__(self, model: torch.nn.Module, directory: Path, min_bytes: int, drive: bool) -> None:
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        numbers = itertools.count()

        def pack(tensor: torch.Tensor) -> torch.Tensor | Path:
            if tensor.nbytes < min_bytes or tensor.untyped_storage().data_ptr() in parameters:
                return tensor
            path = directory / f"{next(numbers)}.pt"
            with path.open("wb") as file:
                torch.save(tensor, file)
                if drive:
                    file.flush()
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return path

        def unpack(packed: torch.Tensor | Path) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            tensor: torch.Tensor = torch.load(packed, weights_only=True)
            packed.unlink()
            return tensor

        super().__init__(pack, unpack)
