"""A checkpoint engine for DeepSpeed, of which nothing is imported here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from deepnvme.checkpoint.loading import load
from deepnvme.checkpoint.publication import sync_directory
from deepnvme.checkpoint.saving import save
from deepnvme.checkpoint.storage_placement import MapLocation


class CommitInfo(Protocol):
    """DeepSpeed's ``CheckpointCommitInfo``."""

    tag: str
    save_dir: str
    save_latest: bool


class NVMeCheckpointEngine:
    """Saves and loads DeepSpeed's checkpoints with :func:`deepnvme.save` and :func:`deepnvme.load`.

    The files are those of DeepSpeed's own ``TorchCheckpointEngine``, each of which appears whole or not at all, and either engine
    loads what the other saved. Contract: DeepSpeed 0.19, ``runtime/checkpoint_engine/checkpoint_engine.py``.

    ``config_params``: DeepSpeed's configuration, which it gives to all of its engines; not looked at. ``fsync``: see
    :func:`deepnvme.save`. Raises what those functions raise.
    """

    name = "NVMeCheckpointEngine"

    def __init__(self, config_params: Any = None, *, fsync: bool = True) -> None:
        self._fsync = fsync

    def create(self, info: CommitInfo) -> None:
        """A checkpoint begins. Nothing has to be done."""

    def makedirs(self, path: str | os.PathLike[str], exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str | os.PathLike[str]) -> None:
        """Blocks until the file is there, and on stable storage."""
        save(state_dict, path, fsync=self._fsync)

    def load(self, path: str | os.PathLike[str], map_location: MapLocation = None) -> Any:
        """Objects of any class, as DeepSpeed's checkpoints have them: load only what you trust."""
        return load(path, map_location, weights_only=False)

    def commit(self, info: CommitInfo) -> bool:
        """All files of the checkpoint are there; have the names of its directories on stable storage too. Blocks."""
        directory = Path(info.save_dir)
        if self._fsync and directory.is_dir():
            sync_directory(directory)
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Whether files may still be written after ``save``."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """Whether views of one tensor stay that, so that DeepSpeed has to copy a part of a larger one to save no more than it."""
        return True

    def set_commit_info(self, info: CommitInfo) -> None: ...

    def get_commit_info(self) -> CommitInfo | None:
        return None

    def cleanup(self) -> None: ...
