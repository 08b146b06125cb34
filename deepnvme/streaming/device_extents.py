"""Extents on a CUDA device: read into pinned memory, and copied to the device on a separate stream while blocks compute."""

from __future__ import annotations

import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

from deepnvme.cache.block import Memory
from deepnvme.memory.lease import Computed, Transfer
from deepnvme.model.structure import UNBLOCKED_EXTENT

from .extent_memory import PinnedSlots, Slots
from .extent_reader import ExtentReader
from .weights.extent_store import ExtentStore


class DeviceSlots(Slots):
    """Slots for extents in a device's memory, allocated and freed by torch.

    If a slot is dropped while a view of it exists, its memory is not used for another slot, and no longer counts as a slot.

    Args:
        device: The device.
        nbytes: Bytes of all slots together.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        super().__init__(nbytes)
        self._device = device
        self._lent = weakref.WeakSet[DeviceSlot]()  # one that is dropped has been given back, too
        self._released: list[DeviceSlot] = []  # slots that were released while the device still used them

    def lease(self, nbytes: int, limit: int = 0) -> DeviceSlot | None:
        """Return a slot; None if all leased slots would then have more bytes than the larger of ``self.limit`` and ``limit``.

        A released slot counts until the device has finished the work that uses it. Never waits.
        """
        self._released[:] = [slot for slot in self._released if not slot.has_ended()]
        if sum(slot.nbytes for slot in self._lent) + nbytes > max(self.limit, limit):
            return None
        slot = DeviceSlot(self.memory(nbytes), self._released)
        self._lent.add(slot)
        return slot

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return newly allocated memory that is not a slot and does not count towards the limit."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


class DeviceSlot:
    """A leased piece of a device's memory, on the CUDA stream that was current when it was leased.

    Args:
        buffer: The memory.
        released: List to which the slot adds itself when it is released.
    """

    def __init__(self, buffer: torch.Tensor, released: list[DeviceSlot]) -> None:
        self.nbytes = buffer.nbytes
        self._released = released
        self._buffer = buffer
        self._computed: Computed | None = None

    @property
    def buffer(self) -> torch.Tensor:
        """The memory as a one-dimensional uint8 tensor. Raises ValueError after release."""
        if self._computed is not None:
            raise ValueError("the slot was released: use its buffer before")
        return self._buffer

    def release(self) -> None:
        """Release the slot, once the work that is now enqueued on the current stream is done. Never blocks."""
        self._computed = Computed(self.buffer.device)
        self._released.append(self)

    def has_ended(self) -> bool:
        """Return whether the slot was released and the device has finished with it."""
        return self._computed is not None and self._computed.done()


class DeviceExtentReader(ExtentReader):
    """Reads the extents of a store into a device's memory, through pinned memory.

    Args:
        store: Store of the extents.
        device: The device.
        count: Number of reads, of the largest extent, for which pinned memory is kept. Each further read in flight pins new
            memory.
    """

    def __init__(self, store: ExtentStore, device: torch.device, count: int) -> None:
        super().__init__(store)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        largest = max((extent.nbytes for name, extent in store.extents.items() if name != UNBLOCKED_EXTENT), default=0)
        self._staging = PinnedSlots(count * largest)
        self._copying = ThreadPoolExecutor(1, "deepnvme-device")

    def read(self, extent: str, memory: torch.Tensor) -> Transfer:
        """Start reading an extent into ``nbytes(extent)`` bytes of the device; return at once."""
        staged = self._staging.lease(self._store.extents[extent].nbytes, sys.maxsize)
        assert staged is not None
        computed = Computed(memory.device)  # what the memory was used for before it was handed out for this
        host = staged.buffer
        reading = self._store.read(extent, host)
        return self._copying.submit(self._copy, extent, [(reading, staged, host, memory)], computed)

    def close(self) -> None:
        """End the threads. Waits for them."""
        super().close()
        self._copying.shutdown()

    def _copy(self, extent: str, only: list[tuple[Transfer, Memory, torch.Tensor, torch.Tensor]], computed: Computed) -> None:
        """Wait for a read, copy the extent to the device, and dequantise it there.

        Args:
            extent: Name of the extent.
            only: The read, its pinned slot, the slot's tensor, and the device's memory, as the only element of a list. It
                is removed from the list, because the thread pool keeps the arguments of a call that has ended.
            computed: Completion of the earlier work that uses the device's memory.
        """
        reading, staged, host, memory = only.pop()
        try:
            error = reading.exception()
            if error is not None:
                raise error
            try:
                with torch.inference_mode(), torch.cuda.stream(self._stream):
                    self._stream.wait_event(computed.event)
                    memory[self._starts[extent] :].copy_(host, non_blocking=True)
                    self._dequantize(extent, memory)
            finally:
                self._stream.synchronize()  # after an error as well: the copy may still read the pinned memory
        finally:
            del reading, host, memory
            staged.release()
