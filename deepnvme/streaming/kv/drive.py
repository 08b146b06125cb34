"""The part of a KV cache that is on a drive: chunks of positions, read in the order in which layers will need them."""

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
from deepnvme.drives.profiles import engine_for
from deepnvme.engine import Engine
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
"""Bytes of keys and values that are written together: enough for a drive's full speed, and little to keep back in memory."""
_WRITING = 16 << 20
"""Bytes that are being written at a time: enough to keep a drive busy."""
_ROOM = 4
"""Chunks that are read at a time at least, however short the layers are."""
_GROWTH = 4
"""Memory for a layer is taken in steps of a sixteenth to an eighth (2 ** -4 of the next power of two): it is another position
longer each time, and pinning takes 0.3 s for a GB."""


class KVChunk(Block):
    """Positions of a layer on the drive. They never change there.

    Args:
        name: Name of the chunk in the store.
        start: The first position.
        end: The position after the last.
        form: Shape of the keys and values, as they are written.
        device: The device that they are on.
    """

    __slots__ = ("copied_to", "created_on", "end", "form", "rows", "start")

    def __init__(self, name: str, start: int, end: int, form: KVShape, device: torch.device) -> None:
        super().__init__(name, (end - start) * form.position_bytes)
        self.start = start
        self.end = end
        self.form = form
        self.rows: torch.Tensor | None = None
        """Which row of the batch each of the cache's rows is; None while they are the same."""
        # A device's tensor is written as its stream leaves it: the store sees to that.
        self.created_on = None if device.type == "cpu" else device
        """The device whose memory the chunk is created in; None for host memory, and once it was created."""
        self.copied_to: torch.device | None = None
        """The device that the chunk's host memory is copied to, perhaps after its use has ended."""

    def select_rows(self, rows: torch.Tensor) -> None:
        """Select and reorder the cache's rows. Nothing changes on the drive."""
        self.rows = rows if self.rows is None else self.rows[rows]


class KVDrive:
    """The chunks of all layers on the drive, and the memory through which they are read and written.

    Memory: one layer as attention sees it, chunks of ``prefetch`` layers that are being read, and 16 MiB that are being written.
    More only while somebody keeps tensors that were returned.

    Args:
        path: Where a directory of the cache's own is made; None for a cache with all layers in memory.
        layers: Number of layers.
        prefetch: Number of layers whose chunks are read ahead.
        config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.
            Not without a path.
    """

    def __init__(self, path: str | os.PathLike[str] | None, layers: int, prefetch: int, config: AioConfig | None = None) -> None:
        self.chunks: list[list[KVChunk]] = [[] for _ in range(layers)]
        """The chunks of each layer, in the order of their positions."""
        self.engine = Engine() if path is None else engine_for([path], config)
        """Without a path it only pins memory."""
        self._prefetch = prefetch
        self.pool = BufferPool(_WRITING)
        self._memory = _ChunkMemory(self.pool)
        self._names = itertools.count()
        self._whole: Lease | None = None
        self._shown: tuple[int, Pair] | None = None  # the layer that the memory of whole() is filled with: its keys and values
        self._closed = False
        self._process = os.getpid()
        self._broken: BaseException | None = None
        self.store: TensorStore | None = None
        """The store of the chunks; None for a cache with all layers in memory."""
        self._directories: list[Path] = []
        if path is not None:
            self.store, self._directories = open_own_store(
                [Path(path)], "deepnvme-kv", self.engine, DirectoryOwner("OffloadedCache")
            )
        self.cache = BlockCache(_Chunks(self.store), self._memory, retain=False, retain_written=False, write_bytes=_WRITING)
        """The chunks that are in memory: in use, read ahead, or being written."""

    @contextlib.contextmanager
    def changing(self, layer: int | None = None) -> Iterator[None]:
        """Surround what changes a layer. After an error in it layers may differ in their positions, and cannot be used.

        Args:
            layer: If the memory of :meth:`whole` is filled with this layer, it is released.

        Raises:
            RuntimeError: On entering after an error, which is its cause, until :meth:`mend`.
            ValueError: On entering after :meth:`close`.
        """
        self.check()
        self._broken = _INTERRUPTED  # from here to the end, whatever interrupts it
        try:
            if self._shown is not None and self._shown[0] == layer:
                self.release_whole()
            yield
        except GeneratorExit:  # the caller was interrupted before the change began, and dropped this later
            raise
        except BaseException as error:
            self._broken = _without_traceback(error)
            raise
        self._broken = None

    def state(self) -> str:
        """State for ``repr``: "closed", "broken off", "of process ...", or ""."""
        return state_text(self._closed, self._process) or ("broken off" if self._broken is not None else "")

    def check(self) -> None:
        """Raise what :meth:`changing` raises on entering."""
        if self._closed:
            raise ValueError("the cache is closed")
        broken = self._broken
        if broken is not None:
            text = f"the cache is not whole any more, since {type(broken).__name__}: {broken}: reset() it, or make another"
            raise RuntimeError(text) from broken

    def break_off(self, error: BaseException) -> NoReturn:
        """Raise an error, after which the layers cannot be used until :meth:`mend`."""
        self._broken = error
        raise error

    def mend(self) -> None:
        """Make the drive usable again when all layers are empty. Deletes chunks that an interrupt has left without a layer."""
        self.cache.clear()
        if self.store is not None:
            kept = {chunk.name for chunks in self.chunks for chunk in chunks}
            for name in self.store.names():
                if name not in kept:
                    self.store.delete(name)
        self.release_whole()
        self._broken = None

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Start writing positions as the layer's last chunk. Blocks only while memory for it has to be freed.

        Args:
            layer: Number of the layer.
            start: The first position.
            keys: Keys of the positions, [batch, heads, positions, dim], on any device. Copied: they may change afterwards.
            values: Values of the positions, likewise.

        Raises:
            OSError: With ENOSPC, naming the directory; or the error of an earlier write.
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
        """Start reading the layer's chunks, and then those of the layers after it, as far as there is room."""
        after = range(layer, layer + min(self._prefetch + 1, len(self.chunks)))
        ahead = itertools.chain.from_iterable(self.chunks[index % len(self.chunks)] for index in after)
        self.cache.expect(Use(chunk, self._memory.reading) for chunk in ahead)

    def read(self, chunk: KVChunk, device: torch.device, use: Callable[[Pair], None]) -> None:
        """Call ``use`` with the chunk's keys and values as they were written, on the CPU. Waits for them, and starts later reads.

        Args:
            chunk: The chunk.
            device: Where ``use`` copies them; a copy enqueued on its current stream may go on afterwards.
            use: Is called once. May not keep what it is given.

        Raises:
            OSError: Naming the file; also the error of an earlier write.
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
        assert self.store is not None
        chunk = self.chunks[layer].pop(index)
        self.cache.discard(chunk)
        if chunk.name in self.store:  # it may not have been written
            self.store.delete(chunk.name)

    def whole(self, form: KVShape, positions: int, device: torch.device) -> Pair:
        """Return memory for a layer as attention sees it, with undefined contents. It replaces that of the last call.

        Args:
            form: Shape of the layer's keys and values.
            positions: Number of positions.
            device: Where the memory is to be. On the CPU it is pinned, and lent again when nobody has a view of it any more.

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

    def show(self, layer: int, gather: Callable[[], Pair]) -> Pair:
        """Return a layer's keys and values in the memory of :meth:`whole`, which ``gather`` fills if they are not there yet."""
        if self._shown is None or self._shown[0] != layer:
            with self.changing():
                self._shown = layer, gather()
        return self._shown[1]

    def release_whole(self) -> None:
        """Release the memory of :meth:`whole`: it is used again when nobody has a view of it."""
        self._shown = None
        if self._whole is not None:
            self._whole.release()
            self._whole = None

    def close(self) -> None:
        """Wait for I/O in flight, and remove the files. Idempotent."""
        self._closed = True
        self.cache.clear()
        self.release_whole()
        if self.store is not None:
            with contextlib.suppress(OSError):  # of writes, whose bytes nobody wants any more
                self.store.close()
            remove_directories(self._directories)
        self.engine.close()
        self.pool.trim()


class _Chunks:
    """Reads and writes chunks in a store; None if all layers are in memory, because then there are no chunks."""

    def __init__(self, store: TensorStore | None) -> None:
        self._store = store

    def read(self, block: Block, buffer: torch.Tensor) -> Transfer:
        """Start filling the buffer with a chunk of the store."""
        assert self._store is not None
        return self._store.get(block.name, out=buffer)

    def write(self, block: Block, buffer: torch.Tensor) -> Transfer:
        """Start storing the buffer as a chunk, under the block's name."""
        assert self._store is not None
        return self._store.put(block.name, buffer)


class _ChunkMemory:
    """Memory for chunks: ``reading`` bytes for chunks that are read ahead, and 16 MiB for chunks that are written."""

    separate_residents = False

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool
        self.reading = 0
        self.limit = _WRITING

    def make_room(self, reading: int, beside: int) -> None:
        """Set the bytes for reading ahead, and the bytes of the pool that are leased for other things."""
        self.reading = reading
        self.limit = reading + _WRITING
        self.pool.set_budget(self.limit + beside)

    def take(self, block: Block) -> Memory | None:
        """Return memory for a chunk, on the device that produces it; None if the pool has no room. Never waits."""
        assert isinstance(block, KVChunk)
        if block.created_on is not None:
            return OwnMemory(torch.empty(block.nbytes, dtype=torch.uint8, device=block.created_on))
        lease = self.pool.try_lease(block.nbytes)
        return None if lease is None else _Staged(lease, block)

    def grow(self, block: Block, held: Sequence[Memory]) -> Memory:
        """Return memory for a chunk, beyond the limit if need be."""
        assert isinstance(block, KVChunk)
        return _Staged(self.lease(block.nbytes), block)

    def lease(self, nbytes: int) -> Lease:
        """Lease memory, beyond the pool's budget if somebody keeps what was lent."""
        lease = self.pool.try_lease(nbytes)
        if lease is None:
            self.pool.set_budget(self.pool.in_use + 2 * padded(nbytes))
            lease = self.pool.lease(nbytes)
        return lease


class _Staged:
    """Host memory of a chunk, which a device may be copying when it is released."""

    def __init__(self, lease: Lease, chunk: KVChunk) -> None:
        self._lease, self._chunk = lease, chunk
        self.nbytes = lease.nbytes

    @property
    def buffer(self) -> torch.Tensor:
        """The memory as a one-dimensional uint8 tensor."""
        return self._lease.buffer

    def release(self) -> None:
        """Give the memory back, after the device has copied it if it does."""
        device, self._chunk.copied_to = self._chunk.copied_to, None
        self._lease.release(after=Computed(device) if device is not None and device.type == "cuda" else None)


_INTERRUPTED = KeyboardInterrupt("a change was interrupted")


def _without_traceback(error: BaseException) -> BaseException:
    """Return an error like this one without its traceback, which would keep the memory of all callers."""
    return copy.copy(error) if isinstance(error, OSError) else RuntimeError(f"{type(error).__name__}: {error}")
