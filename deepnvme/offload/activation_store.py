"""The bytes that autograd has saved: in memory as far as a budget allows, otherwise on a drive, and back before the backward."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import threading
import warnings
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.memory.alignment import padded
from deepnvme.memory.host import empty_aligned
from deepnvme.memory.lease import Transfer
from deepnvme.memory.tensor_bytes import flat_bytes
from deepnvme.profiles import engine_for
from deepnvme.store.futures import StoreFuture
from deepnvme.store.own_directory import open_own_store, remove_directories
from deepnvme.store.tensor_store import TensorStore
from deepnvme.transfer.block import Block, Memory, State
from deepnvme.transfer.block_cache import BlockCache, Use
from deepnvme.transfer.block_memory import OwnMemory

from .activation_report import ActivationReport, StepCounts
from .saved_tensor import StorageReference, View, check_version, span_of, version_of, view_of

if TYPE_CHECKING:
    from deepnvme.config import AioConfig

_WRITE_AHEAD = 128 << 20
"""Bytes that are written before their memory is needed, at most half of the budget: enough to keep a drive busy meanwhile."""
_MOST_READ_AHEAD = 128
"""Saved storages that are read ahead at a time: to list more takes longer than to read a small one."""
_PREFIX = "deepnvme-activations"

class SavedBytes(Block):
    """Bytes of a storage, as they were when autograd saved a tensor over them.

    Args:
        name: Name in the store.
        storage: The storage.
        span: First byte and end.
        tensor: The tensor, whose version counter tells of changes.
        order: Number of storages saved before.
    """

    __slots__ = (
        "_probe", "begin", "handed_version", "key", "order", "reference", "returned", "source", "undecided", "uses", "version",
    )  # fmt: skip

    def __init__(
        self, name: str, storage: torch.UntypedStorage, span: tuple[int, int], tensor: torch.Tensor, order: int
    ) -> None:
        super().__init__(name, span[1] - span[0])
        self.source: torch.Tensor | None = flat_bytes(storage)[span[0] : span[1]]
        """The bytes, until the block has them as its memory."""
        self.begin = span[0]
        """Where they begin in the storage that ``reference`` refers to."""
        self.reference = StorageReference(storage)
        """The storage that was saved, or the one that the bytes were read into last."""
        self.key = (storage._cdata, *span)
        self.order = order
        self.uses = 0
        """Number of saved tensors over these bytes that autograd has."""
        self.returned = 0
        """Number of these that were returned since the bytes were read."""
        self.undecided = False
        """Whether they are in memory only, and it is not settled if they are to be written."""
        self.version = tensor._version
        self.handed_version: int | None = None
        """Version of tensors over the storage that the bytes were read into; None before they were."""
        self._probe = version_of(tensor)

    @property
    def device(self) -> torch.device:
        """Where the bytes are used."""
        return self._probe.device

    @property
    def current_version(self) -> int:
        """The version that the tensor has now. Another than ``version`` means that it was changed in place."""
        return self._probe._version

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage with the bytes if anything keeps it in memory."""
        return self.reference.storage()

    def has_bytes_of(self, tensor: torch.Tensor) -> bool:
        """Return whether the bytes are still those of a tensor over the same storage."""
        if self.handed_version is not None:
            return tensor._version == self.handed_version
        return tensor._version == self.version == self.current_version

    def refer_to(self, storage: torch.UntypedStorage, begin: int, version: int) -> None:
        """Note where the bytes were read to, and the version of tensors over that."""
        self.reference, self.begin, self.handed_version = StorageReference(storage), begin, version
        self.returned = 0
        self.key = (storage._cdata, 0, storage.nbytes())


class SavedTensor:
    """A tensor that autograd has saved. Its bytes are kept until it is dropped.

    Args:
        store: Has the bytes.
        saved: The bytes.
        view: How the tensor looks at them.
    """

    __slots__ = ("_saved", "_store", "_view")

    def __init__(self, store: ActivationStore, saved: SavedBytes, view: View) -> None:
        self._store, self._saved, self._view = store, saved, view

    def unpack(self) -> torch.Tensor:
        """Return the tensor. Raises like :meth:`ActivationStore.unpack`."""
        return self._store.unpack(self._saved, self._view)

    def __del__(self) -> None:
        self._store.dropped(self._saved)


class _WriteFailed(OSError):
    """An error of writing. Errors of reading are other OSErrors."""


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _locked(
    method: Callable[Concatenate[ActivationStore, Parameters], Result],
) -> Callable[Concatenate[ActivationStore, Parameters], Result]:
    """Call a method of the store with its lock held, and forget what was dropped before and meanwhile.

    It raises RuntimeError in a forked child, where the lock may be held by a thread that is not there.

    Not a generator: if Ctrl-C left one suspended, its traceback would keep the lock, which :meth:`ActivationStore.leave` takes
    while the KeyboardInterrupt is on its way.
    """

    @functools.wraps(method)
    def locked(self: ActivationStore, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if os.getpid() != self._process:
            raise RuntimeError("activations on disk are the parent process's: a forked child cannot save or use them")
        try:
            with self._lock:
                self._forget()
                return method(self, *args, **kwargs)
        finally:
            self._forget_dropped()

    return locked


class ActivationStore:
    """Keeps the bytes of saved tensors, in memory and on drives. Thread-safe.

    The oldest are written, as far as the memory is needed; the newest, which a backward wants first, stay. When a backward wants
    some, those saved before them are read as far as there is room.

    Finalizers of saved tensors may run anywhere, in the middle of any method. So they only note what was dropped, and whoever
    has the lock, or can take it at once, forgets it.

    Args:
        paths: Directories, on one or several drives.
        memory_budget: Bytes in memory, except for what autograd itself keeps.
        config: Settings of the engine; None for the profile of the drive.

    Raises:
        OSError: From creating and opening files.
    """

    def __init__(self, paths: Sequence[Path], memory_budget: int, config: AioConfig | None) -> None:
        self.closed = False
        self._process = os.getpid()
        self._budget = memory_budget
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int, int], SavedBytes] = {}  # storage, first byte and end -> the newest bytes saved of it
        self._lasting = _LastingStorages()
        self._partly_returned: list[SavedBytes] = []  # read for the first of their tensors, the others of which are still wanted
        self._in_order: list[SavedBytes] = []  # as they were saved; some were dropped since
        self._live = 0  # of these, those that were not dropped
        self._undecided: deque[SavedBytes] = deque()  # oldest first; some were dropped since
        self._undecided_bytes = 0
        self._dropped: deque[SavedBytes] = deque()
        self._ending: list[SavedBytes] = []  # dropped, but in transfer
        self._saves = 0
        self._suspended = False
        self._contexts: weakref.WeakSet[object] = weakref.WeakSet()  # that are open: an interrupted one may never be left
        self._step = StepCounts()
        self._returned = True  # something, in this step: the next context begins a new one
        self._engine = engine_for(list(paths), config)
        try:
            self._store, self._directories = open_own_store(paths, _PREFIX, self._engine)
        except BaseException:
            self._engine.close()
            raise
        self._memory = _Memory(memory_budget)
        self._cache = BlockCache(_Backing(self._store), self._memory)

    # Steps

    @_locked
    def enter(self, context: object) -> ActivationReport | None:
        """Note that a context is open, until it is left or dropped. It begins a new step if it is the only one, and the last step has come to its backward.

        Returns:
            The report of the last step, if a new one has begun.
        """
        last = None
        self._contexts.add(context)
        if len(self._contexts) == 1 and (self._returned or self._live == 0):
            last = self._report()
            self._step = StepCounts(self._cache.bytes_written, self._cache.bytes_read)
            self._returned = False
            self._suspended = False
            self._memory.limit = self._budget
        return last

    def leave(self, context: object) -> None:
        """Note that a context was left. Idempotent."""
        if os.getpid() == self._process:
            self._leave(context)

    @_locked
    def _leave(self, context: object) -> None:
        self._contexts.discard(context)
        self._cache.poll()

    @_locked
    def report(self) -> ActivationReport:
        """Return what the newest step has done so far."""
        return self._report()

    def _report(self) -> ActivationReport:
        return self._step.report(self._cache.bytes_written, self._cache.bytes_read)

    # Saving

    def pack(self, tensor: torch.Tensor, min_bytes: int) -> SavedTensor | None:
        """Take over the bytes of a plain tensor. May block until others are written.

        Returns:
            What stands for the tensor; None if it has fewer than ``min_bytes`` bytes, its user keeps it in memory anyway, or the
            drive cannot be written.

        Raises:
            RuntimeError: In a forked child, or after :meth:`close`.
        """
        storage = tensor.untyped_storage()
        span = span_of(tensor, storage)
        return None if span[1] - span[0] < max(min_bytes, 1) else self._pack(tensor, storage, span)

    @_locked
    def _pack(self, tensor: torch.Tensor, storage: torch.UntypedStorage, span: tuple[int, int]) -> SavedTensor | None:
        if self.closed:
            raise RuntimeError("activations cannot be saved: their directory was closed")
        saved = self._known.get((storage._cdata, *span))
        new = saved is None or not saved.has_bytes_of(tensor)
        if new:
            if self._suspended or storage in self._lasting:
                return None
            saved = SavedBytes(str(self._saves), storage, span, tensor, self._saves)
            self._saves += 1
        assert saved is not None
        with defer_interrupts():
            packed = SavedTensor(self, saved, view_of(tensor, saved.begin))
            saved.uses += 1  # until `packed` is dropped, also by an error below
            self._live += new
        try:
            if new:
                self._take_over(saved)
        except _WriteFailed as error:
            self._suspend(error)
            return None
        return packed

    def _take_over(self, saved: SavedBytes) -> None:
        """Hold the bytes in memory, once there is room for them."""
        with self._step.waiting_forward:
            self._write_excess(saved.nbytes)
            self._cache.create(saved)
        with defer_interrupts():
            self._cache.release([saved], changed=True, write=False)
            self._known[saved.key] = saved
            self._in_order.append(saved)
            self._undecided.append(saved)
            self._undecided_bytes += saved.nbytes
            saved.undecided = True
        self._step.saved(saved.nbytes, self._cache.used)

    def _write_excess(self, nbytes: int) -> None:
        """Start to write the oldest if there is no room for ``nbytes`` more, and some ahead of that."""
        keep = self._budget - min(self._budget // 2, _WRITE_AHEAD)
        while self._undecided and self._undecided_bytes + nbytes > keep:
            oldest = self._undecided[0]
            if oldest.undecided:
                self._cache.write(oldest)
                self._decide(oldest)
            self._undecided.popleft()

    def _decide(self, saved: SavedBytes) -> None:
        """Note that it is settled whether these bytes are written."""
        if saved.undecided:
            saved.undecided = False
            self._undecided_bytes -= saved.nbytes

    def _suspend(self, error: OSError) -> None:
        """Save no more until the next step, and have all that is in memory stay there, since writing has failed."""
        if not self._suspended:
            self._suspended = True
            self._memory.limit = sys.maxsize
            text = f"activations stay in memory for the rest of this step, since they cannot be written: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    # Returning

    @_locked
    @torch.no_grad()
    def unpack(self, saved: SavedBytes, view: View) -> torch.Tensor:
        """Return a tensor as it was saved. Blocks until its bytes are in memory.

        Raises:
            RuntimeError: If it was changed in place since; in a forked child; or if it is on the drive and the store is closed.
            OSError: From reading.
        """
        check_version(view, saved.current_version, saved.version)
        in_memory = saved.storage()
        try:
            storage = self._read(saved, view) if in_memory is None else in_memory
            saved.returned += 1
            if not self.closed:
                self._cache.expect(self._upcoming(saved))
        finally:
            if in_memory is None:
                self._cache.release([saved])
        tensor = view.on(storage, saved.begin)
        if saved.handed_version is not None and tensor.is_cuda:  # another stream than this one's may have allocated it
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        self._returned = True
        self._step.returned(self._cache.used)
        return tensor

    def _read(self, saved: SavedBytes, view: View) -> torch.UntypedStorage:
        """Begin a use of bytes that are on the drive, and return a storage with them."""
        if self.closed:
            raise RuntimeError(f"the {view} that autograd has saved is gone: its directory was closed")
        with self._step.waiting_backward:
            try:
                self._acquire(saved)
            except OSError as error:
                text = f"{error.strerror}: the {view} that autograd has saved cannot be read back"
                raise OSError(error.errno, text, error.filename) from error
        with defer_interrupts():
            buffer = saved.memory.buffer
            storage = buffer.untyped_storage()
            self._forget_storage(saved)
            saved.refer_to(storage, int(buffer.storage_offset()), view.on(storage, 0)._version)
            self._known[saved.key] = saved
            if saved.uses > 1:
                self._partly_returned.append(saved)
        return storage

    def _acquire(self, saved: SavedBytes) -> None:
        """Have the bytes in memory. What could not be written stays there."""
        while True:
            try:
                return self._cache.acquire([saved])
            except _WriteFailed as error:
                self._suspend(error)

    def _upcoming(self, saved: SavedBytes) -> list[Use]:
        """Return what is wanted next: bytes of which other tensors were returned, then what was saved before, newest first."""
        self._partly_returned = [each for each in self._partly_returned if each.returned < each.uses and each.in_memory]
        uses = [Use(each) for each in self._partly_returned]
        room = self._memory.limit - sum(each.nbytes for each in self._partly_returned)
        for place in range(bisect_left(self._in_order, saved.order, key=lambda each: each.order) - 1, -1, -1):
            before = self._in_order[place]
            on_drive = before.stored or before.state is State.WRITING
            if before.uses and on_drive and (before.in_memory or before.reference.expired()):
                room -= before.nbytes
                if room < 0 or len(uses) == _MOST_READ_AHEAD:
                    break
                uses.append(Use(before))
        return uses

    # Forgetting

    def dropped(self, saved: SavedBytes) -> None:
        """Note that a tensor over these bytes was dropped. Called by finalizers, in any thread at any point."""
        if os.getpid() == self._process:
            self._dropped.append(saved)
            self._forget_dropped()

    def _forget_dropped(self) -> None:
        """Forget what was dropped, unless another call is under way, which then does it."""
        while self._dropped:
            with defer_interrupts():
                if not self._lock.acquire(blocking=False):
                    return
                try:
                    self._forget()
                finally:
                    self._lock.release()

    def _forget(self) -> None:
        """Forget what nobody has any more. Never waits for a transfer. Call with the lock held."""
        if not self._dropped and not self._ending:
            return
        with defer_interrupts():
            while self._dropped:
                saved = self._dropped.popleft()
                saved.uses -= 1
                saved.returned = max(saved.returned - 1, 0)
                if saved.uses == 0:
                    self._decide(saved)
                    self._forget_storage(saved)
                    self._live -= 1
                    self._ending.append(saved)
            while self._undecided and not self._undecided[-1].undecided:
                self._undecided.pop()
            if len(self._in_order) > 2 * self._live:
                self._in_order = [each for each in self._in_order if each.uses]
                self._undecided = deque(each for each in self._undecided if each.undecided)
            self._cache.poll()
            ended = [saved for saved in self._ending if saved.state not in (State.READING, State.WRITING)]
            self._ending = [saved for saved in self._ending if saved.state in (State.READING, State.WRITING)]
            for saved in ended:
                self._discard(saved)

    def _forget_storage(self, saved: SavedBytes) -> None:
        """Do not take these bytes for those of their storage any more."""
        if self._known.get(saved.key) is saved:
            del self._known[saved.key]

    def _discard(self, saved: SavedBytes) -> None:
        """Forget bytes that are not in transfer, in memory and on the drive."""
        self._cache.discard(saved)
        saved.source = None
        if saved.handed_version is None and not saved.reference.expired():
            self._lasting.add(saved.reference)
        if not self.closed and saved.name in self._store:
            self._store.delete(saved.name)

    # The end

    def close(self) -> None:
        """Wait for transfers, and remove the files. What is in memory can still be unpacked. Idempotent."""
        if os.getpid() != self._process:
            return
        self._end_transfers()
        with contextlib.suppress(OSError):  # of writes, whose bytes nobody wants any more
            self._store.close()
        self._engine.close()
        remove_directories(self._directories)

    @_locked
    def _end_transfers(self) -> None:
        if not self.closed:
            self._cache.drain()
            self.closed = True


class _LastingStorages:
    """Storages that have outlived the tensors that autograd saved over them, as those of weights do: to write them is in vain."""

    def __init__(self) -> None:
        self._references: dict[int, StorageReference] = {}
        self._most = 1000

    def add(self, reference: StorageReference) -> None:
        """Add a storage. References to those that have gone are dropped every now and then."""
        self._references[reference.address] = reference
        if len(self._references) > self._most:
            self._references = {key: each for key, each in self._references.items() if not each.expired()}
            self._most = max(1000, 2 * len(self._references))

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        reference = self._references.get(storage._cdata)
        if reference is not None and reference.expired():  # only then can another storage have its address
            del self._references[storage._cdata]
            return False
        return reference is not None


class _Memory:
    """Memory of saved bytes: that which they were saved in, or new memory to read them into.

    Args:
        limit: Bytes of both.
    """

    separate_residents = False

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def take(self, block: Block) -> OwnMemory:
        """Return the bytes that were saved, or memory to read them into. Raises MemoryError if there is none."""
        assert isinstance(block, SavedBytes)
        source, block.source = block.source, None
        if source is not None:
            return OwnMemory(source)
        try:
            if block.device.type == "cpu":
                return OwnMemory(empty_aligned(padded(block.nbytes))[: block.nbytes])
            return OwnMemory(torch.empty(block.nbytes, dtype=torch.uint8, device=block.device))
        except (OSError, RuntimeError) as error:  # mmap's and torch's
            raise MemoryError(f"no memory for {block.nbytes} bytes that autograd has saved: {error}") from error

    def grow(self, block: Block, held: Sequence[Memory]) -> OwnMemory:
        """Like :meth:`take`: a tensor larger than the budget is saved as well."""
        return self.take(block)


class _Backing:
    """Reads and writes saved bytes in a store."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store

    def read(self, block: Block, buffer: torch.Tensor) -> Transfer:
        """Start filling the buffer."""
        return _Reading(self._store.get(block.name, out=buffer))

    def write(self, block: Block, buffer: torch.Tensor) -> Transfer:
        """Start storing the buffer. Raises _WriteFailed."""
        try:
            return _Writing(self._store.put(block.name, buffer))
        except OSError as error:
            raise _WriteFailed(error.errno, error.strerror, error.filename) from None


class _Reading:
    """A read of a store. Its errors are copies, because the traceback of the one that the store keeps would keep memory."""

    def __init__(self, future: StoreFuture[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        """Return whether the transfer has ended."""
        return self._future.done()

    def exception(self, timeout: float | None = None) -> OSError | None:
        """Wait until the transfer has ended, and return a copy of its error, or None."""
        return copy.copy(self._future.exception(timeout))


class _Writing(_Reading):
    """A write to a store."""

    def exception(self, timeout: float | None = None) -> OSError | None:
        """Wait until the transfer has ended, and return its error as a _WriteFailed, or None."""
        error = super().exception(timeout)
        return error and _WriteFailed(error.errno, error.strerror, error.filename)
