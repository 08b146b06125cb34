"""Public names of the buffer pool and the store; :mod:`.zero` has those of DeepSpeed's swapper classes."""

from deepnvme.memory import BufferPool, Lease, OutOfBuffers, buffer_pool, set_buffer_budget
from deepnvme.store import CorruptManifest, CorruptTensor, StoreLocked, TensorInfo, TensorStore

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
