"""Inference with models larger than memory: weights are read from the drive ahead of use, and a KV cache can be kept there."""

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules

if TYPE_CHECKING:
    from .kv.cache import CacheReport, OffloadedCache, close_cache, offload_kv, offloaded_cache
    from .pretrained import from_pretrained
    from .stream_report import StreamReport
    from .streamed_model import Streaming, stream, streaming_of
    from .weights.manifest import Extent, Weight, WeightInfo
    from .weights.model_blocks import StoreMismatch
    from .weights.weight_locations import Location, Source
    from .weights.weight_store import CorruptExtent, WeightStore

__all__ = [
    "CacheReport",
    "CorruptExtent",
    "Extent",
    "Location",
    "OffloadedCache",
    "Source",
    "StoreMismatch",
    "StreamReport",
    "Streaming",
    "Weight",
    "WeightInfo",
    "WeightStore",
    "close_cache",
    "from_pretrained",
    "offload_kv",
    "offloaded_cache",
    "stream",
    "streaming_of",
]

_WHERE = {
    "CacheReport": "kv.cache",
    "CorruptExtent": "weights.weight_store",
    "Extent": "weights.manifest",
    "Location": "weights.weight_locations",
    "OffloadedCache": "kv.cache",
    "Source": "weights.weight_locations",
    "StoreMismatch": "weights.model_blocks",
    "StreamReport": "stream_report",
    "Streaming": "streamed_model",
    "Weight": "weights.manifest",
    "WeightInfo": "weights.manifest",
    "WeightStore": "weights.weight_store",
    "close_cache": "kv.cache",
    "from_pretrained": "pretrained",
    "offload_kv": "kv.cache",
    "offloaded_cache": "kv.cache",
    "stream": "streamed_model",
    "streaming_of": "streamed_model",
}

__getattr__, __dir__ = from_modules(__name__, _WHERE)
