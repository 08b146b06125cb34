"""Weights in checkpoint files, in the form that the model wants, as the source of a store."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from deepnvme.memory.host import empty_aligned
from deepnvme.memory.lease import Transfer
from deepnvme.model.weight_differences import WeightInfo

from .extent_reader import ExtentReader
from .weights.extent_store import ExtentStore


class LocatedSource(contextlib.AbstractContextManager["LocatedSource"]):
    """The weights of a checkpoint, for :meth:`WeightStore.build`: FP8 weights dequantised, others converted.

    A block's weights are read together when the first of them is, and kept in memory until the last of them was read. Not
    thread-safe.

    Args:
        store: The weights where they lie. It is closed with this object.
    """

    def __init__(self, store: ExtentStore) -> None:
        self._store = store
        self._reader = ExtentReader(store)
        self._reads: dict[str, _ExtentRead] = {}

    def names(self) -> Iterable[str]:
        """Return the names of all weights, including every name of a tied weight."""
        return [*self._store.weights, *self._store.ties]

    def info(self, name: str) -> WeightInfo:
        """Return the dtype and shape that the model wants of a weight."""
        return self._store.weights[self._store.ties.get(name, name)][1].info

    def ties(self) -> Mapping[str, str]:
        """Return a mapping from each further name of a tied weight to its first name."""
        return self._store.ties

    def read_into(self, name: str, out: torch.Tensor) -> _Pending:
        """Start reading a weight, which is not read twice: see :meth:`deepnvme.checkpoint.weight_locations.Source.read_into`."""
        name = self._store.ties.get(name, name)
        extent = self._store.weights[name][0].name
        if extent not in self._reads:
            memory = empty_aligned(self._reader.nbytes(extent))
            weights = {weight.name for weight in self._store.extents[extent].weights}
            self._reads[extent] = _ExtentRead(memory, self._reader.read(extent, memory), weights)
        return _Pending(functools.partial(self._copy, extent, name, out))

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        self._store.close()

    def _copy(self, extent: str, name: str, out: torch.Tensor) -> None:
        """Wait until an extent was read, and copy one of its weights."""
        read = self._reads[extent]
        error = read.transfer.exception()
        if error is not None:
            raise error
        (weight,) = (each for each in self._reader.extents[extent].weights if each.name == name)
        out.copy_(weight.stored(read.memory))
        read.left.discard(name)
        if not read.left:
            del self._reads[extent]


class _ExtentRead(NamedTuple):
    """An extent that is being read, or in memory."""

    memory: torch.Tensor
    transfer: Transfer
    left: set[str]
    """Names of the weights that were not copied yet."""


class _Pending(NamedTuple):
    """A pending read of a weight."""

    result: Callable[[], None]
