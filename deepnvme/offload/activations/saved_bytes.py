"""Saved storages as blocks: the bytes that autograd has saved, their memory, and how they are read and written."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepnvme._interrupts import defer_interrupts
from deepnvme.cache.block import Block, Memory
from deepnvme.cache.block_memory import OwnMemory
from deepnvme.memory.alignment import padded
from deepnvme.memory.host import huge_pages, prefault
from deepnvme.memory.lease import Transfer
from deepnvme.memory.pool import OutOfBuffers
from deepnvme.memory.tensor_bytes import flat_bytes
from deepnvme.offload.pinned_arena import PinnedArena
from deepnvme.store.tensor_store import TensorStore

_MOST_PINNED = 2 << 30
"""Most bytes of pinned memory to read into: enough for several tensors of any size, and pinned in less than a second."""


class SavedBytes(Block):
    """A block with the bytes of one storage, as they were when autograd saved a tensor over them.

    Args:
        number: Number of storages saved before. It identifies the block, also in the store.
        storage: The storage.
        span: First byte to save, and end of the bytes to save.
        tensor: The tensor whose version counter shows changes in place.
    """

    __slots__ = (
        "_computed", "_probe", "begin", "device", "key", "number", "read_back_version", "source", "storage_reference", "tensors",
        "unpack_count", "version",
    )  # fmt: skip

    def __init__(self, number: int, storage: torch.UntypedStorage, span: tuple[int, int], tensor: torch.Tensor) -> None:
        super().__init__(str(number), span[1] - span[0])
        source = flat_bytes(storage)[span[0] : span[1]]
        # A part would keep all of its storage in memory.
        self.source: torch.Tensor | None = source if source.nbytes == storage.nbytes() else source.clone()
        """The bytes as a uint8 tensor, until :meth:`SavedMemory.take` makes them the block's memory; None from then on."""
        self.begin = span[0]
        """Offset of the bytes in the storage that ``storage_reference`` refers to."""
        self.storage_reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        """Weak reference to the storage that was saved, or to the one that the bytes were last read into."""
        self.key = (storage._cdata, *span)
        self.number = number
        self.device = storage.device
        """The device of the saved storage, to which the bytes return."""
        self.tensors: set[object] = set()
        """Weak references to the saved tensors over the block's bytes that autograd still keeps."""
        self.unpack_count = 0
        """Number of tensors over the block's bytes that autograd has unpacked since the bytes were read."""
        self.version = tensor._version
        self.read_back_version: int | None = None
        """Version of new tensors over the storage that the bytes were read into; None before the first read."""
        self._probe = tensor.detach()  # shares the version counter, but not the memory
        self._probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._computed = torch.cuda.current_stream(storage.device).record_event() if storage.is_cuda else None

    def wait_until_computed(self) -> None:
        """Make the current CUDA stream wait for the kernels that compute the bytes, which may run on another stream."""
        if self._computed is not None:
            torch.cuda.current_stream(self.device).wait_event(self._computed)

    @property
    def uses(self) -> int:
        """Number of saved tensors over the block's bytes that autograd still keeps."""
        return len(self.tensors)

    @property
    def current_version(self) -> int:
        """Current version of the saved tensor. It differs from ``version`` if the tensor was changed in place."""
        return self._probe._version

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage that has the block's bytes, or None if the storage was freed.

        No other storage gets its address while the weak reference exists.
        """
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.storage_reference.cdata)
        return found

    def has_bytes_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor over the same storage still has the saved bytes, unchanged."""
        if self.read_back_version is not None:
            return tensor._version == self.read_back_version
        return tensor._version == self.version == self.current_version

    def refer_to(self, storage: torch.UntypedStorage, begin: int, version: int) -> None:
        """Record the storage that the bytes were read into, their offset in it, and the version of tensors over it."""
        self.storage_reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.begin, self.read_back_version = begin, version
        self.unpack_count = 0
        self.key = (storage._cdata, 0, storage.nbytes())


class SavedMemory:
    """Provides memory for saved bytes: the memory that they have already or, to read them back, pinned memory.

    Faulting in new memory takes a third as long as reading into it. So half of the budget, up to 2 GiB, is an arena that is
    pinned once for reads; blocks saved by a forward have the rest.

    Args:
        budget: Bytes for the arena and the saved blocks together.
    """

    separate_residents = False

    def __init__(self, budget: int) -> None:
        self._arena = PinnedArena(min(budget // 2, _MOST_PINNED))
        self.read_ahead_bytes = self._arena.nbytes // 2
        """Most bytes to read ahead. The rest of the arena is for tensors that autograd computes with."""
        self.forward_limit = budget - self._arena.nbytes
        """Most bytes of blocks in memory during a forward."""
        self.limit = self.forward_limit
        """Most bytes of blocks in memory at present, in a forward or a backward."""
        self._budget = budget
        self._other_bytes = 0  # of blocks that are not in the arena

    def begin_saving(self) -> None:
        """Set the limit that applies during a forward."""
        self.limit = self.forward_limit

    def begin_unpacking(self) -> None:
        """Set the limit that applies during a backward."""
        self.limit = self._budget

    @property
    def allocated(self) -> int:
        """Bytes of blocks outside of the arena, and the whole arena if it is pinned."""
        return self._other_bytes + self._arena.allocated

    def take(self, block: Block) -> Memory | None:
        """Return a block's saved bytes if it still has them, else memory to read into; None if the budget is used up.

        Raises MemoryError if the system has no memory.
        """
        assert isinstance(block, SavedBytes)
        source, block.source = block.source, None
        if source is not None:
            return _CountedMemory(source, self._count)
        if block.device.type == "cpu":
            lent = self._lend(block.nbytes)
            if lent is not None:
                return OwnMemory(lent)
        if block.nbytes > self._arena.nbytes:
            self._arena.trim()
        if self.allocated + block.nbytes > self._budget:
            return None
        return self._make(block)

    def _lend(self, nbytes: int) -> torch.Tensor | None:
        """Return a part of the arena; None if the arena is full, cannot be pinned, or does not fit into the budget."""
        if not self._arena.allocated and self._other_bytes + self._arena.nbytes > self._budget:
            return None
        with contextlib.suppress(OutOfBuffers):  # the system has not so much memory to pin
            return self._arena.lend(nbytes)
        return None

    def _make(self, block: SavedBytes) -> Memory:
        """Return new memory to read a block into, on the device where the bytes are used. Raises MemoryError."""
        try:
            if block.device.type != "cpu":
                return _CountedMemory(torch.empty(block.nbytes, dtype=torch.uint8, device=block.device), self._count)
            memory = huge_pages(padded(block.nbytes))  # whose storage begins with the bytes, as the one that was saved does
            prefault(memory.data_ptr(), memory.nbytes)
            return _CountedMemory(memory[: block.nbytes], self._count)
        except (OSError, RuntimeError) as error:  # mmap's and torch's
            raise MemoryError(f"no memory for {block.nbytes} bytes that autograd has saved: {error}") from error

    def grow(self, block: Block, held: Sequence[Memory]) -> Memory:
        """Return memory for a block like :meth:`take`, beyond the limit if need be. An unused arena is unpinned first."""
        assert isinstance(block, SavedBytes)
        with defer_interrupts():  # it would leave bytes counted
            self._arena.trim()
            return self.take(block) or self._make(block)

    def trim(self) -> None:
        """Unpin the arena if no tensor is in it."""
        self._arena.trim()

    def _count(self, nbytes: int) -> None:
        self._other_bytes += nbytes


class _CountedMemory(OwnMemory):
    """Memory of one block, counted in :attr:`SavedMemory.allocated` until it is released."""

    def __init__(self, buffer: torch.Tensor, count: Callable[[int], None]) -> None:
        super().__init__(buffer)
        self._count = count
        count(self.nbytes)

    def release(self) -> None:
        """Stop counting the memory. It is freed when the last tensor over it is dropped."""
        self._count(-self.nbytes)


class SavedBytesBacking:
    """Reads saved bytes from a store and writes them to it, for a block cache."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store

    def read(self, block: Block, buffer: torch.Tensor) -> Transfer:
        """Start reading the block's bytes from the store into the buffer."""
        return self._store.get(block.name, out=buffer)

    def write(self, block: Block, buffer: torch.Tensor) -> Transfer:
        """Start writing the buffer to the store. Raises OSError."""
        assert isinstance(block, SavedBytes)
        if buffer.untyped_storage().nbytes() < buffer.nbytes:  # as FSDP does with what it gathers again for the backward
            raise OSError(errno.EFAULT, "the storage of a saved tensor was resized")
        block.wait_until_computed()
        return self._store.put(block.name, buffer)
