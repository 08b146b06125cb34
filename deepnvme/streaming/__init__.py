"""Inference with models larger than memory: weights are read from the drive ahead of use, and a KV cache can be kept there."""

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules
from deepnvme.checkpoint.weight_locations import Location, Source
from deepnvme.model.weight_differences import WeightInfo, WeightMismatch

from .experts.experts_report import ExpertsReport, LayerUses
from .experts.offloaded_experts import OffloadedExperts, offload_experts
from .pretrained import from_pretrained
from .stream_report import StreamReport
from .streamed_model import Streaming, stream, streaming_of
from .weights.manifest import Extent, Weight
from .weights.weight_store import CorruptExtent, WeightStore

if TYPE_CHECKING:
    from .kv.cache import CacheReport, OffloadedCache, offload_kv

__all__ = [
    "CacheReport",
    "CorruptExtent",
    "ExpertsReport",
    "Extent",
    "LayerUses",
    "Location",
    "OffloadedCache",
    "OffloadedExperts",
    "Source",
    "StreamReport",
    "Streaming",
    "Weight",
    "WeightInfo",
    "WeightMismatch",
    "WeightStore",
    "from_pretrained",
    "offload_experts",
    "offload_kv",
    "stream",
    "streaming_of",
]

if not TYPE_CHECKING:  # the cache needs transformers
    _OF_THE_CACHE = ("CacheReport", "OffloadedCache", "offload_kv")
    __getattr__, __dir__ = from_modules(__name__, dict.fromkeys(_OF_THE_CACHE, "kv.cache"))
