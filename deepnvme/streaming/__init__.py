"""Models whose weights stay on the drive, and are read ahead of their use; keys and values of long generation there too."""

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules

if TYPE_CHECKING:
    from .comparing import StoreMismatch
    from .kv.cache import CacheReport, OffloadedCache, close_cache, offload_kv, offloaded_cache
    from .manifest import Extent, Weight, WeightInfo
    from .pretrained import from_pretrained
    from .sources import Location, Source
    from .stream_report import StreamReport
    from .streaming import Streaming, stream, streaming_of
    from .weight_store import CorruptExtent, WeightStore

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
    "CorruptExtent": "weight_store",
    "Extent": "manifest",
    "Location": "sources",
    "OffloadedCache": "kv.cache",
    "Source": "sources",
    "StoreMismatch": "comparing",
    "StreamReport": "stream_report",
    "Streaming": "streaming",
    "Weight": "manifest",
    "WeightInfo": "manifest",
    "WeightStore": "weight_store",
    "close_cache": "kv.cache",
    "from_pretrained": "pretrained",
    "offload_kv": "kv.cache",
    "offloaded_cache": "kv.cache",
    "stream": "streaming",
    "streaming_of": "streaming",
}

__getattr__ = from_modules(__name__, _WHERE)
