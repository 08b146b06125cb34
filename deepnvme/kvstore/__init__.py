"""Blocks of bytes by key, on drives: the tier below an inference server's memory."""

from deepnvme.files.directory_lock import StoreLocked

from .block_store import BlocksFuture, BlockStore, BlockStoreStats

__all__ = ["BlockStore", "BlockStoreStats", "BlocksFuture", "StoreLocked"]


def __dir__() -> list[str]:
    """Return the public names, without the submodules that define them."""
    return sorted(__all__)
