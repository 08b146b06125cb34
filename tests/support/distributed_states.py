"""What tests of distributed checkpoints save, and how they ask for parts of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem


def state(seed: int) -> dict[str, Any]:
    """One tensor of each kind that a plan tells apart, large and small, and objects; equal seeds, equal states."""
    torch.manual_seed(seed)
    return {
        "large": torch.randn(600, 601),
        "transposed": torch.randn(500, 501).t(),
        "part": torch.randn(400, 800)[:, 10:700],
        "bf16": torch.randn(1000, 301).bfloat16(),
        "f8": torch.randn(30, 5).to(torch.float8_e4m3fn),
        "bool": torch.rand(10) > 0.5,
        "expanded": torch.randn(1, 4).expand(3, 4),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(float(seed)),
        "parameter": torch.nn.Parameter(torch.randn(7)),
        "objects": {"step": seed, "list": [torch.arange(5) * seed, f"text {seed}"]},
        "small": {str(size): torch.full((size,), float(seed)) for size in range(30)},
        "blob": "x" * (600_000 + seed),
    }


def blank() -> dict[str, Any]:
    """What any of them is loaded into."""
    found = state(0)
    found["expanded"] = torch.zeros(3, 4)
    return found


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found.float() if found.itemsize == 1 else found, expected.float() if found.itemsize == 1 else expected)
    else:
        assert found == expected


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def request(name: str, offsets: tuple[int, ...], lengths: tuple[int, ...], number: int = 0, dims: int | None = None) -> ReadItem:
    """To read a part of an item into the target of that number. ``dims``: the item's number of dimensions."""
    index = MetadataIndex(name, torch.Size([0] * (len(offsets) if dims is None else dims)))
    into = torch.Size([0] * len(lengths))
    return ReadItem(LoadItemType.TENSOR, MetadataIndex(f"{number}"), into, index, torch.Size(offsets), torch.Size(lengths))


class Into:
    """A planner that has tensors for requests, by their numbers."""

    def __init__(self, targets: list[torch.Tensor]) -> None:
        self.targets = targets
        self.committed: list[int] = []

    def resolve_tensor(self, request: ReadItem) -> torch.Tensor:
        return self.targets[int(request.dest_index.fqn)]

    def commit_tensor(self, request: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(int(request.dest_index.fqn))
