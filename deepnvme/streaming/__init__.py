"""Inference with models larger than memory: weights are read from the drive ahead of use, and a KV cache can be kept there."""

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules

if TYPE_CHECKING:
    from deepnvme.checkpoint.weight_locations import Location, Source
    from deepnvme.model.weight_differences import WeightInfo, WeightMismatch

    from .kv.cache import CacheReport, OffloadedCache, close_cache, offload_kv, offloaded_cache
    from .pretrained import from_pretrained
    from .stream_report import StreamReport
    from .streamed_model import Streaming, stream, streaming_of
    from .weights.manifest import Extent, Weight
    from .weights.weight_store import CorruptExtent, WeightStore

__all__ = [
    "CacheReport",
    "CorruptExtent",
    "Extent",
    "Location",
    "OffloadedCache",
    "Source",
    "StreamReport",
    "Streaming",
    "Weight",
    "WeightInfo",
    "WeightMismatch",
    "WeightStore",
    "close_cache",
    "from_pretrained",
    "offload_kv",
    "offloaded_cache",
    "stream",
    "streaming_of",
]

_NAMES = {
    "deepnvme.model.weight_differences": ("WeightMismatch", "WeightInfo"),
    "deepnvme.checkpoint.weight_locations": ("Location", "Source"),
    "kv.cache": ("CacheReport", "OffloadedCache", "close_cache", "offload_kv", "offloaded_cache"),
    "pretrained": ("from_pretrained",),
    "stream_report": ("StreamReport",),
    "streamed_model": ("Streaming", "stream", "streaming_of"),
    "weights.manifest": ("Extent", "Weight"),
    "weights.weight_store": ("CorruptExtent", "WeightStore"),
}
"""Public names by the module that defines them."""

if not TYPE_CHECKING:
    __getattr__, __dir__ = from_modules(__name__, {name: module for module, names in _NAMES.items() for name in names})
