"""Writes the extents of a new store as a pipeline: one is read while another is converted and earlier ones are written."""

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
"""Extents in memory that are read or finished: one is read while another is converted and checksummed."""
_WRITTEN = 2
"""Extents in memory that are being written."""


class Coming:
    """An extent to be built: its layout with the weights as the source has them, and its layout in the store.

    ``read`` is the former, ``extent`` the latter; they differ if weights are converted or quantised.
    """

    def __init__(
        self,
        plan: ExtentPlan,
        source: Source,
        names: Mapping[str, str],
        dtype: torch.dtype | None = None,
        scheme: Scheme | None = None,
    ) -> None:
        """Lay the extent out.

        Args:
            plan: Name of the extent and of its weights.
            source: Where the weights are read from.
            names: The source's name of each weight.
            dtype: To which floating-point weights are converted; None for no conversion.
            scheme: How to quantise weights that become smaller by it; not applied to REST, whose weights stay in memory.
        """
        infos = {weight: source.info(names[weight]) for weight in plan.weights}
        self.read = laid_out(plan.name, infos)
        converted = {weight: _converted(info, dtype) for weight, info in infos.items()}
        self.extent = laid_out(plan.name, converted, None if plan.name == REST else scheme)
        self._source = source
        self._names = names

    @property
    def converts(self) -> bool:
        """Whether any weight is converted or quantised."""
        return self.read != self.extent

    def start(self, memory: torch.Tensor) -> list[Pending]:
        """Start reading all weights into ``memory``, which has ``read.nbytes`` bytes; return one pending read for each."""
        return [
            self._source.read_into(self._names[weight.name], memory[weight.offset : weight.end]) for weight in self.read.weights
        ]

    def convert(self, read: torch.Tensor, memory: torch.Tensor) -> None:
        """Convert and quantise the weights that were read.

        Args:
            read: The weights as they were read, ``read.nbytes`` bytes.
            memory: For the result, ``extent.nbytes`` bytes.

        Raises:
            ValueError: If a weight, which is named, cannot be quantised.
        """
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
    """Read, convert and write all extents. Blocks.

    Args:
        coming: The extents, at least one.
        store: Where they are written. Not committed here.
        key: Gives the name of an extent's tensor in the store.
        checksum: Whether to compute the CRC-32 of each extent.
        told: Called with the bytes of each extent that has been written.

    Returns:
        The extents as they were written, with their checksums.
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
    """Yield each extent with the memory into which it is being read and the pending reads."""
    for each in coming:
        lease = pool.lease(each.read.nbytes)
        yield each, lease, each.start(lease.buffer)


def _ahead(items: Iterator[T], count: int) -> Iterator[T]:
    """Yield the items, having taken ``count`` more from the iterator."""
    waiting = deque(itertools.islice(items, count))
    for item in items:
        waiting.append(item)
        del item
        yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


def _budget(coming: Sequence[Coming]) -> int:
    """Return how many bytes are in memory at a time at most."""
    read = [each.read.nbytes for each in coming]
    written = [each.extent.nbytes for each in coming]
    most = max(
        sum(written[max(0, at - _WRITTEN) : at]) + sum(read[at : at + _READ]) + (written[at] if coming[at].converts else 0)
        for at in range(len(coming))
    )
    return padded(most + most // 8)  # a lease may take up to an eighth more than asked for


def _clear_gaps(extent: Extent, memory: torch.Tensor) -> None:
    """Zero the bytes between and behind the weights.

    Otherwise old data from memory would get to the drive, and equal weights would have different checksums.
    """
    end = 0
    for weight in extent.weights:
        memory[end : weight.offset] = 0
        end = weight.end
    memory[end:] = 0


def _converted(info: WeightInfo, dtype: torch.dtype | None) -> WeightInfo:
    """Return a weight's dtype and shape after conversion, which only concerns floating point."""
    return info if dtype is None or not info.dtype.is_floating_point else WeightInfo(dtype, info.shape)
