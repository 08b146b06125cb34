"""Pinned host memory for transfers, leased from a pool with a byte budget, and helpers for alignment and host memory."""

from deepnvme.telemetry.sizes import ByteCount

from .budget import MemoryBudget
from .lease import Lease
from .pool import BufferPool, OutOfBuffers, buffer_pool, set_buffer_budget

__all__ = ["BufferPool", "ByteCount", "Lease", "MemoryBudget", "OutOfBuffers", "buffer_pool", "set_buffer_budget"]


def __dir__() -> list[str]:
    """Return the public names, without the submodules that define them."""
    return sorted(__all__)
