"""Every op's builder by the op's name."""

from __future__ import annotations

from .async_io import AsyncIOBuilder
from .builder import OpBuilder
from .gds import GDSBuilder
from .utils import UtilsBuilder

ALL_OPS: dict[str, OpBuilder] = {builder.name: builder for builder in (AsyncIOBuilder(), GDSBuilder(), UtilsBuilder())}
