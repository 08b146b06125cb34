"""The base class of what a stream reads weights from: a store that was built, or a checkpoint in its own files."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from deepnvme.memory.lease import Transfer
from deepnvme.model.weight_differences import WeightMismatch, described, differences

from .manifest import Extent, Weight

Self = TypeVar("Self", bound="ExtentStore")


class ExtentStore(contextlib.AbstractContextManager[Any]):
    """A model's weights on the drive, grouped into extents. An extent is read as one when a block needs its weights.

    Args:
        extents: As the attribute.
        blocks: As the attribute.
        ties: As the attribute.
    """

    def __init__(self, extents: Mapping[str, Extent], blocks: Mapping[str, tuple[str, ...]], ties: Mapping[str, str]) -> None:
        self.extents = extents
        """Extents by name, in the order in which they are first needed."""
        self.blocks = blocks
        """Names of the extents that each block needs, by the module's name; without UNBLOCKED_EXTENT, which is always needed."""
        self.ties = ties
        """First name of each tied weight, by its further names."""
        self.weights: Mapping[str, tuple[Extent, Weight]] = {
            weight.name: (extent, weight) for extent in extents.values() for weight in extent.weights
        }
        """The extent and the description of each weight, by the weight's (first) name."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read for all extents together."""
        return sum(extent.nbytes for extent in self.extents.values())

    @property
    @abstractmethod
    def title(self) -> str:
        """What the weights are read from, for error messages."""

    @abstractmethod
    def read(self, extent: str, out: torch.Tensor) -> Transfer:
        """Start reading an extent into ``out``, which has the extent's ``nbytes`` bytes (uint8); return at once."""

    @abstractmethod
    def verifies(self, extent: str) -> bool:
        """Return whether :meth:`read` will check the extent. The thread that asks for the read's error does the check."""

    @abstractmethod
    def close(self) -> None:
        """Wait for reads in flight, and release the files. Idempotent."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def compare(self, model: nn.Module) -> list[str]:
        """Return how the weights differ from a model's parameters and persistent buffers, one line for each difference.

        Compares names (missing, unexpected), shapes, dtypes and which weights are tied; not the values. The model may be on the
        meta device.
        """
        wanted, ties = described(model)
        found = {name: weight.info for name, (_, weight) in self.weights.items()}
        found |= {alias: found[name] for alias, name in self.ties.items()}
        return differences(wanted, ties, found, self.ties)

    def check(self, model: nn.Module) -> None:
        """Raise WeightMismatch, which names the differences, if :meth:`compare` finds any."""
        found = self.compare(model)
        if found:
            raise WeightMismatch(f"{self.title} is not of this {type(model).__name__}", found)
