"""The settings among which a search chooses: the usual ones, or those of a sweep file."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepnvme.config import AioConfig
from deepnvme.engine import Backend
from deepnvme.tune.measure.folder import Unsuitable
from deepnvme.tune.sizes import parse_size

_KIB = 1 << 10
_BLOCK_SIZES = tuple(size * _KIB for size in (128, 256, 512, 1024, 2048, 4096, 8192))
_QUEUE_DEPTHS = (4, 8, 16, 32, 64, 128)
_WORKERS = (1, 2, 4, 8)


def default_space(io_size: int, backends: Sequence[Backend], use_gds: bool = False) -> list[AioConfig]:
    """Return the usual settings for a machine.

    Left out are settings with more workers than processors (2 are always tried), and those whose queues a transfer of ``io_size``
    bytes cannot fill.

    Args:
        io_size: Bytes of the largest transfer.
        backends: The backends that work; first the one that "auto" selects.
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


def read_sweep(path: Path, use_gds: bool = False) -> list[AioConfig]:
    """Return all combinations of the values in a sweep file, without duplicates.

    The file has DeepSpeed's format (``deepspeed/nvme/perf_run_sweep.py``): a JSON object of options of ds_io, each with a list of
    values; ``backend`` may be among them.

    Args:
        path: The file.
        use_gds: Whether the settings are for GPUDirect Storage.

    Raises:
        Unsuitable: If the file cannot be read or has a wrong content; the message has one line.
    """
    lists = _read(path)
    keys = list(lists)
    settings: dict[AioConfig, None] = {}  # a dictionary: no duplicates, in order
    for values in itertools.product(*lists.values()):
        options = dict(zip(keys, values, strict=True))
        # This engine always overlaps, so that both values are the same setting: False only if the file lists nothing else.
        if "overlap_events" in options:
            options["overlap_events"] = True in lists["overlap_events"]
        try:
            settings[AioConfig(use_gds=use_gds, **options)] = None
        except ValueError as error:
            raise Unsuitable(f"--sweep_config '{path}': {bad_setting(error, _FILE_NAMES)}") from error
    return list(settings)


def bad_setting(error: ValueError, names: Mapping[str, str]) -> str:
    """Return one line about a setting that :class:`AioConfig` refused.

    Args:
        error: What AioConfig raised.
        names: Names that the user knows for fields of AioConfig, where they differ.
    """
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "setting"
    return f"{names.get(name, name)}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}"


def _number(value: Any) -> int:
    """Return a JSON value that has to be a whole number. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be a whole number, got {value!r}")
    return value


def _flag(value: Any) -> bool:
    """Return a JSON value that has to be true or false. Raises ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {value!r}")
    return value


def _bytes(value: Any) -> int:
    """Return the bytes of a JSON value that has to be a size, a number or a text. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"must be a size such as 1048576 or '1M', got {value!r}")
    return parse_size(value)


def _name(value: Any) -> str:
    """Return a JSON value that has to be a text. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"must be a name, got {value!r}")
    return value


_OPTIONS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "block_size": ("block_size", _bytes),
    "queue_depth": ("queue_depth", _number),
    "sequential_requests": ("overlap_events", lambda value: not _flag(value)),
    "single_submit": ("single_submit", _flag),
    "io_parallel": ("intra_op_parallelism", _number),
    "backend": ("backend", _name),
}
_FILE_NAMES = {"intra_op_parallelism": "io_parallel", "overlap_events": "sequential_requests"}


class _Twice(Exception):
    """Raised for a key that is twice in a JSON object: json would keep only the last."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary. Raises _Twice for a repeated key."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(key)
        found[key] = value
    return found


def _read(path: Path) -> dict[str, list[Any]]:
    """Return the values that a sweep file lists for each field of AioConfig. Raises Unsuitable."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise Unsuitable(f"--sweep_config '{path}': {error.strerror}") from error
    except _Twice as error:
        raise Unsuitable(f"--sweep_config '{path}': {error.args[0]!r} is there twice; give one list with all values") from error
    except (ValueError, RecursionError) as error:
        raise Unsuitable(f"--sweep_config '{path}' is no JSON: {error}") from error
    if not isinstance(document, dict) or not document:
        raise Unsuitable(f"--sweep_config '{path}': must be a JSON object that maps options to lists of values")
    lists: dict[str, list[Any]] = {}
    for name, values in document.items():
        if name not in _OPTIONS:
            raise Unsuitable(f"--sweep_config '{path}': unknown option {name!r}; known are {', '.join(_OPTIONS)}")
        if not isinstance(values, list) or not values:
            raise Unsuitable(f"--sweep_config '{path}': {name}: must be a list of values, got {json.dumps(values)}")
        field, parse = _OPTIONS[name]
        try:
            lists[field] = [parse(value) for value in values]
        except ValueError as error:
            raise Unsuitable(f"--sweep_config '{path}': {name}: {error}") from error
    return lists
