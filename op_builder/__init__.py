"""Builders of the compiled ops. Needs the standard library alone, so that ``setup.py`` can use it."""

from .all_ops import ALL_OPS
from .async_io import AsyncIOBuilder
from .builder import OpBuilder
from .gds import GDSBuilder
from .utils import UtilsBuilder

__all__ = ["ALL_OPS", "AsyncIOBuilder", "GDSBuilder", "OpBuilder", "UtilsBuilder"]


def __dir__() -> list[str]:
    return list(__all__)
