"""The ``aio`` block of a DeepSpeed JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from .engine import Backend


class AioConfig(BaseModel):
    """Settings of an ``aio_handle``, with the names and defaults of DeepSpeed's ``aio`` block.

    Contract: DeepSpeed 0.19, ``runtime/swap_tensor/constants.py``; ``thread_count`` and ``num_threads`` are the names that its
    older versions and its tutorial have for ``intra_op_parallelism``. An unknown key is refused by name, since a misspelt one
    would silently leave its default in force.

    Raises pydantic.ValidationError (a ValueError) naming the key and the offending value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    block_size: int = Field(default=1048576, ge=512, le=1 << 30)
    """Bytes in one block."""
    queue_depth: int = Field(default=8, ge=1, le=4096)
    """Blocks under way at a time, for each worker."""
    intra_op_parallelism: int = Field(
        default=1,
        ge=1,
        le=256,
        validation_alias=AliasChoices("intra_op_parallelism", "thread_count", "num_threads"),
    )
    """Workers, each with its own queue."""
    single_submit: bool = False
    """One system call for each block."""
    overlap_events: bool = True
    """Accepted and reported; the engine always overlaps."""
    use_gds: bool = False
    """Whether DeepSpeed is to use the ``gds`` op instead; not an argument of ``aio_handle``."""
    backend: Backend = "auto"
    """Not DeepSpeed's, which ignores it: insists on one backend of ours."""

    @property
    def in_flight_bytes(self) -> int:
        """Memory under transfer at a time: what the setting costs beside CPU time."""
        return self.block_size * self.queue_depth * self.intra_op_parallelism

    @model_validator(mode="before")
    @classmethod
    def _one_name_for_the_workers(cls, block: Any) -> Any:
        if isinstance(block, Mapping):
            given = [name for name in ("intra_op_parallelism", "thread_count", "num_threads") if name in block]
            if len(given) > 1:
                raise ValueError(f"{' and '.join(given)} are names of the same setting; give one")
        return block

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, Any] | str | os.PathLike[str]) -> AioConfig:
        """Take the ``aio`` block of a whole DeepSpeed configuration: a mapping, or the path of its JSON file.

        Defaults, as in DeepSpeed, where the block is missing or null. Raises OSError and json.JSONDecodeError for the file,
        pydantic.ValidationError for the block.
        """
        if not isinstance(config, Mapping):
            with open(config, encoding="utf-8") as file:
                config = json.load(file)
        if not isinstance(config, Mapping):
            raise ValueError(f"a DeepSpeed configuration is a JSON object, got {type(config).__name__}")
        block = config.get("aio")
        return cls() if block is None else cls.model_validate(block)

    def to_deepspeed(self) -> dict[str, dict[str, Any]]:
        """``{"aio": block}`` for a DeepSpeed JSON: :meth:`from_deepspeed` of it is this configuration again.

        The block is also keyword arguments of ``aio_handle``, DeepSpeed's or ours, as long as no backend is insisted on and
        ``use_gds`` is not set; only then do their keys appear.
        """
        optional = {name for name in ("use_gds", "backend") if name not in self.model_dump(exclude_defaults=True)}
        return {"aio": self.model_dump(exclude=optional)}

    def handle_arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``aio_handle``: DeepSpeed's takes them too, unless a backend is insisted on."""
        return self.model_dump(exclude={"use_gds"} if self.backend != "auto" else {"use_gds", "backend"})

    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments for :class:`deepnvme.Engine`."""
        return {
            "block_size": self.block_size,
            "queue_depth": self.queue_depth,
            "num_threads": self.intra_op_parallelism,
            "single_submit": self.single_submit,
            "backend": self.backend,
        }
