"""The gds op."""

from ..op_builder import GDSBuilder

__all__ = ["GDSBuilder"]
