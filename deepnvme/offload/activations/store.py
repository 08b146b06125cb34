"""Store for the bytes that autograd has saved: in memory as far as a budget allows, otherwise on a drive until the backward."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.cache.block import State
from deepnvme.cache.block_cache import BlockCache, Use
from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.profiles import engine_for
from deepnvme.files.directory_lock import DirectoryOwner
from deepnvme.store.own_directory import open_own_store, remove_directories

from .report import ActivationReport, StepCounts
from .saved_bytes import SavedBytes, SavedBytesBacking, SavedMemory
from .saved_tensor import View, check_version, span_of, view_of
from .unpack_order import UnpackOrder

_MOST_READ_AHEAD = 128
"""Most saved storages to read ahead at a time. Listing more takes longer than reading a small one."""
_MOST_SAVES_EXAMINED = 512
"""Most saves to examine in a search for storages to read ahead: some were dropped, or are in memory."""
_AHEAD_BYTES = 128 << 20
"""Bytes to write before their memory is needed, at most half of the limit: enough to keep a drive busy meanwhile."""
_PREFIX = "deepnvme-activations"


class SavedTensor:
    """A tensor that autograd has saved. Its bytes are kept until autograd drops it, see :class:`_SavedTensorReference`.

    Args:
        store: The store that keeps the bytes.
        saved: The bytes.
        view: The view that makes the tensor of the bytes.
    """

    __slots__ = ("__weakref__", "_saved", "_store", "_view")

    def __init__(self, store: ActivationStore, saved: SavedBytes, view: View) -> None:
        self._store, self._saved, self._view = store, saved, view

    def unpack(self) -> torch.Tensor:
        """Return the tensor. Raises like :meth:`ActivationStore.unpack`."""
        return self._store.unpack(self._saved, self._view)


class _SavedTensorReference(weakref.ref[SavedTensor]):
    """A weak reference to a saved tensor, whose bytes are kept until autograd drops the tensor.

    The reference's callback records that the tensor was dropped, and must run no Python code: a Ctrl-C that comes while torch
    computes is raised by the Python code that runs next, and a finalizer would swallow it.
    """

    __slots__ = ("saved",)

    saved: SavedBytes


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _locked(
    method: Callable[Concatenate[ActivationStore, Parameters], Result],
) -> Callable[Concatenate[ActivationStore, Parameters], Result]:
    """Decorate a method of the store so that it holds the lock, and frees dropped tensors first.

    The method raises RuntimeError in a forked child, where a thread of the parent may hold the lock forever.

    A generator-based context manager would not do: Ctrl-C could leave the generator suspended, and its traceback would keep the
    lock.
    """

    def locked(self: ActivationStore, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """Call the method; its own docstring takes the place of this one."""
        if os.getpid() != self._process:
            raise RuntimeError("activations on disk are the parent process's: a forked child cannot save or use them")
        with self._lock:
            self._free()
            return method(self, *args, **kwargs)

    functools.update_wrapper(locked, method)
    return locked


class ActivationStore:
    """Keeps the bytes of saved tensors, in memory and on drives. Thread-safe.

    When memory is needed soon, the oldest bytes are written; the newest, which a backward wants first, stay in memory. When a
    backward unpacks a tensor, bytes that it will want next are read ahead, as far as there is room.

    When autograd drops a tensor, possibly in the middle of any method, this is only recorded. The next call that takes the lock
    frees the tensor's bytes. A step begins when a tensor is saved and no other tensor is saved at that time, or when a thread
    enters a context after a backward.

    Args:
        paths: Directories, on one or several drives.
        memory_budget: Most bytes in memory, except for what autograd itself keeps.
        aio_config: Settings of the engine; None for the profile of the drive.

    Raises:
        OSError: From creating and opening files.
    """

    def __init__(self, paths: Sequence[Path], memory_budget: int, aio_config: AioConfig | None) -> None:
        self.closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int, int], SavedBytes] = {}  # storage, first byte and end -> the newest bytes saved of it
        self._user_held: dict[int, Any] = {}  # by address, weak references to storages that outlive what autograd saved of them
        self._partly_unpacked: list[SavedBytes] = []  # read for the first of their tensors, the others of which are still wanted
        self._live: dict[int, SavedBytes] = {}  # number -> what was not dropped yet, in the order of saving
        self._order = UnpackOrder()
        self._unwritten: dict[SavedBytes, None] = {}  # in memory only, and not chosen to be written, the oldest first
        self._unwritten_bytes = 0
        self._dropped: deque[_SavedTensorReference] = deque()
        self._ending: deque[SavedBytes] = deque()  # dropped, and perhaps in transfer
        self._saves = 0
        self._step = StepCounts()
        self._engine = engine_for(list(paths), aio_config)
        try:
            self._store, self._directories = open_own_store(paths, _PREFIX, self._engine, DirectoryOwner("save_on_disk"))
        except BaseException:
            self._engine.close()
            raise
        self._memory = SavedMemory(memory_budget)
        self._cache = BlockCache(SavedBytesBacking(self._store), self._memory)

    # Steps

    @_locked
    def enter(self) -> None:
        """Begin a step if the last one has come to its backward, also if something that it has saved is left."""
        if self._order.begun and torch._C._current_graph_task_id() < 0:
            self._begin_step()

    def _begin_step(self) -> None:
        """Begin a step. Forget the errors of writes whose bytes are not needed any more."""
        if not self._live:
            self._cache.clear()
        self._user_held = {key: each for key, each in self._user_held.items() if not each.expired()}
        self._order.begin_step(self._saves)
        self._step = StepCounts(self._cache.bytes_written, self._cache.bytes_read)

    def report(self) -> ActivationReport:
        """Return the report of the newest step so far. Takes no lock, so that signal handlers can call it."""
        return self._step.report(self._cache.bytes_written, self._cache.bytes_read)

    # Saving

    @_locked
    def pack(self, tensor: torch.Tensor, min_bytes: int) -> SavedTensor | None:
        """Save a tensor's bytes, which may be written to the drive. May block until older bytes are written.

        Args:
            tensor: A plain tensor, see :func:`is_plain`.
            min_bytes: Tensors that span fewer bytes are not saved.

        Returns:
            What autograd keeps in place of the tensor; None if the tensor has to stay in memory, since it has fewer than
            ``min_bytes`` bytes, or its user keeps it in memory anyway.

        Raises:
            RuntimeError: In a forked child, or after :meth:`close`.
            OSError: From writing.
        """
        storage = tensor.untyped_storage()
        span = span_of(tensor, storage)
        if span[1] - span[0] < max(min_bytes, 1):
            return None
        if self.closed:
            raise RuntimeError("activations cannot be saved: their directory was closed")
        saved = self._known.get((storage._cdata, *span))
        new = saved is None or not saved.has_bytes_of(tensor)
        if new and storage._cdata in self._user_held:  # nothing else has the address while the weak reference is there
            return None
        if not self._live:
            self._begin_step()
        with defer_interrupts():
            if new:
                saved = SavedBytes(self._saves, storage, span, tensor)
                self._saves += 1
            assert saved is not None
            packed = SavedTensor(self, saved, view_of(tensor, saved.begin))
            reference = _SavedTensorReference(packed, self._dropped.append)  # until `packed` is dropped, also by an error below
            reference.saved = saved
            saved.tensors.add(reference)
            self._live[saved.number] = saved
        if new:
            self._take_over(saved)
        return packed

    def _take_over(self, saved: SavedBytes) -> None:
        """Add saved bytes to the cache as a block in memory, once there is room. May block."""
        self._memory.begin_saving()
        with self._step.waiting_forward:
            room = self._memory.limit - min(self._memory.limit // 2, _AHEAD_BYTES) - saved.nbytes
            while self._unwritten and self._unwritten_bytes > room:
                oldest = next(iter(self._unwritten))
                self._cache.write(oldest)
                self._forget_unwritten(oldest)
            try:
                self._cache.create(saved)
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror}: activations cannot be written", error.filename) from error
        with defer_interrupts():
            self._cache.release([saved], changed=True, write=False)
            self._known[saved.key] = saved
            self._unwritten[saved] = None
            self._unwritten_bytes += saved.nbytes
        self._step.saved(saved.nbytes, self._memory.allocated)

    # Unpacking

    @_locked
    @torch.no_grad()
    def unpack(self, saved: SavedBytes, view: View) -> torch.Tensor:
        """Return a tensor as it was saved. Blocks until its bytes are in memory.

        Raises:
            RuntimeError: If the tensor was changed in place since; in a forked child; or after :meth:`close`.
            OSError: From reading, or from a write that had to make room.
        """
        check_version(saved.current_version, saved.version, lambda: str(view))
        if self.closed:
            raise RuntimeError(f"the {view} that autograd has saved is gone: its directory was closed")
        in_memory = saved.storage()
        self._memory.begin_unpacking()
        try:
            storage = self._read(saved, view) if in_memory is None else in_memory
            saved.unpack_count += 1
            self._order.note(saved.number)
            self._cache.expect(self._upcoming(saved))
        finally:
            if in_memory is None:
                self._cache.release([saved], write=False)
        tensor = view.on(storage, saved.begin)
        if saved.read_back_version is not None and tensor.is_cuda:  # another stream than this one's may have allocated it
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        self._step.unpacked(self._memory.allocated)
        return tensor

    def _read(self, saved: SavedBytes, view: View) -> torch.UntypedStorage:
        """Read a saved tensor's bytes from the drive, hold them in memory, and return their storage. Blocks for the drive."""
        with self._step.waiting_backward:
            try:
                self._cache.acquire([saved])
            except OSError as error:
                text = f"{error.strerror}: the {view} that autograd has saved cannot be brought back from the drive"
                raise OSError(error.errno, text, error.filename) from error
        with defer_interrupts():
            buffer = saved.memory.buffer
            storage = buffer.untyped_storage()
            self._unlink_storage(saved)
            saved.refer_to(storage, int(buffer.storage_offset()), view.on(storage, 0)._version)
            self._known[saved.key] = saved
            if saved.uses > 1:
                self._partly_unpacked.append(saved)
        return storage

    def _upcoming(self, saved: SavedBytes) -> list[Use]:
        """Return the blocks that the backward wants next: first partly unpacked ones, then those to read from the drive."""
        self._partly_unpacked = [each for each in self._partly_unpacked if each.unpack_count < each.uses and each.in_memory]
        uses = [Use(each) for each in self._partly_unpacked]
        room = max(self._memory.read_ahead_bytes, saved.nbytes)
        for number in itertools.islice(self._order.after(saved.number), _MOST_SAVES_EXAMINED):
            following = self._live.get(number)
            if following is None or not (following.stored or following.state is State.WRITING):
                continue
            if following.in_memory or following.storage_reference.expired():
                room -= following.nbytes
                if room < 0 or len(uses) == _MOST_READ_AHEAD:
                    break
                uses.append(Use(following))
        return uses

    # Freeing

    def _free(self) -> None:
        """Free the bytes of tensors that autograd has dropped. Never waits for a transfer. Call with the lock held."""
        if self._dropped or self._ending:
            with defer_interrupts():
                self._free_dropped()  # whose variables go meanwhile too: finalizers of torch's would swallow a Ctrl-C

    def _free_dropped(self) -> None:
        while self._dropped:
            reference = self._dropped.popleft()
            saved = reference.saved
            saved.tensors.discard(reference)
            saved.unpack_count = max(saved.unpack_count - 1, 0)
            if saved.uses == 0:
                self._forget_unwritten(saved)
                self._unlink_storage(saved)
                self._live.pop(saved.number, None)
                self._ending.append(saved)
        self._cache.poll()
        for _ in range(len(self._ending)):
            if self._ending[0].state in (State.READING, State.WRITING):
                self._ending.rotate(-1)
            else:
                self._free_bytes(self._ending[0])
                self._ending.popleft()

    def _forget_unwritten(self, saved: SavedBytes) -> None:
        if saved in self._unwritten:
            del self._unwritten[saved]
            self._unwritten_bytes -= saved.nbytes

    def _unlink_storage(self, saved: SavedBytes) -> None:
        """Forget which storage the bytes belong to. When autograd next saves that storage, its bytes are saved anew."""
        if self._known.get(saved.key) is saved:
            del self._known[saved.key]

    def _free_bytes(self, saved: SavedBytes) -> None:
        """Free saved bytes in memory and on the drive. They must not be in transfer."""
        self._cache.discard(saved)
        saved.source = None
        if saved.read_back_version is None and not saved.storage_reference.expired():
            self._user_held[saved.storage_reference.cdata] = saved.storage_reference
        if not self.closed and saved.name in self._store:
            self._store.delete(saved.name)

    # The end

    def close(self) -> None:
        """Wait for transfers, free all memory, and remove the files. Idempotent."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self.closed:
                self._cache.clear()
                self.closed = True
        with contextlib.suppress(OSError):  # of writes, whose bytes nobody wants any more
            self._store.close()
        self._engine.close()
        self._memory.trim()
        remove_directories(self._directories)
