"""vLLM, SGLang and LMCache in a folder, as far as their tiers of KV blocks need them, on a machine without a GPU.

``pip install --no-deps --target FOLDER`` puts them there: their dependencies would replace the environment's torch. What a tier
imports and does not use, and that needs a GPU's libraries, is replaced by an empty module.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def add(folder: Path) -> None:
    """Make the packages of a folder importable, behind those of the environment."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def put_module(name: str, contents: Mapping[str, Any], folder: Path | None = None) -> None:
    """Put a module in place of one that cannot be imported here. ``folder``: where its own modules are, if it is a package."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=folder is not None)
    if folder is not None:
        module.__path__ = [str(folder)]
    vars(module).update(contents)
    sys.modules[name] = module


def use_vllm(folder: Path) -> None:
    """Make vLLM's tiers importable, without its models, its distributed execution and its metrics server."""
    add(folder)
    import vllm  # noqa: F401

    names = ["vllm.distributed"]
    names += [f"{names[-1]}.kv_transfer", f"{names[-1]}.kv_transfer.kv_connector"]
    names += [f"{names[-1]}.v1", f"{names[-1]}.v1.offloading"]
    for name in names:
        if name not in sys.modules:
            put_module(name, {}, folder.joinpath(*name.split(".")))
    connector = "vllm.distributed.kv_transfer.kv_connector.v1"
    unused: dict[str, Any] = dict.fromkeys(("KVConnectorPromMetrics", "PromMetric", "PromMetricT"), object)
    put_module(f"{connector}.metrics", {**unused, "KVConnectorStats": _Stats})
    put_module(f"{connector}.offloading.canonical_mapping", {"canonical_format_id": str})
    put_module("vllm.config", {"VllmConfig": object})
    put_module("vllm.v1.kv_offload.factory", {"OffloadingSpecFactory": object})


@dataclass
class _Stats:
    """What vLLM's statistics of the offloading connector are a subclass of."""

    data: dict[str, Any] = field(default_factory=dict)


def use_sglang(folder: Path) -> None:
    """Make SGLang's HiCache storage importable, without its kernels and its server."""
    add(folder)
    for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.mem_cache", "sglang.srt.mem_cache.storage"):
        if name not in sys.modules:
            put_module(name, {}, folder.joinpath(*name.split(".")))
    put_module("sglang.srt.utils.common", {"human_readable_int": int})
