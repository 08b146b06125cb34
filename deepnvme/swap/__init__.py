"""Public names of the store; :mod:`.zero` has those of DeepSpeed's swapper classes. The buffer pool is :mod:`deepnvme.memory`."""

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules
from deepnvme.memory import BufferPool as BufferPool
from deepnvme.memory import Lease as Lease
from deepnvme.memory import OutOfBuffers as OutOfBuffers
from deepnvme.memory import buffer_pool as buffer_pool
from deepnvme.memory import set_buffer_budget as set_buffer_budget
from deepnvme.store import CorruptManifest, CorruptTensor, StoreLocked, TensorInfo, TensorStore

if TYPE_CHECKING:
    from . import zero as zero

__all__ = [
    "CorruptManifest",
    "CorruptTensor",
    "StoreLocked",
    "TensorInfo",
    "TensorStore",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = from_modules(__name__, {}, ("zero",))
