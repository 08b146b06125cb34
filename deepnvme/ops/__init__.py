"""The compiled ops, by name, and their builders."""

from types import ModuleType
from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules

if TYPE_CHECKING:
    from . import aio as aio
    from . import gds as gds
    from . import op_builder as op_builder

__all__ = ["load_async_io"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = from_modules(__name__, {}, ("aio", "gds", "op_builder"))


def load_async_io() -> ModuleType:
    """Return the compiled ``async_io`` op. The stubs in ``aio/async_io_op/`` list its contents.

    The op is compiled on first use, which blocks for seconds, unless it was compiled at installation. The engine and
    DeepSpeed's handle are at its top level; the submodules ``checkpoint``, ``memory``, ``quantization`` and ``tables`` have
    the other compiled functions of the package.

    Raises:
        RuntimeError: If the op cannot be built. The message says what to do.
    """
    from .op_builder import AsyncIOBuilder

    return AsyncIOBuilder().load()
