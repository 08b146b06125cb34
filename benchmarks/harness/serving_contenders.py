"""Tiers of KV blocks as contenders: what vLLM, SGLang and LMCache bring, and ours, each driven as its project drives it."""

from __future__ import annotations

import importlib
import os
import select
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch

from harness import serving_packages
from harness.host_pool import HostPool

JOB = 64
"""Blocks of a job."""
_POLL_SECONDS = 0.0005
"""Between two questions whether a job of vLLM has ended. vLLM asks once in each step of its scheduler, some milliseconds."""


class Contender(Protocol):
    """A tier. A job has blocks by key, and rows of the memory that all contenders share."""

    def prepare(self, keys: Sequence[bytes]) -> Any:
        """Return the project's own keys. Not measured."""

    def start(self, put: bool, keys: Any, rows: Sequence[int]) -> Any:
        """Start a job that stores, or loads, and return what :meth:`finish` needs."""

    def finish(self, started: Any) -> None:
        """Wait for a job. Raises RuntimeError if one of its blocks was not stored or loaded."""

    def clear(self) -> None:
        """Remove all blocks. Called for ours only."""

    def close(self) -> None:
        """Stop, and let go of the memory."""


def run(contender: Contender, put: bool, jobs: Sequence[tuple[Any, Sequence[int]]], under_way: int) -> None:
    """Run the jobs, some at a time, and wait for each."""
    started: list[Any] = []
    for number, (keys, rows) in enumerate(jobs):
        if number >= under_way:
            contender.finish(started[number - under_way])
        started.append(contender.start(put, keys, rows))
    for each in started[-under_way:]:
        contender.finish(each)


class OfVllm:
    """A secondary tier of vLLM."""

    def __init__(self, vllm: Any, tier: Any) -> None:
        self._vllm, self._tier = vllm, tier
        self._request = vllm.ReqContext(req_id="request")
        self._jobs = 0
        self._ended: dict[int, bool] = {}

    def prepare(self, keys: Sequence[bytes]) -> Any:
        return [self._vllm.make_offload_key(key, 0) for key in keys]

    def start(self, put: bool, keys: Any, rows: Sequence[int]) -> int:
        self._jobs += 1
        job = self._vllm.TransferJob(self._jobs, keys, self._vllm.array(rows), not put, self._request)
        (self._tier.submit_store if put else self._tier.submit_load)(job)
        return self._jobs

    def finish(self, started: int) -> None:
        while started not in self._ended:
            self._ended |= {result.job_id: result.success for result in self._tier.get_finished_jobs()}
            time.sleep(_POLL_SECONDS)
        if not self._ended.pop(started):
            raise RuntimeError("a block was not stored or loaded")

    def clear(self) -> None:
        self._tier._store.clear()

    def close(self) -> None:
        self._tier.shutdown()


class OfLmcache:
    """An L2 adapter of LMCache."""

    def __init__(self, lmcache: Any, adapter: Any, objects: Sequence[Any]) -> None:
        self._lmcache, self._adapter, self._objects = lmcache, adapter, objects
        self._stored: dict[int, Any] = {}
        self._events = select.poll()
        for descriptor in (adapter.get_store_event_fd(), adapter.get_load_event_fd()):
            self._events.register(descriptor, select.POLLIN)

    def prepare(self, keys: Sequence[bytes]) -> Any:
        return [self._lmcache.ObjectKey(chunk_hash=key, model_name="model", kv_rank=0) for key in keys]

    def start(self, put: bool, keys: Any, rows: Sequence[int]) -> tuple[bool, int]:
        submit = self._adapter.submit_store_task if put else self._adapter.submit_load_task
        return put, submit(keys, [self._objects[row] for row in rows])

    def finish(self, started: tuple[bool, int]) -> None:
        put, number = started
        while True:
            if put:
                self._stored |= self._adapter.pop_completed_store_tasks()
                if number in self._stored:
                    done = self._stored.pop(number).is_successful()
                    break
            elif (bitmap := self._adapter.query_load_result(number)) is not None:
                done = bitmap.popcount() == JOB
                break
            for descriptor, _ in self._events.poll():
                os.read(descriptor, 8)
        if not done:
            raise RuntimeError("a chunk was not stored or loaded")

    def clear(self) -> None:
        self._adapter._store.clear()

    def close(self) -> None:
        self._adapter.close()


class OfSglang:
    """A storage backend of HiCache. SGLang waits for each call; a thread of it stores, another one loads."""

    def __init__(self, backend: Any, put: Callable[[Any, Any], bool], get: Callable[[Any, Any], bool]) -> None:
        self._backend, self._put, self._get = backend, put, get

    def prepare(self, keys: Sequence[bytes]) -> Any:
        return [key.hex() for key in keys]

    def start(self, put: bool, keys: Any, rows: Sequence[int]) -> None:
        if not (self._put if put else self._get)(keys, rows):
            raise RuntimeError("a page was not stored or loaded")

    def finish(self, started: None) -> None:
        pass

    def clear(self) -> None:
        self._backend.clear()

    def close(self) -> None:
        if hasattr(self._backend, "close"):
            self._backend.close()


def _vllm(folder: Path) -> dict[str, Any]:
    serving_packages.use_vllm(folder)
    base = importlib.import_module("vllm.v1.kv_offload.base")
    tiering = importlib.import_module("vllm.v1.kv_offload.tiering.base")
    config = importlib.import_module("vllm.v1.kv_offload.config")
    factory = importlib.import_module("vllm.v1.kv_offload.tiering.factory").SecondaryTierFactory
    names = SimpleNamespace(
        ReqContext=base.ReqContext,
        make_offload_key=base.make_offload_key,
        TransferJob=tiering.TransferJob,
        array=partial(np.array, dtype=np.int64),
    )
    parallel = config.OffloadingParallelConfig(
        **dict.fromkeys(("rank", "data_parallel_index"), 0),
        **dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1),
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    )
    spec = SimpleNamespace(
        config=config.OffloadingConfig(
            groups=(),
            worker_kv_bytes_per_block=0,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="engine",
            model=config.OffloadingModelConfig(name="model", dtype="bfloat16"),
            cache=config.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=parallel,
        ),
        blocks_per_chunk=1,
    )

    def make(entry: dict[str, Any], path: Path, pool: torch.Tensor, nbytes: int) -> OfVllm:
        given = {
            name: value.format(path=path, nbytes=nbytes) if isinstance(value, str) else value for name, value in entry.items()
        }
        return OfVllm(names, factory.create_secondary_tier(given, memoryview(pool.numpy()), spec))

    fs = {"type": "fs", "root_dir": "{path}", "n_read_threads": 16, "n_write_threads": 16}
    ours = {"type": "NVMeTier", "module_path": "deepnvme.integrations.vllm", "path": "{path}/kv", "capacity": "{nbytes}"}
    return {"FileSystemTierManager": partial(make, fs), "ours": partial(make, ours)}


def _lmcache(folder: Path) -> dict[str, Any]:
    serving_packages.add(folder)
    adapters = "lmcache.v1.distributed.l2_adapters"
    create = importlib.import_module(adapters).create_l2_adapter
    memory = importlib.import_module("lmcache.v1.memory_management")
    names = SimpleNamespace(ObjectKey=importlib.import_module("lmcache.v1.distributed.api").ObjectKey)
    description = importlib.import_module("lmcache.v1.distributed.internal_api").L1MemoryDesc

    def make(config: Callable[[Path, int], Any], path: Path, pool: torch.Tensor, nbytes: int) -> OfLmcache:
        objects = []
        for row in pool:
            shape = memory.MemoryObjMetadata(row.shape, row.dtype, 0, row.nbytes, fmt=memory.MemoryFormat.KV_2LTD, ref_count=1)
            objects.append(memory.TensorMemoryObj(raw_data=row, metadata=shape, parent_allocator=None))
        l1 = description(ptr=pool.data_ptr(), size=pool.nbytes, align_bytes=4096)
        return OfLmcache(names, create(config(path, nbytes), l1), objects)

    def plugin(path: Path, nbytes: int) -> Any:
        given = {"path": str(path / "kv"), "capacity": nbytes}
        kind = importlib.import_module(f"{adapters}.plugin_l2_adapter").PluginL2AdapterConfig
        return kind("deepnvme.integrations.lmcache", "NVMeL2Adapter", given)

    def fs(path: Path, nbytes: int) -> Any:
        return importlib.import_module(f"{adapters}.fs_l2_adapter").FSL2AdapterConfig(str(path), use_odirect=True)

    def fs_native(path: Path, nbytes: int) -> Any:
        return importlib.import_module(f"{adapters}.fs_native_l2_adapter").FSNativeL2AdapterConfig(str(path), use_odirect=True)

    return {name: partial(make, config) for name, config in (("fs", fs), ("fs_native", fs_native), ("ours", plugin))}


def _sglang(folder: Path) -> dict[str, Any]:
    serving_packages.use_sglang(folder)
    storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage")

    def config(extra: dict[str, Any]) -> Any:
        ranks = dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0) | dict.fromkeys(
            ("tp_size", "pp_size", "attn_cp_size"), 1
        )
        flags = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "model"}
        return storage.HiCacheStorageConfig(**ranks, **flags, extra_config=extra)

    def host_of(pool: torch.Tensor) -> HostPool:
        """Pages of one token: the first half of a row has keys, the second one values."""
        return HostPool(pool.view(len(pool), 2, 1, -1).transpose(0, 1), 1)

    def theirs(path: Path, pool: torch.Tensor, nbytes: int) -> OfSglang:
        backend, host = storage.HiCacheFile(config({"file_storage_path": str(path)})), host_of(pool)

        def put(keys: list[str], rows: Sequence[int]) -> bool:
            return bool(backend.batch_set(keys, [host.get_data_page(row) for row in rows]))

        def get(keys: list[str], rows: Sequence[int]) -> bool:
            pages = backend.batch_get(keys, [host.get_dummy_flat_data_page() for _ in keys])
            for row, page in zip(rows, pages, strict=True):
                if page is None:
                    return False
                host.set_from_flat_data_page(row, page)
            return True

        return OfSglang(backend, put, get)

    def ours(path: Path, pool: torch.Tensor, nbytes: int) -> OfSglang:
        from deepnvme.integrations.sglang import NVMeHiCache

        backend, host = NVMeHiCache(config({"path": str(path / "kv"), "capacity": nbytes})), host_of(pool)
        backend.register_mem_pool_host(host)
        return OfSglang(
            backend,
            lambda keys, rows: all(backend.batch_set_v1(keys, torch.tensor(rows))),
            lambda keys, rows: all(backend.batch_get_v1(keys, torch.tensor(rows))),
        )

    return {"HiCacheFile": theirs, "ours": ours}


PROJECTS = {"vllm": _vllm, "sglang": _sglang, "lmcache": _lmcache}
"""For each project what makes its contenders from the folder of its package: by name, from a path, the memory, and a capacity."""
