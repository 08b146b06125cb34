"""An L2 adapter of LMCache: chunks of KV cache in a :class:`deepnvme.kvstore.BlockStore` on drives.

A task of LMCache is one call of the store, whose threads write to LMCache's event descriptor when the task has ended. Looking up
and locking takes place in memory, at once.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

from deepnvme.kvstore import BlocksFuture, BlockStore
from deepnvme.kvstore.block_files import FILE_NAME, read_layout
from deepnvme.telemetry.descriptions import path_list
from deepnvme.telemetry.sizes import byte_count

from ._serving import aio_config_of, block_key, folders_in, require_version

if TYPE_CHECKING:
    from deepnvme.telemetry.sizes import ByteCount

    from ._serving import AioSettings, Paths

TESTED = ("0.5.6",)
"""Versions of LMCache that the tests ran with."""

try:
    from lmcache.lmcache_native import Bitmap  # type: ignore[import-not-found]
    from lmcache.v1.distributed.internal_api import L2StoreResult  # type: ignore[import-not-found]
    from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface  # type: ignore[import-not-found]

    _found = version("lmcache")
except (ImportError, PackageNotFoundError) as error:
    what = f"needs LMCache {TESTED[-1]} (pip install lmcache=={TESTED[-1]})"
    raise ImportError(f"deepnvme.integrations.lmcache {what}: {error}") from error
require_version("LMCache", _found, TESTED)

__all__ = ["NVMeL2Adapter"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Settings:
    """The fields of ``adapter_params``."""

    path: Paths
    capacity: ByteCount
    block_bytes: ByteCount | None = None
    fingerprint: str = ""
    aio_config: AioSettings = None


class _Task(NamedTuple):
    """A task that stores or loads."""

    keys: Sequence[Any]
    sizes: Sequence[int]
    future: BlocksFuture | None
    """None for a task that could not be started: it has failed."""

    @property
    def ended(self) -> bool:
        """Whether the task has ended, or could not be started. Never blocks."""
        return self.future is None or self.future.done()

    def flags(self) -> list[bool]:
        """Wait for the task, and return for each key whether its chunk was stored or loaded."""
        return [False] * len(self.keys) if self.future is None else self.future.result()


class NVMeL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # whatever LMCache is
    """Chunks of KV cache in a bounded, checked store on one drive or several, for LMCache.

    LMCache makes it for an L2 adapter of type "plugin", whose ``adapter_params`` are ``settings`` here. Thread-safe. No method
    waits for a drive but :meth:`close`, and the first task that stores if it makes the files.

    A chunk that is damaged, or was evicted, is not loaded; a task in which a chunk cannot be stored has failed. Locked chunks are
    not evicted. The store evicts by itself when it is full, and does not report evictions to listeners. So
    ``supports_global_eviction`` is False, and LMCache's usage by cache salt is empty: quotas by salt are not kept.

    Args:
        settings: ``path``: a directory, or a list of directories on different drives. ``capacity``: most bytes of the files, or
            a size such as "200GB", reserved at once. ``block_bytes``, optional: most bytes of a chunk; by default that of the
            files that are there, or those of the largest chunk in the first task that stores, which then makes the files.
            ``fingerprint``, optional: a text that says what the chunks are of, for what their keys do not have. ``aio_config``,
            optional: settings of the engine as an ``aio`` block.
        l1_memory_desc: LMCache's description of its memory. Not used.

    Raises:
        StoreLocked: If another process, which the message names, uses a directory.
        TypeError: If a setting is missing or unknown.
        ValueError: If a setting is wrong, or the files have another fingerprint or capacity.
        OSError: With ENOSPC if a drive has too little space. Names the file.
    """

    def __init__(self, settings: Mapping[str, Any], l1_memory_desc: object = None, **_: object) -> None:
        super().__init__()
        self._settings = _Settings(**settings)
        self._capacity = byte_count(self._settings.capacity, "capacity")
        self._aio_config = aio_config_of(self._settings.aio_config)
        self._paths = folders_in(self._settings.path, "")
        self._lock = threading.Lock()
        self._store: BlockStore | None = None
        self._error = ""
        self._closed = False
        self._tasks = 0
        self._stores: dict[int, _Task] = {}
        self._loads: dict[int, _Task] = {}
        self._lookups: dict[int, Any] = {}
        block_bytes = self._settings.block_bytes
        if block_bytes is None:
            found = [layout for each in self._paths if (layout := read_layout(each / FILE_NAME)) is not None]
            block_bytes = found[0].block_bytes if found else None
        if block_bytes is not None:
            self._store = self._open(block_bytes)
        self._store_event, self._lookup_event, self._load_event = (
            os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(3)
        )

    def _open(self, block_bytes: ByteCount) -> BlockStore:
        fingerprint = self._settings.fingerprint
        return BlockStore(self._paths, self._capacity, block_bytes, fingerprint=fingerprint, aio_config=self._aio_config)

    # Called by LMCache, in several threads: L2AdapterInterface of LMCache 0.5

    def get_store_event_fd(self) -> int:
        """Return the descriptor of the ``eventfd`` to which 1 is added when a task that stores ends."""
        return self._store_event

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor of the ``eventfd`` to which 1 is added when a task that looks up ends."""
        return self._lookup_event

    def get_load_event_fd(self) -> int:
        """Return the descriptor of the ``eventfd`` to which 1 is added when a task that loads ends."""
        return self._load_event

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Start storing chunks; return the task's number at once. A chunk that is stored already is not written again.

        Raises:
            ValueError: If the adapter is closed. Other errors are those of the task, and logged.
        """
        return self._submit(self._stores, keys, objects, self._store_event)

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Start loading chunks into the memory of objects; return the task's number at once. As :meth:`submit_store_task`."""
        return self._submit(self._loads, keys, objects, self._load_event)

    def _submit(self, tasks: dict[int, _Task], keys: Sequence[Any], objects: Sequence[Any], event: int) -> int:
        blocks = [memoryview(each.byte_array) for each in objects]
        sizes = [each.nbytes for each in blocks]
        with self._lock:  # whoever sees the event finds the task
            number, future = self._next_task(), None
            try:
                if self._store is None and tasks is self._stores and sizes and not self._error:
                    self._store = self._open(max(sizes))
                if self._store is not None:
                    start = self._store.put_many if tasks is self._stores else self._store.get_many
                    future = start([_key(each) for each in keys], blocks, event_fd=event)
            except (OSError, ValueError) as error:
                if self._store is None:
                    self._error = str(error)  # not tried again with each task
                _log.error("a task of %d chunks in %s cannot be started: %s", len(keys), path_list(self._paths), error)
            tasks[number] = _Task(keys, sizes, future)
            if future is None:
                os.eventfd_write(event, 1)
        return number

    def _next_task(self) -> int:
        if self._closed:
            raise ValueError("the adapter is closed")
        self._tasks += 1
        return self._tasks

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the result of each task that stored and has ended since the last call. Never blocks."""
        with self._lock:
            ended = {number: task for number, task in self._stores.items() if task.ended}
            for number in ended:
                del self._stores[number]
        results = {}
        for number, task in ended.items():
            flags = task.flags()
            stored = [(key, size) for key, size, flag in zip(task.keys, task.sizes, flags, strict=True) if flag]
            if stored:
                self._notify_keys_stored([key for key, _ in stored], [size for _, size in stored])
            results[number] = L2StoreResult(all(flags), sum(size for _, size in stored))
        return results

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: object = None) -> int:
        """Look chunks up, and keep those that are stored from being evicted until :meth:`submit_unlock`."""
        with self._lock:
            number = self._next_task()
            flags = [False] * len(keys) if self._store is None else self._store.pin([_key(each) for each in keys])
            self._lookups[number] = _bitmap(flags)
            os.eventfd_write(self._lookup_event, 1)
        return number

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return a bitmap that says which chunks are stored, and forget the task; None if there is no such task."""
        with self._lock:
            return self._lookups.pop(task_id, None)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Take back one lock of each chunk that has one."""
        with self._lock:
            if self._store is not None and not self._closed:
                self._store.unpin([_key(each) for each in keys])

    def query_load_result(self, task_id: int) -> Any:
        """Return a bitmap that says which chunks were loaded, and forget the task; None until it has ended, or if there is none.

        The memory of other chunks has any bytes.
        """
        with self._lock:
            task = self._loads.get(task_id)
            if task is None or not task.ended:
                return None
            del self._loads[task_id]
        flags = task.flags()
        if any(flags):
            self._notify_keys_accessed([key for key, flag in zip(task.keys, flags, strict=True) if flag])
        return _bitmap(flags)

    @property
    def supports_global_eviction(self) -> bool:
        """False: the store evicts by itself."""
        return False

    def delete(self, keys: Sequence[Any]) -> None:
        """Remove chunks that are stored and not locked. Loads under way still return them."""
        with self._lock:
            if self._store is None or self._closed:
                return
            flags = self._store.delete([_key(each) for each in keys])
        removed = [key for key, flag in zip(keys, flags, strict=True) if flag]
        if removed:
            self._notify_keys_deleted(removed, [0] * len(removed))  # the store counts bytes, not the base class

    def get_usage(self) -> Any:
        """Return the bytes of slots with a chunk, and of all slots. Bytes by cache salt are not known."""
        with self._lock:
            if self._store is None or self._closed:
                return AdapterUsage(0, 0)
            stats, slot = self._store.stats(), self._store.block_bytes
        return AdapterUsage(stats.used * slot, stats.slots * slot)

    def report_status(self) -> dict[str, Any]:
        """Return the counters of the store, and whether the adapter can be used."""
        with self._lock:
            figures = {} if self._store is None or self._closed else self._store.stats().as_dict()
            healthy = not self._closed and not self._error
        return {
            "is_healthy": healthy,
            "type": type(self).__name__,
            "path": path_list(self._paths),
            "error": self._error,
            **figures,
        }

    def close(self) -> None:
        """Wait for the tasks under way, and close the store and the event descriptors. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            if self._store is not None:
                self._store.close()
        finally:
            for event in (self._store_event, self._lookup_event, self._load_event):
                os.close(event)


def _key(key: Any) -> bytes:
    """Return the store's key for a key of LMCache: all of its fields count."""
    return block_key(key.model_name, key.kv_rank, key.object_group_id, key.chunk_hash.hex(), key.cache_salt)


def _bitmap(flags: Sequence[bool]) -> Any:
    bitmap = Bitmap(len(flags))
    for number, flag in enumerate(flags):
        if flag:
            bitmap.set(number)
    return bitmap
