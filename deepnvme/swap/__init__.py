"""Tensors on drives: pinned buffers within a budget, and what swaps through them."""

from .buffers import BufferPool, Lease, OutOfBuffers, buffer_pool, set_buffer_budget

__all__ = ["BufferPool", "Lease", "OutOfBuffers", "buffer_pool", "set_buffer_budget"]
