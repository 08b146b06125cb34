"""Reads extents of weights; threads check and dequantise each while the next ones are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from deepnvme.memory.alignment import padded
from deepnvme.memory.lease import Transfer
from deepnvme.model.fp8 import ScaledMatrices, dequantize_matrices, distance_fp8
from deepnvme.model.quantization import QuantizedLayout, dequantize
from deepnvme.model.structure import UNBLOCKED_EXTENT

from .weights.extent_store import ExtentStore
from .weights.manifest import Extent, Weight, layout_extent

_THREADS = 2
"""Number of threads that check and dequantise extents: a core computes checksums at 2.5 GB/s, and a drive may read 3 GB/s."""


class ExtentReader:
    """Reads the extents of a store into memory, checks them, and dequantises or copies weights that are stored in another form.

    A quantised extent is read into the end of its memory, and dequantised from there to the beginning, weight by weight. The
    memory is a little larger than the result, so that no dequantised weight overwrites bytes that are still needed. Threads do
    this, and verify the checksum of an extent that is read for the first time.
    """

    def __init__(self, store: ExtentStore) -> None:
        self._store = store
        self.extents: Mapping[str, Extent] = {name: _dequantized(extent) for name, extent in store.extents.items()}
        """The extents by name, with their layout in memory, after dequantisation."""
        self._starts = {name: _start(extent, self.extents[name]) for name, extent in store.extents.items()}
        self._threads = ThreadPoolExecutor(_THREADS, "deepnvme-weights")
        # Together as many as there are processors: more would only wait for each other, and for what computes.
        self._processors = max(1, len(os.sched_getaffinity(0)) // _THREADS)

    def nbytes(self, extent: str) -> int:
        """Return the bytes of memory that :meth:`read` needs for an extent, including the room for dequantising it."""
        return self._starts[extent] + self._store.extents[extent].nbytes

    def read(self, extent: str, memory: torch.Tensor) -> Transfer:
        """Start reading an extent into ``memory``, which has ``nbytes(extent)`` bytes; return at once.

        When the transfer is done, the weights lie in ``memory`` as :attr:`extents` describes.
        """
        ready = self._is_ready(extent) and not self._store.verifies(extent)
        reading = self._store.read(extent, memory[self._starts[extent] :])
        if ready:
            return reading
        return self._threads.submit(self._finish, extent, [(reading, memory)])

    def close(self) -> None:
        """End the threads. Waits for them."""
        self._threads.shutdown()

    def _finish(self, extent: str, only: list[tuple[Transfer, torch.Tensor]]) -> None:
        """Wait for a read, and dequantise the extent.

        Args:
            extent: Name of the extent.
            only: The read and its memory, as the only element of a list. It is removed from the list, because the thread
                pool keeps the arguments of a call that has ended.
        """
        reading, memory = only.pop()
        try:
            error = reading.exception()
            if error is not None:
                raise error
            self._dequantize(extent, memory)
        finally:
            del reading, memory  # which a traceback would keep

    def _is_ready(self, extent: str) -> bool:
        """Return whether all weights of an extent are read in the form in which the model uses them."""
        return self._store.extents[extent] is self.extents[extent]

    def _dequantize(self, extent: str, memory: torch.Tensor) -> None:
        """Dequantise the extent that was read into the end of ``memory``. On a device, only enqueues that work."""
        if self._is_ready(extent):
            return
        start = self._starts[extent]
        # First all scales, which values are going to overwrite.
        scales = {weight.name: _scales(weight, memory[start:]) for weight in self._store.extents[extent].weights}
        for stored, ready in zip(self._store.extents[extent].weights, self.extents[extent].weights, strict=True):
            if stored.scales:
                dequantize_matrices(stored.stored(memory[start:]), scales[stored.name], ready.view(memory), self._processors)
            elif stored.scheme is None:
                stored.copy(memory[start:], ready.view(memory))
            else:
                dequantize(stored.scheme, stored.stored(memory[start:]), ready.view(memory), threads=self._processors)


def memory_of_blocks(store: ExtentStore) -> int:
    """Return the bytes of memory that all extents of blocks take together, as a memory budget counts them.

    These are more bytes than the model's weights have: whole pages are read, and an extent keeps the memory that it is read
    into, also if its weights are converted to a smaller dtype.
    """
    extents = [extent for name, extent in store.extents.items() if name != UNBLOCKED_EXTENT]
    return sum(_start(extent, _dequantized(extent)) + extent.nbytes for extent in extents)


def _scales(weight: Weight, memory: torch.Tensor) -> list[tuple[ScaledMatrices, torch.Tensor]]:
    """Return copies of the scales of a weight's parts, if it is in FP8. ``memory``: the bytes of the extent."""
    return [(each.matrices, each.float32(memory)) for each in weight.scales]


def _dequantized(extent: Extent) -> Extent:
    """Return the layout that an extent has after its weights are dequantised."""
    if all(weight.ready for weight in extent.weights):
        return extent
    return layout_extent(extent.name, {weight.name: weight.info for weight in extent.weights})


def _start(stored: Extent, ready: Extent) -> int:
    """Return the offset, in bytes, at which an extent is read into its memory.

    It is large enough that no dequantised weight overwrites stored weights that are still to be dequantised.
    """
    if stored is ready:
        return 0
    return padded(max((0, *map(_distance, stored.weights, ready.weights))))


def _distance(stored: Weight, ready: Weight) -> int:
    """Return the least offset, in bytes, to read an extent at so that dequantising one weight overwrites no later one."""
    if stored.scales:
        parts = [each.matrices for each in stored.scales]
        return ready.offset - stored.offset + distance_fp8(parts, stored.info.dtype.itemsize)
    if stored.scheme is None:
        return ready.end - stored.offset
    layout = QuantizedLayout.of(stored.scheme, stored.info.shape)
    return ready.offset - stored.offset + layout.distance(stored.info.dtype.itemsize)
