"""What not every torch that this package takes has."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

ALONE: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}
"""For torch.distributed.checkpoint in one process: older ones find that out, and say so."""


def needs_torch(major: int, minor: int, what: str) -> pytest.MarkDecorator:
    """Of a test of what older ones have not."""
    return pytest.mark.skipif((major, minor) > VERSION, reason=f"needs torch {major}.{minor}: {what}")


shares_are_counted = needs_torch(2, 7, "a gradient that nobody else has, when autograd tells of it")
fsdp_on_cpu = needs_torch(2, 7, "FSDP2 without a GPU")
