"""Extents on their way into a store: one is read ahead while one is finished and those before are written."""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from deepnvme.memory.alignment import padded
from deepnvme.memory.lease import Lease
from deepnvme.memory.pool import BufferPool
from deepnvme.memory.tensor_bytes import memory_of
from deepnvme.store.futures import StoreFuture
from deepnvme.store.tensor_store import TensorStore

from .blocks import REST, ExtentPlan
from .manifest import Extent, WeightInfo, laid_out
from .quantization import Scheme, quantize
from .sources import Pending, Source

T = TypeVar("T")

_READ = 2
_WRITTEN = 2
"""Extents in memory at a time: one read while another is finished, and two on their way out."""


class Coming:
    """An extent as it is read: the weights as their source has them, and what they are to be."""

    def __init__(
        self,
        plan: ExtentPlan,
        source: Source,
        names: Mapping[str, str],
        dtype: torch.dtype | None = None,
        scheme: Scheme | None = None,
    ) -> None:
        """``names``: by which the source knows the weights. ``dtype``: for those of floating point. ``scheme``: for those that it
        is worth it, unless they stay in memory."""
        infos = {weight: source.info(names[weight]) for weight in plan.weights}
        self.read = laid_out(plan.name, infos)
        converted = {weight: _converted(info, dtype) for weight, info in infos.items()}
        self.extent = laid_out(plan.name, converted, None if plan.name == REST else scheme)
        self._source = source
        self._names = names

    @property
    def converts(self) -> bool:
        return self.read != self.extent

    def start(self, memory: torch.Tensor) -> list[Pending]:
        """Start reading into ``read.nbytes`` bytes."""
        return [
            self._source.read_into(self._names[weight.name], memory[weight.offset : weight.end]) for weight in self.read.weights
        ]

    def convert(self, read: torch.Tensor, memory: torch.Tensor) -> None:
        """Into ``extent.nbytes`` bytes. Raises ValueError naming a weight that cannot be quantised."""
        for before, after in zip(self.read.weights, self.extent.weights, strict=True):
            if after.scheme is None:
                after.view(memory).copy_(before.view(read))
            else:
                quantize(before.view(read).to(after.info.dtype), after.scheme, out=after.stored(memory), name=after.name)


def build(
    coming: Sequence[Coming],
    store: TensorStore,
    key: Callable[[str], str],
    checksum: bool,
    told: Callable[[int], None],
) -> list[Extent]:
    """Put every extent, of which there is one at least, under its key; return them with checksums. Blocks.

    ``told``: the bytes of each that has been written.
    """
    pool = BufferPool(_budget(coming))
    written: deque[StoreFuture[int]] = deque()
    built = []
    for each, lease, reads in _ahead(_started(coming, pool), _READ - 1):
        for read in reads:
            read.result()
        if each.converts:
            raw, lease = lease, pool.lease(each.extent.nbytes)
            each.convert(raw.buffer, lease.buffer)
            raw.release()
        memory = lease.buffer
        _clear_gaps(each.extent, memory)
        built.append(replace(each.extent, crc32=zlib.crc32(memory_of(memory)) if checksum else None))
        put = store.put(key(each.extent.name), memory)
        lease.release(after=put)
        del memory, lease
        written.append(put)
        while written and (written[0].done() or len(written) > _WRITTEN):
            told(written.popleft().result())
    for put in written:
        told(put.result())
    return built


def _started(coming: Iterable[Coming], pool: BufferPool) -> Iterator[tuple[Coming, Lease, list[Pending]]]:
    for each in coming:
        lease = pool.lease(each.read.nbytes)
        yield each, lease, each.start(lease.buffer)


def _ahead(items: Iterator[T], count: int) -> Iterator[T]:
    """The items, each when ``count`` more have been asked for."""
    waiting = deque(itertools.islice(items, count))
    for item in items:
        waiting.append(item)
        del item
        yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


def _budget(coming: Sequence[Coming]) -> int:
    """Bytes for all that is in memory at a time."""
    read = [each.read.nbytes for each in coming]
    written = [each.extent.nbytes for each in coming]
    most = max(
        sum(written[max(0, at - _WRITTEN) : at]) + sum(read[at : at + _READ]) + (written[at] if coming[at].converts else 0)
        for at in range(len(coming))
    )
    return padded(most + most // 8)  # what leases may take beyond what they ask for


def _clear_gaps(extent: Extent, memory: torch.Tensor) -> None:
    """What was in the memory before is nobody's business, and the checksum of the same weights is the same."""
    end = 0
    for weight in extent.weights:
        memory[end : weight.offset] = 0
        end = weight.end
    memory[end:] = 0


def _converted(info: WeightInfo, dtype: torch.dtype | None) -> WeightInfo:
    return info if dtype is None or not info.dtype.is_floating_point else WeightInfo(dtype, info.shape)
