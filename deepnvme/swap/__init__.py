"""Tensors on drives: pinned buffers within a budget, a store of named tensors, and what swaps through them."""

from .buffers import BufferPool, Lease, OutOfBuffers, buffer_pool, set_buffer_budget
from .manifest import CorruptManifest
from .owner import StoreLocked
from .store import CorruptTensor, TensorInfo, TensorStore

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
