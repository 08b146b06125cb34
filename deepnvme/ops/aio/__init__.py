"""The async_io op's builder."""

from ..op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
