"""Describe what one rank has of an object that several ranks save together: its shard of each DTensor."""

from __future__ import annotations

import bisect
import itertools
import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.serialization import location_tag

from deepnvme.memory.alignment import PAGE
from deepnvme.memory.tensor_bytes import flat_bytes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Span = tuple[int, int]
"""A range of indices: (begin, end)."""


class Sharded:
    """Stands for the storage of a whole tensor of which this rank writes some bytes."""

    def __init__(self, local: torch.Tensor, nbytes: int, offsets: array[int], lengths: array[int]) -> None:
        self.local = local
        """The bytes that this rank writes, one run after the other."""
        self.offsets = offsets
        """Where each run begins in the whole tensor, in bytes."""
        self.lengths = lengths
        """Bytes of each run."""
        self._nbytes = nbytes

    def nbytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return self._nbytes

    def device_storage(self) -> torch.UntypedStorage:
        """Return a storage on the device of the shard."""
        return self.local.untyped_storage()


class Across:
    """Makes every rank pickle the same object alike: one for each save and rank."""

    def __init__(self) -> None:
        self._shards: dict[Any, Sharded] = {}
        self._kept: list[torch.Tensor] = []
        self._locations: dict[str, str] = {}

    def shard_of(self, tensor: torch.Tensor) -> Sharded | None:
        """Return what stands for the storage of a DTensor, or None for any other tensor.

        DTensors with the same local memory, shapes, mesh and placements get the same result.

        Raises:
            ValueError: If the placements do not say which bytes of the whole this rank has.
        """
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return None
        local: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
        key = (
            local.untyped_storage()._cdata, local.storage_offset(), local.dtype, tuple(local.shape), local.stride(),
            tuple(tensor.shape), tensor.placements, tensor.device_mesh,
        )  # fmt: skip
        shard = self._shards.get(key)
        if shard is None:
            shard = self._shards[key] = _shard_of(tensor, local)
            self._kept.append(local)  # keeps its storage alive, so that no other tensor can get the same key
        return shard

    def location(self, storage: torch.UntypedStorage) -> str:
        """Return the location tag of a storage, with its device renumbered.

        Devices are numbered in the order in which they occur in the object, because each rank uses other devices.
        """
        tag: str = location_tag(storage)
        kind, colon, _ = tag.partition(":")
        if colon and tag not in self._locations:
            number = sum(known.startswith(f"{kind}:") for known in self._locations)
            self._locations[tag] = f"{kind}:{number}"
        return self._locations.get(tag, tag)


def _shard_of(tensor: DTensor, local: torch.Tensor) -> Sharded:
    """Return which bytes of a DTensor this rank writes. Replicas share the work."""
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    nbytes = tensor.numel() * tensor.dtype.itemsize
    if coordinate is None or local.numel() == 0:
        return Sharded(flat_bytes(local.new_empty(0)), nbytes, array("Q"), array("Q"))
    held: list[list[Span]] = [[(0, size)] for size in tensor.shape]
    replica, replicas = 0, 1
    for index, count, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if placement.is_replicate():
            replica, replicas = replica * count + index, replicas * count
        elif type(placement).__name__ in ("Shard", "_StridedShard"):
            dim = placement.dim % tensor.dim()  # type: ignore[attr-defined]
            held[dim] = part_of_spans(held[dim], count, index, getattr(placement, "split_factor", 1))
        else:
            raise ValueError(f"a DTensor that is placed as {placements} cannot be saved: redistribute it to shards or replicas")
    shape = tuple(sum(end - begin for begin, end in spans) for spans in held)
    if shape != tuple(local.shape):
        raise ValueError(
            f"a DTensor of {tuple(tensor.shape)} placed as {placements} has {tuple(local.shape)} of it here, where {shape} were"
            " expected: save its full_tensor()"
        )
    offsets, lengths = byte_runs(tuple(tensor.shape), held, tensor.dtype.itemsize)
    data = flat_bytes(local.contiguous())
    if replicas > 1:
        begin, end, offsets, lengths = equal_share(offsets, lengths, replica, replicas)
        data = data[begin:end]
    return Sharded(data, nbytes, offsets, lengths)


def part_of_spans(spans: list[Span], count: int, index: int, split: int) -> list[Span]:
    """Return one of ``count`` parts of the spans: one contiguous chunk, or ``split`` pieces spread over all."""
    total = sum(end - begin for begin, end in spans)
    if split > 1 and total % (count * split):
        raise ValueError(f"{total} in {count} shards of {split} strides are uneven: save the full_tensor() of that DTensor")
    each = -(-total // (count * split))
    parts: list[Span] = []
    for piece in range(index, count * split, count):
        for begin, end in _taken(spans, piece * each, (piece + 1) * each):
            if parts and parts[-1][1] == begin:
                parts[-1] = (parts[-1][0], end)
            else:
                parts.append((begin, end))
    return parts


def _taken(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """Return elements [begin, end) of those that the spans hold together, as spans."""
    taken, before = [], 0
    for first, last in spans:
        low, high = max(first, first + begin - before), min(last, first + end - before)
        if low < high:
            taken.append((low, high))
        before += last - first
    return taken


def byte_runs(shape: tuple[int, ...], held: list[list[Span]], itemsize: int) -> tuple[array[int], array[int]]:
    """Return (offsets, lengths), in bytes, of the runs that are contiguous in the whole, in the order of the shard."""
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    cut = max((dim for dim, spans in enumerate(held) if spans != [(0, shape[dim])]), default=0)
    rows = (itertools.chain.from_iterable(range(*span) for span in spans) for spans in held[:cut])
    spans = held[cut] if held else [(0, 1)]
    stride = strides[cut] if held else itemsize
    offsets, lengths = array("Q"), array("Q")
    for indices in itertools.product(*rows):
        base = sum(index * width for index, width in zip(indices, strides, strict=False))
        for begin, end in spans:
            offsets.append(base + begin * stride)
            lengths.append((end - begin) * stride)
    return offsets, lengths


def equal_share(
    offsets: array[int], lengths: array[int], share: int, shares: int
) -> tuple[int, int, array[int], array[int]]:
    """Return one of several equal shares of runs of bytes.

    The shares are equal except that their borders are moved to page boundaries of the whole. A border belongs to the page that
    it is in, so that neighbouring shares agree on it.

    Args:
        offsets: Where each run begins in the whole, in bytes.
        lengths: Bytes of each run.
        share: Number of the share, from 0.
        shares: Number of shares.

    Returns:
        (begin, end, offsets, lengths): the share's range within the concatenated runs, and its runs.
    """
    ends = list(itertools.accumulate(lengths))
    total = sum(lengths)

    def border(number: int) -> int:
        at = total * number // shares
        run = bisect.bisect_right(ends, at)
        if run == len(ends):
            return total
        start = ends[run] - lengths[run]
        return max(start, at - (offsets[run] + at - start) % PAGE)

    begin, end = border(share), border(share + 1)
    own_offsets, own_lengths = array("Q"), array("Q")
    for offset, length, last in zip(offsets, lengths, ends, strict=True):
        low, high = max(begin, last - length), min(end, last)
        if low < high:
            own_offsets.append(offset + low - (last - length))
            own_lengths.append(high - low)
    return begin, end, own_offsets, own_lengths
