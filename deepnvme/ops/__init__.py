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
    """Return the compiled ``async_io`` op; the stubs in ``aio/async_io_op/`` say what it holds.

    It is compiled on first use, unless the installation did, which blocks for seconds. The engine and DeepSpeed's handle are at
    its top; the submodules ``checkpoint``, ``memory``, ``quantization`` and ``tables`` hold what the package has compiled
    besides I/O.

    Raises:
        RuntimeError: If it cannot be built, with what to do about it.
    """
    from .op_builder import AsyncIOBuilder

    return AsyncIOBuilder().load()
