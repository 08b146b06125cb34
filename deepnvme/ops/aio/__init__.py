"""The async_io op's builder."""

from deepnvme._lazy import public_names

from ..op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]

__dir__ = public_names(__name__)
