"""Modules of torch whose weights are on a drive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules

if TYPE_CHECKING:
    from deepnvme.tables.embedding import EmbeddingBagOnDisk, EmbeddingOnDisk

__all__ = ["EmbeddingBagOnDisk", "EmbeddingOnDisk"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = from_modules(__name__, dict.fromkeys(__all__, "deepnvme.tables.embedding"))
