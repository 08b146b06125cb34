"""Public names of the buffer pool and the store; :mod:`.zero` has those of DeepSpeed's swapper classes."""

from typing import TYPE_CHECKING

from deepnvme._lazy import from_modules
from deepnvme.memory import BufferPool, Lease, OutOfBuffers, buffer_pool, set_buffer_budget
from deepnvme.store import CorruptManifest, CorruptTensor, StoreLocked, TensorInfo, TensorStore

if TYPE_CHECKING:
    from . import zero as zero

__all__ = [
    "BufferPool",
    "CorruptManifest",
    "CorruptTensor",
    "Lease",
    "OutOfBuffers",
    "StoreLocked",
    "TensorInfo",
    "TensorStore",
    "buffer_pool",
    "set_buffer_budget",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = from_modules(__name__, {}, ("zero",))
