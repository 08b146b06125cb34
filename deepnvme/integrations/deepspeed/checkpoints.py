"""Make DeepSpeed create this package's checkpoint engine if its configuration asks for the fast writer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from deepnvme.checkpoint import NVMeCheckpointEngine

from .replacement import Replacement, attribute, module

_PARAMETERS = ("config_params", "groups", "zero_stage", "has_moe_layers", "optimize_dp_state")


def replacements() -> Iterator[Replacement]:
    """Return replacements of ``create_checkpoint_engine`` in every module of DeepSpeed that has it by name.

    Raises UnknownShape if one of these modules does not have it, or its parameters differ.
    """
    places = [module(f"deepspeed.runtime.{name}") for name in ("engine", "checkpoint_engine", "checkpoint_engine.utils")]
    theirs = attribute(places[-1], "create_checkpoint_engine", _PARAMETERS)

    @functools.wraps(theirs)
    def create_checkpoint_engine(config_params: Any, *arguments: Any, **named: Any) -> Any:
        writer = config_params.checkpoint_config["writer"] if config_params is not None else None
        if writer is not None and writer["type"] == "FAST" and not writer["decoupled"]:
            return NVMeCheckpointEngine(config_params)
        return theirs(config_params, *arguments, **named)

    for place in places:
        attribute(place, "create_checkpoint_engine", _PARAMETERS)
        yield Replacement(place, "create_checkpoint_engine", create_checkpoint_engine)
