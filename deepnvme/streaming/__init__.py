"""Models larger than memory: keys and values of long generation on a drive."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kv_cache import CacheReport, OffloadedCache, close_cache, offload_kv, offloaded_cache

__all__ = ["CacheReport", "OffloadedCache", "close_cache", "offload_kv", "offloaded_cache"]

_WITH_TRANSFORMERS = dict.fromkeys(__all__, "kv_cache")


def __getattr__(name: str) -> Any:
    if name not in _WITH_TRANSFORMERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WITH_TRANSFORMERS[name]}", __name__), name)
