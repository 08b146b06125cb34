"""vLLM, SGLang, LMCache, TorchRec and diffusers from the folder that ``--serving-packages`` names."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import serving_packages


def _names(config: pytest.Config, use: Callable[[Path], None], **modules: str) -> SimpleNamespace:
    """Return names of modules, whatever these warn of when they are imported. Skips without the option."""
    folder = config.getoption("--serving-packages")
    if not folder:
        pytest.skip("needs a folder with vLLM, SGLang, LMCache, ...: make test-serving, or --serving-packages FOLDER")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        use(Path(folder).resolve())
        found = {module: importlib.import_module(module.replace("__", ".")) for module in modules}
    return SimpleNamespace(**{name: getattr(found[module], name) for module, names in modules.items() for name in names.split()})


def flip_bytes(path: Path, block: bytes) -> None:
    """Change a byte of a block where it lies in a file of blocks."""
    text = path.read_bytes()
    at = text.index(block[:4096]) + 100
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([text[at] ^ 0xFF]))


def vllm(config: pytest.Config) -> SimpleNamespace:
    return _names(
        config,
        serving_packages.use_vllm,
        vllm__v1__kv_offload__base="LookupResult Locality Medium OffloadingKVEventsConfig ReqContext ScheduleEndContext"
        " make_offload_key",
        vllm__v1__kv_offload__config="OffloadingCacheConfig OffloadingConfig OffloadingGroupConfig OffloadingModelConfig"
        " OffloadingParallelConfig",
        vllm__v1__kv_offload__tiering__base="TransferJob",
        vllm__v1__kv_offload__tiering__factory="SecondaryTierFactory",
        vllm__v1__kv_offload__tiering__manager="CPUPrimaryTierOffloadingManager TieringOffloadingManager",
    )


def vllm_spec(
    vllm: SimpleNamespace,
    model: str = "org/model",
    dtype: str = "bfloat16",
    tokens_per_hash: int = 16,
    events: bool = False,
    **parallel: Any,
) -> SimpleNamespace:
    """What a tier sees of vLLM's configuration."""
    ranks = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    ranks |= {
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": False,
    }
    config = vllm.OffloadingConfig(
        groups=(vllm.OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer",), group_id=0),),
        worker_kv_bytes_per_block=0,
        enable_kv_cache_events=events,
        extra_config={},
        engine_id="engine",
        model=vllm.OffloadingModelConfig(name=model, dtype=dtype),
        cache=vllm.OffloadingCacheConfig(tokens_per_hash=tokens_per_hash, blocks_per_chunk=1),
        parallel=vllm.OffloadingParallelConfig(**(ranks | parallel)),
    )
    enabled = vllm.OffloadingKVEventsConfig(enable_kv_cache_events=events, self_describing_kv_events=False)
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=enabled)


def vllm_figures(stats: Any) -> dict[str, float]:
    return {name: values[()] for name, values in stats.data["data"].items()}


def vllm_manager(vllm: SimpleNamespace, tier: Any, memory: torch.Tensor) -> Any:
    """vLLM's manager of a first tier in memory and one below."""
    region = SimpleNamespace(create_kv_memoryview=lambda: memoryview(memory.numpy()), cleanup=lambda: None)
    primary = vllm.CPUPrimaryTierOffloadingManager(num_chunks=len(memory), mmap_region=region)
    return vllm.TieringOffloadingManager(primary_tier=primary, secondary_tiers=[tier])


def lmcache(config: pytest.Config) -> SimpleNamespace:
    return _names(
        config,
        serving_packages.add,
        lmcache__v1__distributed__api="ObjectKey",
        lmcache__v1__distributed__internal_api="L2AdapterListener",
        lmcache__v1__distributed__l2_adapters="create_l2_adapter",
        lmcache__v1__distributed__l2_adapters__plugin_l2_adapter="PluginL2AdapterConfig",
        lmcache__v1__memory_management="MemoryFormat MemoryObjMetadata TensorMemoryObj",
    )


def lmcache_plugin(lmcache: SimpleNamespace, settings: dict[str, Any]) -> Any:
    given = {"module_path": "deepnvme.integrations.lmcache", "class_name": "NVMeL2Adapter", "adapter_params": settings}
    return lmcache.create_l2_adapter(lmcache.PluginL2AdapterConfig.from_dict(given))


def lmcache_object(lmcache: SimpleNamespace, memory: torch.Tensor) -> Any:
    """An object with a tensor's memory."""
    metadata = lmcache.MemoryObjMetadata(
        shape=memory.shape,
        dtype=memory.dtype,
        address=0,
        phy_size=memory.nbytes,
        fmt=lmcache.MemoryFormat.KV_2LTD,
        ref_count=1,
    )
    return lmcache.TensorMemoryObj(raw_data=memory, metadata=metadata, parent_allocator=None)


def sglang(config: pytest.Config) -> SimpleNamespace:
    return _names(
        config,
        serving_packages.use_sglang,
        sglang__srt__mem_cache__hicache_storage="HiCacheStorageConfig PoolHitPolicy PoolName PoolTransfer",
        sglang__srt__mem_cache__storage__backend_factory="StorageBackendFactory",
    )


def torchrec(config: pytest.Config) -> SimpleNamespace:
    return _names(
        config,
        serving_packages.add,
        torchrec="EmbeddingBagCollection EmbeddingBagConfig KeyedJaggedTensor PoolingType __version__",
    )


def diffusers(config: pytest.Config) -> SimpleNamespace:
    return _names(config, serving_packages.add, diffusers="UNet2DModel", diffusers__hooks="apply_group_offloading")
