"""The async_io op."""

from ..op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
