"""The ``aio`` block of a DeepSpeed JSON configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from deepnvme.engine import Backend
from deepnvme.files.regular_files import open_regular
from deepnvme.telemetry.sizes import byte_count

__all__ = ["AioConfig"]

_WORKERS = ("intra_op_parallelism", "thread_count", "num_threads")
"""Names under which an ``aio`` block may give the number of workers."""


class AioConfig(BaseModel):
    """Settings of an ``aio_handle``, with the names and defaults of DeepSpeed's ``aio`` block.

    Follows DeepSpeed 0.19, ``runtime/swap_tensor/constants.py``. ``thread_count`` and ``num_threads`` are also accepted for
    ``intra_op_parallelism``: DeepSpeed's older versions and its tutorial use them. An unknown key is an error: otherwise a
    misspelt key would silently leave the default unchanged.

    Raises:
        pydantic.ValidationError: A ValueError that names the key and the offending value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    block_size: int = Field(default=1048576, ge=512, le=1 << 30)
    """Most bytes of one I/O block. A size such as "1MiB" or "512K" is accepted, too, and kept as a number."""
    queue_depth: int = Field(default=8, ge=1, le=4096)
    """Most I/O blocks in flight at a time, for each worker."""
    intra_op_parallelism: int = Field(default=1, ge=1, le=256, validation_alias=AliasChoices(*_WORKERS))
    """Number of workers for each drive."""
    single_submit: bool = False
    """Whether each I/O block is submitted by a system call of its own."""
    overlap_events: bool = True
    """Accepted and reported, but without effect: the engine always overlaps."""
    use_gds: bool = False
    """Whether DeepSpeed uses its ``gds`` op instead of ``async_io``. Not an argument of ``aio_handle``."""
    backend: Backend = "auto"
    """The only backend that the engine may use; "auto" for the best available one. DeepSpeed ignores this setting."""

    @property
    def in_flight_bytes(self) -> int:
        """Most bytes in flight for each drive: block size times queue depth times number of workers."""
        return self.block_size * self.queue_depth * self.intra_op_parallelism

    def __str__(self) -> str:
        """Return the settings in words: "block_size 1048576, queue_depth 32, 1 worker"."""
        workers = "1 worker" if self.intra_op_parallelism == 1 else f"{self.intra_op_parallelism} workers"
        parts = [f"block_size {self.block_size}", f"queue_depth {self.queue_depth}", workers]
        if self.single_submit:
            parts.append("single_submit")
        if self.backend != "auto":
            parts.append(self.backend)
        return ", ".join(parts)

    @model_validator(mode="before")
    @classmethod
    def _one_name_for_the_workers(cls, block: Any) -> Any:
        """Raise ValueError if the ``aio`` block gives the number of workers under several names."""
        if isinstance(block, Mapping):
            given = [name for name in _WORKERS if name in block]
            if len(given) > 1:
                raise ValueError(f"{' and '.join(given)} are names of the same setting; give one")
        return block

    @field_validator("block_size", mode="before")
    @classmethod
    def _bytes_of_a_size(cls, value: Any) -> Any:
        """Parse a size such as "8M" into bytes. Returns any other value unchanged."""
        return byte_count(value, "block_size") if isinstance(value, str) else value

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, Any] | str | os.PathLike[str]) -> AioConfig:
        """Return the settings in the ``aio`` block of a whole DeepSpeed configuration.

        As in DeepSpeed, a missing or null block gives the defaults.

        Args:
            config: The configuration as a mapping, or the path of its JSON file.

        Raises:
            OSError: If the file cannot be read.
            json.JSONDecodeError: If the file is not JSON. A ValueError.
            ValueError: If the configuration is not a JSON object.
            pydantic.ValidationError: If the block is not valid. A ValueError.
        """
        if not isinstance(config, Mapping):
            with open_regular(config) as file:
                config = json.load(file)
        if not isinstance(config, Mapping):
            raise ValueError(f"a DeepSpeed configuration is a JSON object, got {type(config).__name__}")
        block = config.get("aio")
        return cls() if block is None else cls.model_validate(block)

    def to_deepspeed(self) -> dict[str, dict[str, Any]]:
        """Return ``{"aio": block}`` for a DeepSpeed JSON, from which :meth:`from_deepspeed` makes an equal configuration.

        The keys ``use_gds`` and ``backend`` appear only if they differ from their defaults. Without them, the block can also be
        passed as keyword arguments to DeepSpeed's and this package's ``aio_handle``.
        """
        return {"aio": self.model_dump(exclude=self._unset({"use_gds", "backend"}))}

    def handle_arguments(self) -> dict[str, Any]:
        """Return the settings as keyword arguments for ``aio_handle``; DeepSpeed's takes them too, unless ``backend`` is set."""
        return self.model_dump(exclude={"use_gds"} | self._unset({"backend"}))

    def engine_arguments(self) -> dict[str, Any]:
        """Return the settings as keyword arguments for :class:`deepnvme.Engine`."""
        same = {"block_size", "queue_depth", "single_submit", "backend"}
        return {"num_threads": self.intra_op_parallelism, **self.model_dump(include=same)}

    def _unset(self, names: set[str]) -> set[str]:
        """Return the settings among ``names`` that have their default value."""
        return names - self.model_dump(exclude_defaults=True).keys()
