"""Drive profiles of a test's own, and the settings that engines are made with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from deepnvme import AioConfig, Engine
from deepnvme.drives import profiles
from deepnvme.drives.mounts import drive_of
from deepnvme.drives.profiles import default_settings


class EngineSettings(NamedTuple):
    """What an engine says of itself."""

    block_size: int
    blocks: int
    """Of that size, how many may be under way for each worker."""
    num_threads: int

    @classmethod
    def of(cls, engine: Engine) -> EngineSettings:
        return cls(engine.block_size, engine.in_flight_bytes // engine.block_size, engine.num_threads)


def engine_settings(config: AioConfig, in_flight_bytes: int | None = None) -> EngineSettings:
    """Those of an engine that is made by these settings, each worker of which may have so many bytes under way."""
    most = config.queue_depth if in_flight_bytes is None else in_flight_bytes // config.block_size
    return EngineSettings(config.block_size, min(config.queue_depth, most), config.intra_op_parallelism)


def default_for(directory: Path) -> AioConfig:
    """The settings of the directory's drive if it has no profile."""
    return default_settings(drive_of(directory))


def store_profile(directory: Path, settings: AioConfig) -> Path:
    """Give the drive of a directory a profile. Returns its file."""
    return profiles.store_profile(drive_of(directory), settings)


@contextlib.contextmanager
def engines_made() -> Iterator[list[EngineSettings]]:
    """The settings of each engine that is made meanwhile, in the order of time."""
    made: list[EngineSettings] = []
    original = Engine.__init__

    def recording(engine: Engine, *arguments: Any, **named: Any) -> None:
        original(engine, *arguments, **named)
        made.append(EngineSettings.of(engine))

    with mock.patch.object(Engine, "__init__", recording):
        yield made
