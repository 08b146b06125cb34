"""Samples that tests write and know."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.data import SampleWriter
from deepnvme.ops import load_async_io

COLUMNS: dict[str, Any] = {"image": "bytes", "label": torch.int64, "text": "str", "points": (torch.float32, (-1, 3))}


def made(number: int) -> dict[str, Any]:
    """The sample with this number: some are empty, some small, some of many sectors."""
    drawn = random.Random(number)
    length = drawn.choice([0, drawn.randrange(200), drawn.randrange(5000), drawn.randrange(40_000)])
    return {
        "image": drawn.randbytes(length),
        "label": torch.tensor(number),
        "text": "é" * drawn.randrange(20),
        "points": torch.full((drawn.randrange(5), 3), float(number)),
    }


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    if list(found) != list(expected):
        return False
    pairs = ((found[name], expected[name]) for name in expected)
    return all(
        torch.equal(one, other) and one.dtype == other.dtype if isinstance(other, torch.Tensor) else one == other
        for one, other in pairs
    )


@pytest.fixture
def indexes(drive: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where indexes of files are kept."""
    load_async_io()  # which is found in the cache, too
    monkeypatch.setenv("XDG_CACHE_HOME", str(drive / "cache"))
    return drive / "cache" / "deepnvme" / "samples"


Write = Callable[..., Path]


@pytest.fixture
def write(drive: Path) -> Write:
    """Writes samples 0 to ``count - 1`` into a directory on the drive, and returns it."""

    def write(count: int, name: str = "samples", **options: Any) -> Path:
        with SampleWriter(drive / name, COLUMNS, **options) as writer:
            for number in range(count):
                writer.append(**made(number))
        return drive / name

    return write
