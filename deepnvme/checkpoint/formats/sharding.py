"""Find out which bytes of an object's DTensors one rank writes when several ranks save the object together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.serialization import location_tag

from deepnvme.memory.tensor_bytes import flat_bytes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Span = tuple[int, int]
"""A range of indices or bytes: (begin, end)."""


@dataclass(eq=False)
class Sharded:
    """Stand-in for the storage of a whole tensor, of which this rank writes only some runs of bytes."""

    local: torch.Tensor
    """The bytes that this rank writes, one run after the other."""
    runs: list[Span]
    """Ranges (begin, end) of the runs in the whole tensor, in bytes."""
    whole: int
    """Bytes of the whole tensor."""

    def nbytes(self) -> int:
        """Return the size of the whole tensor in bytes. A method, as on UntypedStorage."""
        return self.whole


class JointPickling:
    """State of one rank during a joint save, by which all ranks write the same pickle of their object."""

    def __init__(self) -> None:
        self._shards: dict[Any, tuple[Sharded, torch.Tensor]] = {}
        """Results of :meth:`shard_of` by key. The local tensors are kept, so that no other tensor can get the same key."""
        self._locations: dict[str, str] = {}

    def shard_of(self, tensor: torch.Tensor) -> Sharded | None:
        """Return the stand-in for the storage of a DTensor, or None for any other tensor.

        DTensors with the same local memory, shapes, mesh and placements get the same stand-in.

        Raises:
            ValueError: If the placements do not say which bytes of the whole tensor this rank has.
        """
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return None
        local: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
        key = (
            local.untyped_storage()._cdata, local.storage_offset(), local.dtype, tuple(local.shape), local.stride(),
            tuple(tensor.shape), tensor.placements, tensor.device_mesh,
        )  # fmt: skip
        if key not in self._shards:
            self._shards[key] = _shard_of(tensor, local), local
        return self._shards[key][0]

    def location(self, storage: torch.UntypedStorage) -> str:
        """Return the location tag of a storage ("cpu", "cuda:0"), with its device renumbered.

        Devices are numbered in the order in which they occur in the object, since each rank uses different devices.
        """
        tag: str = location_tag(storage)
        kind, colon, _ = tag.partition(":")
        if colon and tag not in self._locations:
            number = sum(known.startswith(f"{kind}:") for known in self._locations)
            self._locations[tag] = f"{kind}:{number}"
        return self._locations.get(tag, tag)


def _shard_of(tensor: DTensor, local: torch.Tensor) -> Sharded:
    """Return the bytes of a DTensor that this rank writes. If several ranks have the same bytes, the first one writes them."""
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    nbytes = tensor.numel() * tensor.dtype.itemsize
    if coordinate is None or local.numel() == 0:
        return Sharded(flat_bytes(local.new_empty(0)), [], nbytes)
    held: list[list[Span]] = [[(0, size)] for size in tensor.shape]
    replica = False
    for index, count, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if placement.is_replicate():
            replica = replica or index > 0
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
    if replica:
        return Sharded(flat_bytes(local.new_empty(0)), [], nbytes)
    return Sharded(flat_bytes(local.contiguous()), byte_runs(tuple(tensor.shape), held, tensor.dtype.itemsize), nbytes)


def part_of_spans(spans: list[Span], count: int, index: int, split: int) -> list[Span]:
    """Divide a dimension's spans into ``count`` parts, as torch shards the dimension, and return part ``index``.

    The part is contiguous within the spans or, for a strided shard, ``split`` pieces spread over them. Raises ValueError if the
    pieces of a strided shard would be uneven.
    """
    total = sum(end - begin for begin, end in spans)
    if split > 1 and total % (count * split):
        raise ValueError(f"{total} in {count} shards of {split} strides are uneven: save the full_tensor() of that DTensor")
    each = -(-total // (count * split))
    parts: list[Span] = []
    for piece in range(index, count * split, count):
        for begin, end in taken(spans, piece * each, (piece + 1) * each):
            if parts and parts[-1][1] == begin:
                parts[-1] = (parts[-1][0], end)
            else:
                parts.append((begin, end))
    return parts


def taken(spans: Iterable[Span], begin: int, end: int) -> list[Span]:
    """Return the parts of ``spans`` that hold elements ``begin`` to ``end``, counted through all spans one after the other."""
    parts, before = [], 0
    for first, last in spans:
        low, high = max(first, first + begin - before), min(last, first + end - before)
        if low < high:
            parts.append((low, high))
        before += last - first
    return parts


def byte_runs(shape: tuple[int, ...], held: list[list[Span]], itemsize: int) -> list[Span]:
    """Return the contiguous byte ranges of the full tensor that a shard covers, in the order of the shard's own bytes.

    Args:
        shape: Shape of the full tensor.
        held: For each dimension, the ranges of indices that the shard has.
        itemsize: Bytes of an element.
    """
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    cut = max((dim for dim, spans in enumerate(held) if spans != [(0, shape[dim])]), default=0)
    rows = (itertools.chain.from_iterable(range(*span) for span in spans) for spans in held[:cut])
    spans, stride = (held[cut], strides[cut]) if held else ([(0, 1)], itemsize)
    runs = []
    for indices in itertools.product(*rows):
        base = sum(index * width for index, width in zip(indices, strides, strict=False))
        runs += [(base + begin * stride, base + end * stride) for begin, end in spans]
    return runs
