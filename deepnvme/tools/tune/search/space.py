"""The settings among which a search chooses: the usual ones, or those of a sweep file."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepnvme.config import AioConfig
from deepnvme.engine import Backend
from deepnvme.tools.tune.measure.unsuitable import Unsuitable
from deepnvme.tools.tune.sizes import parse_size

_BLOCK_SIZES = tuple(kib << 10 for kib in (128, 256, 512, 1024, 2048, 4096, 8192))
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
    try:
        return _combinations(_read(path), use_gds)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unsuitable(f"--sweep_config '{path}' is no JSON: {error}") from error
    except OSError as error:
        raise Unsuitable(f"--sweep_config '{path}': {error.strerror}") from error
    except ValueError as error:
        names = {field: option for option, (field, _, _) in _OPTIONS.items()}
        raise Unsuitable(f"--sweep_config '{path}': {bad_setting(error, names)}") from error


def _combinations(lists: Mapping[str, Sequence[Any]], use_gds: bool) -> list[AioConfig]:
    """Return all combinations of the values that are listed for fields of AioConfig. Raises ValueError."""
    settings: dict[AioConfig, None] = {}  # a dictionary: no duplicates, in order
    for values in itertools.product(*lists.values()):
        options = dict(zip(lists, values, strict=True))
        # This engine always overlaps, so that both values are the same setting: False only if the file lists nothing else.
        if "overlap_events" in options:
            options["overlap_events"] = True in lists["overlap_events"]
        settings[AioConfig(use_gds=use_gds, **options)] = None
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


_OPTIONS: Mapping[str, tuple[str, tuple[type, ...], str]] = {
    "block_size": ("block_size", (int, str), "a size such as 1048576 or '1M'"),
    "queue_depth": ("queue_depth", (int,), "a whole number"),
    "sequential_requests": ("overlap_events", (bool,), "true or false"),
    "single_submit": ("single_submit", (bool,), "true or false"),
    "io_parallel": ("intra_op_parallelism", (int,), "a whole number"),
    "backend": ("backend", (str,), "a name"),
}
"""For each option of a sweep file: the field of AioConfig, the types of its values, and these types in words."""


def _read(path: Path) -> dict[str, list[Any]]:
    """Return the values that a sweep file lists for each field of AioConfig. Raises OSError, ValueError or RecursionError."""
    document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    if not isinstance(document, dict) or not document:
        raise ValueError("must be a JSON object that maps options to lists of values")
    lists: dict[str, list[Any]] = {}
    for option, values in document.items():
        if option not in _OPTIONS:
            raise ValueError(f"unknown option {option!r}; known are {', '.join(_OPTIONS)}")
        if not isinstance(values, list) or not values:
            raise ValueError(f"{option}: must be a list of values, got {json.dumps(values)}")
        try:
            lists[_OPTIONS[option][0]] = [_parse(option, value) for value in values]
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from error
    return lists


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary. Raises ValueError for a repeated key, of which json would keep only the last."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is there twice; give one list with all values")
        found[key] = value
    return found


def _parse(option: str, value: Any) -> Any:
    """Return a JSON value of an option as the value of its field. Raises ValueError if it has a wrong type."""
    _, types, wanted = _OPTIONS[option]
    if type(value) not in types:  # not isinstance: True is an int
        raise ValueError(f"must be {wanted}, got {value!r}")
    if option == "block_size":
        return parse_size(value)
    return not value if option == "sequential_requests" else value
