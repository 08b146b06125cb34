"""The settings that a search chooses from: the default ones, or those of a sweep file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepnvme.drives.aio_config import AioConfig
from deepnvme.engine import Backend
from deepnvme.files.regular_files import open_regular

from .folder import NotMeasurable

_BLOCK_SIZES = tuple(kib << 10 for kib in (128, 256, 512, 1024, 2048, 4096, 8192))
_QUEUE_DEPTHS = (4, 8, 16, 32, 64, 128)
_WORKERS = (1, 2, 4, 8)


def default_space(io_size: int, backends: Sequence[Backend], use_gds: bool = False) -> list[AioConfig]:
    """Return the default settings to choose from on a machine.

    Settings with more workers than processors are left out (2 workers are always tried), and so are settings whose queues a
    transfer of ``io_size`` bytes cannot fill.

    Args:
        io_size: Bytes of the largest transfer.
        backends: The backends that work, beginning with the one that "auto" selects.
        use_gds: Whether the settings are for GPUDirect Storage.
    """
    most = max(2, len(os.sched_getaffinity(0)))
    names: list[Backend] = ["auto", *backends[1:]]
    settings = [
        AioConfig(block_size=block, queue_depth=depth, intra_op_parallelism=workers, use_gds=use_gds, backend=name)
        for name, workers, block, depth in itertools.product(names, _WORKERS, _BLOCK_SIZES, _QUEUE_DEPTHS)
        if workers <= most
    ]
    largest = max(io_size, settings[0].in_flight_bytes)
    return [each for each in settings if each.in_flight_bytes <= largest]


class _SweepFile(BaseModel):
    """A sweep file of DeepSpeed (``deepspeed/nvme/perf_run_sweep.py``): options of ds_io, each with a list of values."""

    model_config = ConfigDict(extra="forbid", strict=True)

    block_size: list[int | str] = Field([], min_length=1)
    queue_depth: list[int] = Field([], min_length=1)
    io_parallel: list[int] = Field([], min_length=1)
    single_submit: list[bool] = Field([], min_length=1)
    sequential_requests: list[bool] = Field([], min_length=1)
    backend: list[str] = Field([], min_length=1)


def read_sweep(path: Path, use_gds: bool = False) -> list[AioConfig]:
    """Return all combinations of the values in a sweep file, without duplicates.

    Args:
        path: The sweep file. Besides DeepSpeed's options it may have ``backend``.
        use_gds: Whether the settings are for GPUDirect Storage.

    Raises:
        NotMeasurable: If the file cannot be read or its content is wrong. The message has one line.
    """
    try:
        with open_regular(path) as file:
            lists = _SweepFile.model_validate_json(file.read()).model_dump(exclude_unset=True)
        if not lists:
            raise ValueError("must be a JSON object that maps options to lists of values")
        # This engine always overlaps, so that both values are the same setting: False only if the file lists nothing else.
        if sequential := lists.pop("sequential_requests", None):
            lists["overlap_events"] = [False in sequential]
        fields = [_FIELDS.get(option, option) for option in lists]
        combinations = itertools.product(*lists.values())
        found = [AioConfig(use_gds=use_gds, **dict(zip(fields, values, strict=True))) for values in combinations]
    except OSError as error:
        raise NotMeasurable(f"--sweep_config '{path}': {error.strerror}") from error
    except ValueError as error:
        raise NotMeasurable(f"--sweep_config '{path}': {bad_setting(error)}") from error
    return list(dict.fromkeys(found))


_FIELDS = {"io_parallel": "intra_op_parallelism"}
"""Fields of AioConfig by DeepSpeed's name for the option, where the names differ."""


def bad_setting(error: ValueError) -> str:
    """Return a one-line message for settings that failed validation."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    options = {field: option for option, field in _FIELDS.items()}
    where = "".join(f"{options.get(str(name), name)}: " for name in first["loc"][:1])
    return f"{where}{first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r:.80}"
