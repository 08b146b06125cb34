"""Models whose weights stay on the drive, and are read ahead of their use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules

if TYPE_CHECKING:
    from .comparing import StoreMismatch
    from .sources import Location, Source
    from .weight_store import CorruptExtent, WeightStore

__all__ = ["CorruptExtent", "Location", "Source", "StoreMismatch", "WeightStore"]

__getattr__ = from_modules(
    __name__,
    {
        "CorruptExtent": "weight_store",
        "Location": "sources",
        "Source": "sources",
        "StoreMismatch": "comparing",
        "WeightStore": "weight_store",
    },
)
