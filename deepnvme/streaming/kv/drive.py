"""The part of a KV cache that is on a drive: chunks of positions, read in the order in which the layers need them."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from deepnvme.cache.block import Block, Memory
from deepnvme.cache.block_cache import BlockCache, Use
from deepnvme.cache.block_memory import OwnMemory
from deepnvme.drives.mounts import warn_of_memory
from deepnvme.drives.profiles import engine_for
from deepnvme.files.directory_lock import DirectoryOwner
from deepnvme.memory.alignment import ALIGNMENT, padded
from deepnvme.memory.lease import Computed, Lease, Transfer
from deepnvme.memory.pool import BufferPool
from deepnvme.store.own_directory import open_own_store, remove_directories
from deepnvme.store.tensor_store import TensorStore
from deepnvme.telemetry.descriptions import state_text

from .strip import KVShape, Pair

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

CHUNK_BYTES = 2 << 20
"""Bytes of keys and values written together: enough for a drive's full speed, and few enough to keep in memory until then."""
_WRITING = 16 << 20
"""Most bytes of chunks being written at a time: enough to keep a drive busy."""
_ROOM = 4
"""Least number of chunks for which there is memory to read ahead, however short the layers are."""
_GROWTH = 4
"""Memory for a whole layer grows in steps of 1/16 to 1/8 of its size (2 ** -4 of the next power of two).

A layer grows by a position in each step of generation, and pinning new memory takes 0.3 s per GB.
"""


class KVChunk(Block):
    """Consecutive positions of one layer, stored on the drive under one name. The stored bytes never change.

    Args:
        name: Name of the chunk in the store.
        start: The first position.
        end: The position after the last.
        form: Shape of the keys and values, as they are written.
        device: The device on which the keys and values are computed.
    """

    __slots__ = ("copied_to", "created_on", "end", "form", "rows", "start")

    def __init__(self, name: str, start: int, end: int, form: KVShape, device: torch.device) -> None:
        super().__init__(name, (end - start) * form.position_bytes)
        self.start = start
        self.end = end
        self.form = form
        self.rows: torch.Tensor | None = None
        """Stored batch row for each row of the cache's batch; None while both are the same."""
        # A device's tensor is written as its stream leaves it: the store sees to that.
        self.created_on = None if device.type == "cpu" else device
        """Device in whose memory the chunk is created; None for host memory, and after the chunk was created."""
        self.copied_to: torch.device | None = None
        """Device that copies from the chunk's host memory, possibly still after the chunk was released; None without a copy."""

    def select_rows(self, rows: torch.Tensor) -> None:
        """Select and reorder the cache's batch rows, when the chunk is read later. Nothing changes on the drive."""
        self.rows = rows if self.rows is None else self.rows[rows]


class KVChunkStore:
    """The chunks of all layers on the drive, and the memory for reading and writing them.

    Memory: one whole layer as attention sees it, chunks of ``prefetch`` layers that are being read, and 16 MiB that are being
    written. More is used only while callers keep tensors that were returned to them.

    Args:
        path: Directory in which the cache creates its own subdirectory.
        layers: Number of layers.
        prefetch: Number of layers whose chunks are read ahead.
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.
    """

    def __init__(self, path: str | os.PathLike[str], layers: int, prefetch: int, aio_config: AioConfig | None = None) -> None:
        self.chunks: list[list[KVChunk]] = [[] for _ in range(layers)]
        """The chunks of each layer, in the order of their positions."""
        warn_of_memory([Path(path)])
        self.engine = engine_for([path], aio_config)
        """The engine of the store."""
        self._prefetch = prefetch
        self.pool = BufferPool(_WRITING)
        self._memory = _ChunkMemory(self.pool)
        self._names = itertools.count()
        self._whole: Lease | None = None
        self._closed = False
        self._process = os.getpid()
        self._broken: BaseException | None = None
        self.store, self._directories = open_own_store([Path(path)], "deepnvme-kv", self.engine, DirectoryOwner("OffloadedCache"))
        self.cache = BlockCache(_Chunks(self.store), self._memory, retain=False)
        """Block cache of the chunks in memory: in use, read ahead, or being written."""

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Return a context manager for code that changes layers. If the code raises, the cache is unusable until :meth:`mend`.

        The layers may then have different numbers of positions.

        Raises:
            RuntimeError: On entering after such an error, which is its cause, until :meth:`mend`.
            ValueError: On entering after :meth:`close`.
        """
        self.check()
        self._broken = _INTERRUPTED  # from here to the end, whatever interrupts it
        try:
            yield
        except GeneratorExit:  # the caller was interrupted before the change began, and dropped this later
            raise
        except BaseException as error:
            self._broken = _without_traceback(error)
            raise
        self._broken = None

    def state(self) -> str:
        """Return the state for ``repr``: "closed", "broken off", "of process ...", or "" if the cache is usable."""
        return state_text(self._closed, self._process) or ("broken off" if self._broken is not None else "")

    def check(self) -> None:
        """Raise ValueError or RuntimeError if the cache is unusable, as :meth:`changing` does."""
        if self._closed:
            raise ValueError("the cache is closed")
        broken = self._broken
        if broken is not None:
            text = f"the cache is not whole any more, since {type(broken).__name__}: {broken}: reset() it, or make another"
            raise RuntimeError(text) from broken

    def mark_broken(self, error: BaseException) -> NoReturn:
        """Raise ``error``, and make the cache unusable until :meth:`mend` is called."""
        self._broken = error
        raise error

    def mend(self) -> None:
        """Make the cache usable again; all layers must be empty. Deletes stored chunks that an interrupt left without a layer."""
        self.cache.clear()
        kept = {chunk.name for chunks in self.chunks for chunk in chunks}
        for name in self.store.names():
            if name not in kept:
                self.store.delete(name)
        self.release_whole()
        self._broken = None

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Start writing the keys and values of consecutive positions, as a new chunk at the end of the layer.

        Blocks only while memory has to be freed for the chunk.
        """
        chunk = KVChunk(f"{layer}/{next(self._names)}", start, start + keys.shape[2], KVShape.of(keys, values), keys.device)
        self.cache.create(chunk)
        chunk.created_on = None
        for mine, theirs in zip(chunk.form.pair(chunk.memory.buffer, keys.shape[2]), (keys, values), strict=True):
            mine.copy_(theirs)
        self.cache.release([chunk], changed=True)
        self.cache.raise_failure()  # that it could not be started, say
        self.chunks[layer].append(chunk)

    def expect(self, layer: int) -> None:
        """Start reading the chunks of a layer, and then those of the ``prefetch`` layers after it, as far as there is room."""
        after = range(layer, layer + min(self._prefetch + 1, len(self.chunks)))
        ahead = itertools.chain.from_iterable(self.chunks[index % len(self.chunks)] for index in after)
        self.cache.expect(Use(chunk, self._memory.reading) for chunk in ahead)

    def read(self, chunk: KVChunk, device: torch.device, use: Callable[[Pair], None]) -> None:
        """Wait for a chunk, and call ``use`` with its keys and values on the CPU. Also starts further expected reads.

        Args:
            chunk: The chunk.
            device: Device to which ``use`` copies the chunk; the copy may still be running on its current stream afterwards.
            use: Called once with the keys and values as they were written. It must keep no reference to them.

        Raises:
            OSError: The error of the read, naming the file, or of an earlier write.
        """
        self.cache.acquire([chunk])
        try:
            buffer = chunk.memory.buffer.cpu()  # waits for the device, where the chunk has just been written from its memory
            use(chunk.form.pair(buffer, chunk.end - chunk.start))
        finally:
            chunk.copied_to = device
            self.cache.release([chunk])

    def delete(self, layer: int, index: int) -> None:
        """Delete one of the layer's chunks from the drive."""
        chunk = self.chunks[layer].pop(index)
        self.cache.discard(chunk)
        if chunk.name in self.store:  # it may not have been written
            self.store.delete(chunk.name)

    def whole(self, form: KVShape, positions: int, device: torch.device) -> Pair:
        """Return memory for all keys and values of a layer that attention sees, with undefined contents.

        The memory that the previous call returned is released.

        Args:
            form: Shape of the layer's keys and values.
            positions: Number of positions.
            device: Device of the memory. On the CPU it is pinned, and reused once no view of it exists any more.

        Returns:
            Keys and values, each [batch, heads, positions, dim].
        """
        nbytes = form.position_bytes * positions
        size = padded(nbytes, max(1 << nbytes.bit_length() >> _GROWTH, ALIGNMENT))
        self.release_whole()
        on_device = device.type != "cpu"
        reading = max(self._prefetch * nbytes, _ROOM * max(CHUNK_BYTES, form.position_bytes))
        # Not below what is held: it would be dropped, and read again.
        self._memory.make_room(max(reading, self.cache.used), beside=0 if on_device else size)
        if on_device:
            return form.pair(torch.empty(size, dtype=torch.uint8, device=device), positions)
        self._whole = self._memory.lease(size)
        return form.pair(self._whole.buffer, positions)

    def release_whole(self) -> None:
        """Release the memory of :meth:`whole`. It is reused once no view of it exists any more."""
        if self._whole is not None:
            self._whole.release()
            self._whole = None

    def close(self) -> None:
        """Wait for I/O in flight, and remove the files. Idempotent."""
        self._closed = True
        self.cache.clear()
        self.release_whole()
        with contextlib.suppress(OSError):  # of writes, whose bytes nobody wants any more
            self.store.close()
        remove_directories(self._directories)
        self.engine.close()
        self.pool.trim()


class _Chunks:
    """Transfers chunks between the block cache and a store."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store

    def read(self, block: Block, buffer: torch.Tensor) -> Transfer:
        """Start filling the buffer with a chunk of the store."""
        return self._store.get(block.name, out=buffer)

    def write(self, block: Block, buffer: torch.Tensor) -> Transfer:
        """Start storing the buffer as a chunk, under the block's name."""
        return self._store.put(block.name, buffer)


class _ChunkMemory:
    """Memory for the chunks in the block cache: bytes for read-ahead, set by :meth:`make_room`, and 16 MiB for writes."""

    separate_residents = False

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool
        self.reading = 0
        self.limit = _WRITING

    def make_room(self, reading: int, beside: int) -> None:
        """Set the bytes for read-ahead, and the pool's budget: these, 16 MiB for writes, and ``beside`` for other leases."""
        self.reading = reading
        self.limit = reading + _WRITING
        self.pool.set_budget(self.limit + beside)

    def take(self, block: Block) -> Memory | None:
        """Return memory for a chunk, on the device where it is created; None if the pool has no room. Never waits."""
        assert isinstance(block, KVChunk)
        if block.created_on is not None:
            return OwnMemory(torch.empty(block.nbytes, dtype=torch.uint8, device=block.created_on))
        lease = self.pool.try_lease(block.nbytes)
        return None if lease is None else _ChunkLease(lease, block)

    def grow(self, block: Block, held: Sequence[Memory]) -> Memory:
        """Return memory for a chunk, even beyond the limit."""
        assert isinstance(block, KVChunk)
        return _ChunkLease(self.lease(block.nbytes), block)

    def lease(self, nbytes: int) -> Lease:
        """Lease memory from the pool. Raises the pool's budget if leased memory that callers keep leaves no room."""
        lease = self.pool.try_lease(nbytes)
        if lease is None:
            self.pool.set_budget(self.pool.in_use + 2 * padded(nbytes))
            lease = self.pool.lease(nbytes)
        return lease


class _ChunkLease:
    """Leased host memory of a chunk. A device may still be copying from it when it is released."""

    def __init__(self, lease: Lease, chunk: KVChunk) -> None:
        self._lease, self._chunk = lease, chunk
        self.nbytes = lease.nbytes

    @property
    def buffer(self) -> torch.Tensor:
        """The memory as a one-dimensional uint8 tensor."""
        return self._lease.buffer

    def release(self) -> None:
        """Release the lease, after the device's copy from it has finished if there is one. Never blocks."""
        device, self._chunk.copied_to = self._chunk.copied_to, None
        self._lease.release(after=Computed(device) if device is not None and device.type == "cuda" else None)


_INTERRUPTED = KeyboardInterrupt("a change was interrupted")


def _without_traceback(error: BaseException) -> BaseException:
    """Return an equivalent error without a traceback, which would keep the memory of all calling frames alive."""
    return copy.copy(error) if isinstance(error, OSError) else RuntimeError(f"{type(error).__name__}: {error}")
