"""The gds op's builder."""

from ..op_builder import GDSBuilder

__all__ = ["GDSBuilder"]
