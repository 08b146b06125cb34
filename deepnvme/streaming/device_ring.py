"""Extents on a CUDA device: from the drive into pinned memory, and from there on a stream of their own, beside what computes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from .arriving import Arrivals
from .device_event import Computed
from .slots import PinnedSlots

if TYPE_CHECKING:
    from deepnvme.swap.futures import StoreFuture
    from deepnvme.swap.lease import Ending

    from .fetching import Reading
    from .slots import Slot
    from .weight_store import WeightStore


class DeviceSlots:
    """Slots of a device's memory, which torch's allocator hands out and takes back. What somebody keeps a view of is not handed
    out again, but does not count as a slot either.

    ``nbytes``: of each. ``count``: how many there are, unless a lease allows more.
    """

    def __init__(self, device: torch.device, nbytes: int, count: int) -> None:
        self.count = count
        self._device, self._nbytes = device, nbytes
        self._lent: list[DeviceSlot] = []

    def lease(self, limit: int) -> DeviceSlot | None:
        """A slot, or None if ``limit`` are lent, or were and are still computed with. Never waits."""
        self._lent = [slot for slot in self._lent if not slot.has_ended()]
        if len(self._lent) >= limit:
            return None
        self._lent.append(DeviceSlot(self.memory(self._nbytes)))
        return self._lent[-1]

    def memory(self, nbytes: int) -> torch.Tensor:
        """Memory beside the slots, for as long as it is wanted."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


class DeviceSlot:
    """Memory on loan. It belongs to the stream that was current when it was lent."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer: torch.Tensor | None = buffer
        self._after: Ending | None = None
        self._computed: Computed | None = None

    @property
    def buffer(self) -> torch.Tensor:
        """Bytes. ValueError after release."""
        if self._buffer is None:
            raise ValueError("the slot was released: use its buffer before")
        return self._buffer

    def release(self, after: Ending | None = None) -> None:
        """Give it back when ``after`` has ended, and what the current stream has been given so far. Never blocks."""
        self._after = after
        self._computed = Computed(self.buffer.device)

    def has_ended(self) -> bool:
        """Whether it was released, and nothing is done with it any more."""
        if self._computed is None or (self._after is not None and not self._after.done()) or not self._computed.done():
            return False
        self._buffer = self._after = None
        return True


class DeviceArrivals(Arrivals):
    """The extents of a store, read into a device's memory."""

    def __init__(self, store: WeightStore, device: torch.device) -> None:
        super().__init__(store)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staging = PinnedSlots(max((extent.nbytes for extent in store.extents.values()), default=0), 1)
        self._limit = 1
        self._copying = ThreadPoolExecutor(1, "deepnvme-device")

    def read(self, extent: str, memory: torch.Tensor) -> Reading:
        """Start reading an extent into ``nbytes`` bytes of the device; return at once."""
        while (staged := self._staging.lease(self._limit)) is None:
            self._limit += 1  # as many as are under way at a time, to the device's slots and to what stays there
        computed = Computed(memory.device)  # what the memory was used for before it was handed out for this
        host = staged.buffer[: self._store.extents[extent].nbytes]
        reading = self._store.read(extent, host)
        return self._copying.submit(self._copy, extent, [(reading, staged, host, memory)], computed)

    def close(self) -> None:
        super().close()
        self._copying.shutdown()

    def _copy(
        self,
        extent: str,
        only: list[tuple[StoreFuture[torch.Tensor], Slot, torch.Tensor, torch.Tensor]],
        computed: Computed,
    ) -> None:
        reading, staged, host, memory = only.pop()
        try:
            error = reading.exception()
            if error is not None:
                raise error
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                self._stream.wait_event(computed.event)
                memory[self._starts[extent] :].copy_(host, non_blocking=True)
                self._make_ready(extent, memory)
            self._stream.synchronize()
        finally:
            del reading, host, memory
            staged.release()
