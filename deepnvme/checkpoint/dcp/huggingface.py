"""Hugging Face (safetensors) storage for ``torch.distributed.checkpoint``, written and read at the speed of the drive."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from deepnvme.checkpoint.file_io import read_consistently, shared_engine
from deepnvme.checkpoint.formats.pt_records import CorruptCheckpoint
from deepnvme.checkpoint.formats.safetensors_header import read_header
from deepnvme.engine import Engine

from .reader import RequestedPart, fill, open_item_file, part
from .writer import PlannedFile, done, write_files

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
    raise ImportError(f"Hugging Face checkpoints need torch 2.9 or newer, and this is {torch.__version__}: use NVMeWriter")

from torch.distributed.checkpoint._hf_utils import _gen_file_name
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter


class NVMeHuggingFaceWriter(HuggingFaceStorageWriter):
    """A drop-in replacement for torch's ``HuggingFaceStorageWriter``: the same arguments and files, at the speed of the drive.

    Each file appears under its name when it is whole; until then an earlier file of that name stays. The files are not a
    checkpoint until the index, or the consolidated files, are written. Memory and errors are as for :class:`NVMeWriter`. In
    addition, ValueError is raised for two shards of one tensor on a rank, which the format cannot hold.

    Args:
        path: Directory of the checkpoint.
        config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.
        *args: As for ``HuggingFaceStorageWriter``.
        **kwargs: As for ``HuggingFaceStorageWriter``.
    """

    def __init__(self, path: str, *args: Any, config: AioConfig | None = None, **kwargs: Any) -> None:
        super().__init__(path, *args, **kwargs)
        self._aio_config = config

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files. Called by ``dcp.save``. Blocks.

        Args:
            plan: What this rank saves.
            planner: Provides the tensors.

        Returns:
            A completed future with the results of the writes.
        """
        mapping = plan.storage_data.get("fqn_to_index_mapping")
        count = max(mapping.values()) if mapping else 1
        files = [
            PlannedFile(_gen_file_name(index, count, plan.storage_data.get("shard_index")), items)
            for index, items in self._split_by_storage_plan(mapping, plan.items).items()
            if items
        ]
        return write_files(self, planner, files, self._aio_config)


class NVMeHuggingFaceReader(HuggingFaceStorageReader):
    """A drop-in replacement for torch's ``HuggingFaceStorageReader``, at the speed of the drive.

    Reads any directory of safetensors files. Like torch's reader it needs the package ``safetensors`` for the metadata. Memory
    and errors are as for :class:`NVMeReader`.

    Args:
        path: Directory of the checkpoint.
        config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.
        *args: As for ``HuggingFaceStorageReader``.
        **kwargs: As for ``HuggingFaceStorageReader``.
    """

    def __init__(self, path: str, *args: Any, config: AioConfig | None = None, **kwargs: Any) -> None:
        super().__init__(path, *args, **kwargs)
        self._aio_config = config

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors that this rank loads. Called by ``dcp.load``. Blocks.

        Args:
            plan: What this rank loads.
            planner: Provides the tensors to fill.

        Returns:
            A completed future.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for request in plan.items:
            by_file.setdefault(self.storage_data[request.storage_index].relative_path, []).append(request)
        engine = shared_engine(self.path, self._aio_config)
        for name, requests in by_file.items():
            path = Path(self.path) / name
            with open_item_file(path, requests[0]):
                read_consistently(path, partial(_read, path, requests, planner, engine))
        return done(None)


def _read(path: Path, requests: Sequence[ReadItem], planner: LoadPlanner, engine: Engine) -> None:
    """Read the requested parts of tensors from one safetensors file into the planner's tensors. Blocks."""
    elements = read_header(path)
    try:
        wanted = [RequestedPart(each, part(elements[each.storage_index.fqn], each)) for each in requests]
    except KeyError as error:
        raise CorruptCheckpoint(path, f"item {error} is not in it") from error
    fill(path, wanted, planner, engine)
