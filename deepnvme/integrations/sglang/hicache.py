"""A storage backend of SGLang's HiCache: pages of KV cache, in a :class:`deepnvme.kvstore.BlockStore` for each pool."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from deepnvme.kvstore import BlockStore, BlockStoreStats
from deepnvme.kvstore.block_files import RECORD_BYTES
from deepnvme.memory.alignment import padded
from deepnvme.telemetry.sizes import byte_count

from .._serving import aio_config_of, block_key, folders_in, require_version

if TYPE_CHECKING:
    from pathlib import Path

    from deepnvme.drives.aio_config import AioConfig

TESTED = ("0.5.23",)
"""Versions of SGLang that the tests ran with."""

try:
    from sglang.srt.mem_cache.hicache_storage import (  # type: ignore[import-not-found]
        HiCacheStorage,
        PoolHitPolicy,
        PoolName,
        PoolTransferResult,
    )

    _found = version("sglang")
except (ImportError, PackageNotFoundError) as error:
    what = f"needs SGLang {TESTED[-1]} (pip install sglang=={TESTED[-1]})"
    raise ImportError(f"deepnvme.integrations.sglang.NVMeHiCache {what}: {error}") from error
require_version("SGLang", _found, TESTED)

__all__ = ["NVMeHiCache"]

_log = logging.getLogger(__name__)
_KV = str(PoolName.KV.value)
_OF_ONE_RANK = (str(PoolName.MAMBA.value),)
"""Pools that are not the same on all ranks, whatever keys and values are."""
_MOST_PIECES = 2
_REFRESH_SECONDS = 1.0
"""Between two looks of a process that only reads for what the process that writes has stored."""


class _PageStore:
    """The pages of one of SGLang's pools of host memory. Thread-safe.

    A page is stored where it lies in SGLang's memory if it is one piece of it, or two (keys, and values): a block for each. Other
    pages are copied to one piece by SGLang's own methods.

    Args:
        host: The pool.
        folders: The store's directories.
        fingerprint: What the pages are of, apart from their size.
        pages: Number of pages to have room for; None for as many as fit into ``capacity``.
        capacity: Most bytes of the files, unless ``pages`` is given.
        writes: Whether this process writes; if not, another process makes the files.
        aio_config: Settings of the engine.
    """

    def __init__(
        self,
        host: Any,
        folders: Sequence[Path],
        fingerprint: str,
        pages: int | None,
        capacity: int,
        writes: bool,
        aio_config: AioConfig | None,
    ) -> None:
        self._host, self._folders, self._writes, self._aio_config = host, folders, writes, aio_config
        self.page_size: int = getattr(host, "page_size", 1) or 1
        self._page = host.get_dummy_flat_data_page
        in_place = _pieces_in_place(host, self.page_size)
        self._in_place = in_place is not None
        self._sizes: list[int] = [self._page().nbytes] if in_place is None else in_place
        slot = len(self._sizes) * (padded(max(self._sizes)) + RECORD_BYTES)
        self.pages = max(capacity // slot, 1) if pages is None else pages
        self._fingerprint = f"{fingerprint}, pages of {self.page_size} in {self._sizes} bytes of {host.dtype}, {host.layout}"
        self._lock = threading.Lock()
        self._refreshed = 0.0
        self._store: BlockStore | None = None
        if writes:
            room = capacity if pages is None else pages * slot + len(folders) * (1 << 20)
            self._store = BlockStore(folders, room, max(self._sizes), fingerprint=self._fingerprint, aio_config=aio_config)

    def opened(self) -> BlockStore | None:
        """Return the store; None as long as the process that writes has not made it."""
        with self._lock:
            if self._store is None and not self._writes:
                try:
                    self._store = BlockStore(
                        self._folders, fingerprint=self._fingerprint, read_only=True, aio_config=self._aio_config
                    )
                except (OSError, ValueError) as error:
                    _log.debug("pages are not read yet: %s", error)
            return self._store

    def present(self, names: Sequence[str]) -> list[bool]:
        """Return whether each page is stored."""
        store, keys = self.opened(), self._keys(names)
        if store is None:
            return [False] * len(names)
        found = self._whole(store.contains_many(keys))
        if not self._writes and not all(found) and time.monotonic() - self._refreshed > _REFRESH_SECONDS:
            self._refreshed = time.monotonic()
            store.refresh()
            found = self._whole(store.contains_many(keys))
        return found

    def transfer(self, put: bool, names: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        """Store, or load, pages of the pool, whose indices of tokens are given; return which were."""
        if indices is None or len(indices) != len(names) * self.page_size:
            count = 0 if indices is None else len(indices)
            _log.error("%d pages of %d cannot be at %d indices", len(names), self.page_size, count)
            return [False] * len(names)
        if self._in_place and names:
            pieces = zip(*self._host.get_page_buffer_meta(indices), strict=True)
            return self._run(put, names, [_memory(address, nbytes) for address, nbytes in pieces])
        first = indices[:: self.page_size].tolist()
        if put:
            return self.move(True, names, [self._host.get_data_page(index, flat=True) for index in first])
        pages = [self.empty() for _ in names]
        done = self.move(False, names, pages)
        for index, page, flag in zip(first, pages, done, strict=True):
            if flag:
                self._host.set_from_flat_data_page(index, page)
        return done

    def move(self, put: bool, names: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        """Store pages from tensors, or load pages into tensors, which are contiguous; return which were."""
        flat = [page.contiguous() if put else page for page in pages]
        if not all(page.is_contiguous() and page.nbytes == sum(self._sizes) for page in flat):
            _log.error("pages have %d bytes each, got %s", sum(self._sizes), sorted({page.nbytes for page in flat}))
            return [False] * len(names)
        pieces = [torch.split(page.view(-1).view(torch.uint8), self._sizes) for page in flat]
        return self._run(put, names, [piece for page in pieces for piece in page])

    def empty(self) -> torch.Tensor:
        """Return memory for a page, in ordinary memory whatever the pool's is in."""
        page = self._page()
        return torch.empty(page.shape, dtype=page.dtype)

    def clear(self) -> None:
        """Remove all pages, if this process writes."""
        if self._writes and self._store is not None:
            self._store.clear()

    def close(self) -> None:
        """Wait for what is under way, and close the store. Idempotent."""
        if self._store is not None:
            self._store.close()

    def _run(self, put: bool, names: Sequence[str], pieces: Sequence[Any]) -> list[bool]:
        store = self.opened()
        if store is None or (put and not self._writes):
            return [False] * len(names)
        return self._whole((store.put_many if put else store.get_many)(self._keys(names), pieces).result())

    def _keys(self, names: Sequence[str]) -> list[bytes]:
        return [block_key(name) + bytes([piece]) for name in names for piece in range(len(self._sizes))]

    def _whole(self, flags: Sequence[bool]) -> list[bool]:
        """Return of each page whether all of its pieces are there."""
        count = len(self._sizes)
        return [all(flags[first : first + count]) for first in range(0, len(flags), count)]


class NVMeHiCache(HiCacheStorage):  # type: ignore[misc]  # whatever SGLang is
    """Pages of KV cache in bounded, checked stores on one drive or several, for SGLang's HiCache.

    SGLang makes it for ``--hicache-storage-backend dynamic``. A page that is damaged, or was evicted, is not loaded. Methods that
    store or load wait until that is done: SGLang calls them in threads of its own. Thread-safe.

    Each rank has a folder of its own in ``path``, with a store for each pool: that of keys and values, and those that a model has
    besides. Ranks that have the same keys and values (MLA) share the folder of the rank that writes; the others read it, and find
    new pages within a second.

    Args:
        storage_config: SGLang's configuration. Its ``extra_config`` has ``path``: a directory, or a list of directories on
            different drives; ``capacity``: most bytes of the files with a rank's keys and values, or a size such as "200GB",
            reserved at once, beside which other pools have room for as many pages; ``aio_config``, optional: settings of the
            engine as an ``aio`` block.
        kwargs: SGLang's; not used.

    Raises:
        ValueError: If ``path`` or ``capacity`` is missing, or ``dcp_size`` is above 1.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        given = storage_config.extra_config or {}
        for name in ("path", "capacity"):
            if name not in given:
                raise ValueError(
                    f"NVMeHiCache needs {name!r} in --hicache-storage-backend-extra-config, which has {sorted(given)}"
                )
        if storage_config.dcp_size > 1:
            raise ValueError(f"NVMeHiCache does not serve decode context parallelism, got dcp_size {storage_config.dcp_size}")
        self._config, self._path = storage_config, given["path"]
        self._capacity = byte_count(given["capacity"], "capacity")
        self._aio_config = aio_config_of(given.get("aio_config"))
        self._pools: dict[str, _PageStore] = {}

    # Called by SGLang, in several threads: the interface of HiCacheStorage, SGLang 0.5.23

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Make, or open, the store of keys and values. Blocks for the drive.

        Raises:
            StoreLocked: If another process, which the message names, uses the directory.
            ValueError: If the files are of another model, layout, parallelism or capacity.
            OSError: With ENOSPC if a drive has too little space. Names the file.
        """
        if getattr(mem_pool_host, "kv_buffer", None) is None:
            raise ValueError("NVMeHiCache does not serve models that have no pool of keys and values, but several instead")
        super().register_mem_pool_host(mem_pool_host)
        self._add(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Make, or open, the store of another pool. As :meth:`register_mem_pool_host`, which comes first."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add(_text(host_pool_name), host_pool)

    def _add(self, name: str, host: Any) -> None:
        if name in self._pools:
            return
        of = self._config
        shared = of.is_mla_model and name not in _OF_ONE_RANK
        rank = "shared" if shared else f"tp{of.tp_rank}"
        folder = f"{rank}-pp{of.pp_rank}-cp{of.attn_cp_rank}-dp{of.dp_rank}/{name}"
        sizes = f"pp {of.pp_size}, cp {of.attn_cp_size}" if shared else f"tp {of.tp_size}, pp {of.pp_size}, cp {of.attn_cp_size}"
        self._pools[name] = _PageStore(
            host,
            folders_in(self._path, folder),
            f"SGLang, {of.model_name}, {name}, {sizes}",
            self._pools[_KV].pages if name != _KV else None,
            self._capacity,
            not shared or of.is_storage_writer,
            self._aio_config,
        )

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages from SGLang's memory, and return which are stored. A page that is stored already is not written again."""
        return self._pools[_KV].transfer(True, keys, host_indices)

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Load pages into SGLang's memory, and return which were loaded. The memory of other pages has any bytes."""
        return self._pools[_KV].transfer(False, keys, host_indices)

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store pages of several pools. As :meth:`batch_set_v1`."""
        return {each.name: self._pools[_text(each.name)].transfer(True, each.keys or [], each.host_indices) for each in transfers}

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Load pages of several pools. As :meth:`batch_get_v1`."""
        return {
            each.name: self._pools[_text(each.name)].transfer(False, each.keys or [], each.host_indices) for each in transfers
        }

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page of keys and values from a tensor, and return whether it is stored."""
        return self.batch_set([key], [value])

    def batch_set(self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """Store pages of keys and values from tensors, and return whether all are stored."""
        return all(self._pools[_KV].move(True, keys, values))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Load a page of keys and values into a tensor, or into a new one; return it, or None if the page is not there."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[torch.Tensor | None]:
        """Load pages of keys and values, as :meth:`get`."""
        pool = self._pools[_KV]
        pages = [pool.empty() if page is None else page for page in target_locations or [None] * len(keys)]
        return [page if flag else None for page, flag in zip(pages, pool.move(False, keys, pages), strict=True)]

    def exists(self, key: str) -> bool:
        """Return whether a page of keys and values is stored."""
        return self._pools[_KV].present([key])[0]

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Return how many pages of keys and values are stored, up to the first that is not."""
        return _leading(self._pools[_KV].present(keys))

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return how long a prefix of pages can be loaded from all pools, and which shorter ones can.

        Raises:
            ValueError: For another policy than that all pages, or the last ones of a prefix, are needed.
        """
        pages = self.batch_exists(keys)
        hits = {PoolName.KV: pages} if pages else {}
        prefixes = list(range(1, pages + 1))
        for each in pool_transfers or []:
            if not prefixes:
                break
            found = self._pools[_text(each.name)].present(keys[:pages])
            if each.hit_policy == PoolHitPolicy.ALL_PAGES:
                needed = pages
            elif each.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                needed = max(1, len(each.keys or ()))
            else:
                raise ValueError(f"NVMeHiCache does not serve the pool hit policy {each.hit_policy}")
            whole, row = set(), 0
            for length, flag in enumerate(found, 1):
                row = row + 1 if flag else 0
                if row >= min(needed, length):
                    whole.add(length)
            if whole:
                hits[each.name] = max(whole)
            prefixes = [length for length in prefixes if length in whole]
        return PoolTransferResult(prefixes[-1] if prefixes else 0, hits, prefixes)

    def clear(self) -> bool:
        """Remove all pages that this rank writes."""
        for pool in self._pools.values():
            pool.clear()
        return True

    def close(self) -> None:
        """Wait for what is under way, and close the stores. Idempotent."""
        for pool in self._pools.values():
            pool.close()

    # Called by users

    def stats(self) -> dict[str, BlockStoreStats]:
        """Return the counters of the store of each pool, by name. Never blocks on a drive."""
        return {name: store.stats() for name, pool in self._pools.items() if (store := pool.opened()) is not None}


def _text(name: Any) -> str:
    """Return a pool's name, which SGLang gives as a text or as a PoolName."""
    return str(getattr(name, "value", name))


def _pieces_in_place(host: Any, page_size: int) -> list[int] | None:
    """Return the bytes of each piece of a page that is stored where it lies; None for a page in too many pieces."""
    try:
        sizes = host.get_page_buffer_meta(torch.arange(page_size))[1]
    except (AttributeError, NotImplementedError, ValueError, AssertionError):
        return None
    return list(sizes) if 1 <= len(sizes) <= _MOST_PIECES else None


@functools.cache
def _array_type(nbytes: int) -> Any:
    return ctypes.c_ubyte * nbytes


def _memory(address: int, nbytes: int) -> memoryview:
    """Return SGLang's memory at an address. It stays SGLang's, which waits for us."""
    return memoryview(_array_type(nbytes).from_address(address))


def _leading(flags: Sequence[bool]) -> int:
    """Return how many flags are True up to the first that is not."""
    return next((number for number, flag in enumerate(flags) if not flag), len(flags))
