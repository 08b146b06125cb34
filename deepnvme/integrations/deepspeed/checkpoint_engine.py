"""A checkpoint engine for DeepSpeed, which takes the place of DeepSpeed's fast writer.

DeepSpeed is imported only by :func:`replacements`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from deepnvme._former_names import former_names
from deepnvme.checkpoint.loading import MapLocation, load
from deepnvme.checkpoint.saving import save
from deepnvme.drives.aio_config import AioConfig
from deepnvme.files.replacing import sync_directory

from .replacement import Replacement, around, module
from .swap_tensor.aio_config import AIO_KEYS

_PARAMETERS = ("config_params", "groups", "zero_stage", "has_moe_layers", "optimize_dp_state")


class CommitInfo(Protocol):
    """DeepSpeed's ``CheckpointCommitInfo``: which checkpoint is being saved, and where."""

    tag: str
    save_dir: str
    save_latest: bool


class NVMeCheckpointEngine:
    """Saves and loads DeepSpeed's checkpoints with :func:`deepnvme.save` and :func:`deepnvme.load`.

    Files have the names and the format of DeepSpeed's own ``TorchCheckpointEngine``, so either engine loads what the other
    saved. Each file appears whole or not at all. DeepSpeed's engine calls the methods; they raise what ``deepnvme.save`` and
    ``deepnvme.load`` raise.

    Contract: DeepSpeed 0.19, ``runtime/checkpoint_engine/checkpoint_engine.py``, and ``runtime/config.py`` for the JSON.

    Args:
        config_params: DeepSpeed's configuration, which DeepSpeed passes to all of its checkpoint engines. An ``aio`` block in
            its JSON is used if ``aio_config`` is None.
        fsync: Whether to put files on stable storage: see :func:`deepnvme.save`.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Raises:
        ValueError: If the ``aio`` block has an invalid value.
    """

    name = "NVMeCheckpointEngine"

    @former_names(config="aio_config")
    def __init__(self, config_params: Any = None, *, fsync: bool = True, aio_config: AioConfig | None = None) -> None:
        self._fsync = fsync
        self._config = _aio_block(config_params) if aio_config is None else aio_config

    def create(self, info: CommitInfo) -> None:
        """Do nothing. Called when saving a checkpoint begins."""

    def makedirs(self, path: str | os.PathLike[str], exist_ok: bool = False) -> None:
        """Make a directory and its parents. Raises OSError."""
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str | os.PathLike[str]) -> None:
        """Save a checkpoint file. Blocks until it is complete and, with ``fsync``, on stable storage."""
        save(state_dict, path, fsync=self._fsync, aio_config=self._config)

    def load(self, path: str | os.PathLike[str], map_location: MapLocation = None) -> Any:
        """Load a checkpoint file, and return the saved object. Blocks.

        Objects of any class are unpickled, because DeepSpeed's checkpoints have them. Unpickling can run code: load only files
        that you trust.
        """
        return load(path, map_location, weights_only=False, aio_config=self._config)

    def commit(self, info: CommitInfo) -> bool:
        """Put the names of the checkpoint's directories on stable storage, and return True. Blocks.

        Called by DeepSpeed when all files of a checkpoint have been saved.
        """
        directory = Path(info.save_dir)
        if self._fsync and directory.is_dir():
            sync_directory(directory)
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Return whether this rank writes the data that all data-parallel ranks share: True for rank 0 only."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Return False: no file is still being written after :meth:`save` has returned."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """Return True: tensors that share memory still share it after loading.

        A view is therefore saved with the whole tensor that it is part of, unless DeepSpeed copies it first.
        """
        return True

    def set_commit_info(self, info: CommitInfo) -> None:
        """Do nothing: only decoupled engines commit later."""

    def get_commit_info(self) -> CommitInfo | None:
        """Return None: only decoupled engines commit later."""
        return None

    def cleanup(self) -> None:
        """Do nothing: only decoupled engines have work left when DeepSpeed's engine is destroyed."""


def _aio_block(config_params: Any) -> AioConfig | None:
    """Return the settings of the ``aio`` block in a DeepSpeedConfig's JSON; None if the block is missing or empty.

    DeepSpeed's ``aio_config`` has all known keys and no other, with defaults if there is no block. Only the JSON shows whether
    there is one.
    """
    given = getattr(config_params, "_param_dict", None)
    block = given.get("aio") if isinstance(given, Mapping) else None
    if not block:
        return None
    ours = {"backend": block["backend"]} if "backend" in block else {}  # DeepSpeed leaves it out
    return AioConfig(**{key: config_params.aio_config[key] for key in AIO_KEYS}, **ours)


def replacements() -> Iterator[Replacement]:
    """Return replacements of ``create_checkpoint_engine`` in every module of DeepSpeed that defines or imports it.

    Raises UnexpectedDeepSpeed if one of these modules does not have it, or its parameters differ.
    """
    for name in ("engine", "checkpoint_engine", "checkpoint_engine.utils"):
        yield around(module(f"deepspeed.runtime.{name}"), "create_checkpoint_engine", _create_checkpoint_engine, _PARAMETERS)


def _create_checkpoint_engine(original: Any, config_params: Any, *arguments: Any, **named: Any) -> Any:
    """Return an :class:`NVMeCheckpointEngine` if the configuration asks for DeepSpeed's fast writer without decoupling.

    Else return the engine of DeepSpeed's ``original`` function.
    """
    writer = config_params.checkpoint_config["writer"] if config_params is not None else None
    if writer is not None and writer["type"] == "FAST" and not writer["decoupled"]:
        return NVMeCheckpointEngine(config_params)
    return original(config_params, *arguments, **named)
