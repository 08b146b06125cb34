"""The gds op's builder."""

from deepnvme._lazy import public_names

from ..op_builder import GDSBuilder

__all__ = ["GDSBuilder"]

__dir__ = public_names(__name__)
