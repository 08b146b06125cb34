"""The blocks that the optimizer swapper keeps in files, one for each tensor of a sub-group, used in the order of a step."""

from __future__ import annotations

import errno

import torch

from deepnvme.cache.block import Block
from deepnvme.cache.block_cache import BlockCache
from deepnvme.cache.block_memory import PooledMemory
from deepnvme.engine import Engine, Future
from deepnvme.memory.pool import BufferPool

_BUSY_BYTES = 32 << 20
"""Most bytes of read-ahead in transfer: enough to keep a drive busy. More would slow down transfers that the step waits for."""


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
        """Return the start of its memory as a flat tensor. Raises RuntimeError if it is not in memory."""
        return self.memory.buffer[: numel * dtype.itemsize].view(dtype)


class TileCache(BlockCache):
    """A cache of tiles. A step uses the sub-groups in the same order each time.

    Args:
        engine: Reads and writes the files.
        pool: Where memory is leased.
        limit: Bytes of leases, unless the sub-group in use alone needs more.
    """

    def __init__(self, engine: Engine, pool: BufferPool, limit: int) -> None:
        def shortage(held: int, block: Block) -> str:
            return (
                f"the sub-group at hand needs {held} bytes of swap buffers and {block.nbytes} more; "
                f"buffer_count allows {limit}, set it larger"
            )

        memory = PooledMemory(pool, limit, shortage)
        # Written tiles give their memory back: the pool is the process's, which saves a checkpoint between steps, say.
        super().__init__(_Files(engine), memory, retain_written=False, busy_bytes=_BUSY_BYTES, helper="deepnvme-read-ahead")
        self.engine = engine
        self.current = 0
        """The index of the sub-group in use, or used last, in the order of a step."""
        self.count = 1
        """Number of sub-groups."""

    def set_current(self, index: int, count: int) -> None:
        """Set which sub-group is in use from now on, and how many there are."""
        self.current, self.count = index, count

    def overwrite(self, tile: Tile, content: torch.Tensor, offset: int) -> None:
        """Write a part of a tile that is not in memory to its file. ``offset``: bytes. Blocks. Raises OSError."""
        self.engine.write(content, tile.name, offset).result()

    def _distance(self, block: Block) -> int:
        """Return how many sub-groups later in the order of a step the block is used."""
        assert isinstance(block, Tile)
        return (block.index - self.current) % self.count


class _Files:
    """Reads and writes tiles for the cache: each is the start of a file of its own."""

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
