"""Models whose weights stay on the drive, and are read ahead of their use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comparing import StoreMismatch
    from .sources import Location, Source
    from .stream_report import StreamReport
    from .streaming import Streaming, stream
    from .weight_store import CorruptExtent, WeightStore

__all__ = ["CorruptExtent", "Location", "Source", "StoreMismatch", "StreamReport", "Streaming", "WeightStore", "stream"]

_WHERE = {
    "CorruptExtent": "weight_store",
    "Location": "sources",
    "Source": "sources",
    "StoreMismatch": "comparing",
    "StreamReport": "stream_report",
    "Streaming": "streaming",
    "WeightStore": "weight_store",
    "stream": "streaming",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
