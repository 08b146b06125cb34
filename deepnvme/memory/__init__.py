"""Pinned memory on loan within a budget, alignment, and host memory for transfers."""

from .lease import Lease
from .pool import BufferPool, OutOfBuffers, buffer_pool, set_buffer_budget

__all__ = ["BufferPool", "Lease", "OutOfBuffers", "buffer_pool", "set_buffer_budget"]
