"""Block cache of the optimizer swapper. Its blocks are tiles: each is one tensor of a sub-group, with its own file."""

from __future__ import annotations

import errno

import torch

from deepnvme.cache.block import Block
from deepnvme.cache.block_cache import BlockCache
from deepnvme.cache.block_memory import PooledMemory
from deepnvme.engine import Engine, Future
from deepnvme.memory.pool import BufferPool

_BUSY_BYTES = 32 << 20
"""Most bytes of read-ahead in flight: enough to keep a drive busy. More would delay transfers that the step waits for."""


class Tile(Block):
    """The bytes of one tensor of a sub-group. Its name is the path of its file, which begins with these bytes.

    Args:
        path: Path of the file.
        nbytes: Bytes in memory and in the file.
        index: The sub-group's index in the order of a step, from 0.
        stored: Whether the file has the bytes already.
    """

    __slots__ = ("index",)

    def __init__(self, path: str, nbytes: int, index: int, stored: bool = False) -> None:
        super().__init__(path, nbytes, stored)
        self.index = index

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the beginning of the tile's memory as a flat tensor. Raises RuntimeError if the tile is not in memory."""
        return self.memory.buffer[: numel * dtype.itemsize].view(dtype)


class TileCache(BlockCache):
    """A block cache for tiles, which a step uses in the same order of sub-groups each time.

    Args:
        engine: Reads and writes the files.
        pool: Buffer pool to lease memory from.
        limit: Most bytes of leases. Exceeded only if the sub-group in use needs more by itself.
    """

    def __init__(self, engine: Engine, pool: BufferPool, limit: int) -> None:
        def shortage(held: int, block: Block) -> str:
            return (
                f"the sub-group at hand needs {held} bytes of swap buffers and {block.nbytes} more; "
                f"buffer_count allows {limit}, set it larger"
            )

        memory = PooledMemory(pool, limit, shortage)
        # Written tiles give their memory back: the pool is the process's, which saves a checkpoint between steps, say.
        super().__init__(_Files(engine), memory, retain=False, busy_bytes=_BUSY_BYTES, helper="deepnvme-read-ahead")
        self.engine = engine
        self.current = 0
        """The index of the sub-group in use, or used last, in the order of a step."""
        self.count = 1
        """Number of sub-groups."""

    def set_current(self, index: int, count: int) -> None:
        """Set which sub-group is in use from now on, and the number of sub-groups."""
        self.current, self.count = index, count

    def _distance(self, block: Block) -> int:
        """Return how many sub-groups after the current one the tile is used, in the order of a step."""
        assert isinstance(block, Tile)
        return (block.index - self.current) % self.count


class _Files:
    """Reads and writes tiles for the cache. A tile is the beginning of its own file."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def read(self, block: Block, buffer: torch.Tensor) -> Future:
        """Start reading a tile from its file. Raises OSError, also if the file is too short."""
        try:
            return self._engine.read(buffer, block.name)
        except ValueError as error:  # past the end of the file
            text = str(error)
        # Outside of the handler: the error's context would keep the buffer.
        raise OSError(errno.EIO, f"should have {block.nbytes} bytes: {text}", block.name)

    def write(self, block: Block, buffer: torch.Tensor) -> Future:
        """Start writing a tile to the start of its file."""
        return self._engine.write(buffer, block.name)
