"""The part of a KV cache that is on a drive: chunks of positions, read in the order in which layers will want them."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch

from deepnvme.engine import Engine
from deepnvme.memory.alignment import ALIGNMENT, padded
from deepnvme.memory.device_event import Computed
from deepnvme.memory.host import empty_aligned
from deepnvme.memory.lease import Ending, Lease
from deepnvme.memory.pool import BufferPool
from deepnvme.store.directory_lock import StoreLocked
from deepnvme.store.futures import StoreFuture
from deepnvme.store.tensor_store import TensorStore

from .memory import KVShape, Pair

CHUNK_BYTES = 2 << 20
"""Keys and values of so many bytes are written together: that reaches a drive's pace, and keeps little of a layer back."""
_WRITING = 16 << 20
"""Bytes that are being written at a time: enough to keep a drive busy."""
_ROOM = 4
"""Chunks that are read at a time at least, however short the layers are."""
_GROWTH = 4
"""Memory for a layer is taken in steps of a sixteenth to an eighth (2 ** -4 of the next power of two): it is another position
longer each time, and pinning takes 0.3 s for a GB."""


@dataclass(eq=False)
class KVChunk:
    """Positions of a layer on the drive. They never change there."""

    name: str
    start: int
    end: int
    form: KVShape
    """As they were written."""
    rows: torch.Tensor | None = None
    """Which row of the batch each of the cache's rows is; None while they are the same."""

    @property
    def nbytes(self) -> int:
        return (self.end - self.start) * self.form.position_bytes


class KVDrive:
    """The chunks of all layers, and the memory through which they come and go.

    ``path``: where a directory of its own is made; None for a cache that has nothing on a drive. ``layers``: how many there are.
    ``prefetch``: for how many layers chunks are read ahead.

    Memory: one layer as attention sees it, the chunks of ``prefetch`` layers that are being read, 16 MiB that are being written.
    More only where somebody keeps what he was given.
    """

    def __init__(self, path: str | os.PathLike[str] | None, layers: int, prefetch: int) -> None:
        self.chunks: list[list[KVChunk]] = [[] for _ in range(layers)]
        """By layer, in the order of their positions."""
        self.bytes_read = 0
        self.bytes_written = 0
        self.seconds_waited = 0.0
        self.engine = Engine()
        self._prefetch = prefetch
        self._pool = BufferPool(0)
        self._names = itertools.count()
        self._reading: dict[KVChunk, tuple[Lease, StoreFuture[torch.Tensor]]] = {}
        self._most_reading = 0
        self._ahead: deque[KVChunk] = deque()
        self._writing: deque[StoreFuture[int]] = deque()
        self._whole: Lease | None = None
        self.shown: tuple[int, Pair] | None = None
        """Which layer :meth:`whole` has been made for, and filled with."""
        self._closed = False
        self._broken: BaseException | None = None
        self._store = None if path is None else _open(Path(path), self.engine)

    def changing(self, layer: int | None = None) -> AbstractContextManager[None]:
        """Around what changes a layer: after an error in it layers may not fit each other any more, and nothing uses them.

        ``layer``: whose :meth:`whole` is let go of. Raises RuntimeError on entering after an error, which is its cause, until
        :meth:`mend`; ValueError once closed.
        """
        return _Changing(self, layer)

    def check(self) -> None:
        """Raise what :meth:`changing` raises on entering."""
        if self._closed:
            raise ValueError("the cache is closed")
        broken = self._broken
        if broken is not None:
            text = f"the cache is not whole any more, since {type(broken).__name__}: {broken}: reset() it, or make another"
            raise RuntimeError(text) from broken

    def break_off(self, error: BaseException) -> NoReturn:
        """Raise an error, after which nothing uses the layers until :meth:`mend`."""
        self._broken = error
        raise error

    def mend(self) -> None:
        """All layers are empty. What is on the drive for none of them, after an interrupt say, goes."""
        self._ahead.clear()
        for chunk in list(self._reading):
            self._forget(chunk)
        if self._store is not None:
            kept = {chunk.name for chunks in self.chunks for chunk in chunks}
            for name in self._store.names():
                if name not in kept:
                    self._store.delete(name)
        self._writing.clear()  # whose errors, if any, were of what is not there any more
        self.let_go()
        self._broken = None

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Start writing positions from ``start`` on, as the layer's last chunk. They may change afterwards.

        Raises OSError (ENOSPC) naming the directory, or what an earlier write ended with.
        """
        assert self._store is not None
        chunk = KVChunk(f"{layer}/{next(self._names)}", start, start + keys.shape[2], KVShape.of(keys, values))
        while self._writing and (
            self._writing[0].done() or sum(future.nbytes for future in self._writing) + chunk.nbytes > _WRITING
        ):
            _raise_error(self._writing.popleft())
        # A device's tensor is written as its stream leaves it: the store sees to that.
        lease = self._lease(chunk.nbytes) if keys.is_cpu else None
        memory = torch.empty(chunk.nbytes, dtype=torch.uint8, device=keys.device) if lease is None else lease.buffer
        for mine, theirs in zip(chunk.form.pair(memory, keys.shape[2]), (keys, values), strict=True):
            mine.copy_(theirs)
        future = self._store.put(chunk.name, memory)
        if lease is not None:
            lease.release(after=future)
        self._writing.append(future)
        self.bytes_written += chunk.nbytes
        self.chunks[layer].append(chunk)

    def expect(self, layer: int) -> None:
        """The layer's chunks are wanted now, and then those of the layers after it: start reading, as far as there is room."""
        after = range(layer, layer + min(self._prefetch + 1, len(self.chunks)))
        self._ahead = deque(itertools.chain.from_iterable(self.chunks[index % len(self.chunks)] for index in after))
        for chunk in self._reading.keys() - set(self._ahead):
            self._forget(chunk)
        self._read_on()

    def read(self, chunk: KVChunk, device: torch.device, use: Callable[[Pair], None]) -> None:
        """Have ``use`` see the chunk's keys and values as they were written, on the CPU. Waits for them, and starts what comes
        next.

        ``device``: where they are copied to; a copy that its current stream has been given may go on afterwards. Raises OSError
        naming the file.
        """
        if chunk not in self._reading:
            self._start(chunk)
        try:
            lease, future = self._reading[chunk]
            began = time.perf_counter()
            _raise_error(future)
            self.seconds_waited += time.perf_counter() - began
            use(chunk.form.pair(lease.buffer, chunk.end - chunk.start))
        finally:
            self._forget(chunk, device)
        self._read_on()

    def delete(self, layer: int, index: int) -> None:
        """Give the place of the layer's chunk on the drive back."""
        assert self._store is not None
        self._ahead.clear()
        chunk = self.chunks[layer].pop(index)
        self._forget(chunk)
        self._store.delete(chunk.name)

    def whole(self, form: KVShape, positions: int, device: torch.device) -> Pair:
        """Memory for a layer as attention sees it. What was given before goes to others, unless somebody still has it."""
        nbytes = form.position_bytes * positions
        size = padded(nbytes, max(1 << nbytes.bit_length() >> _GROWTH, ALIGNMENT))
        self._most_reading = max(self._prefetch * nbytes, _ROOM * max(CHUNK_BYTES, form.position_bytes))
        self.let_go()
        if device.type != "cpu":
            self._pool.set_budget(self._most_reading + _WRITING)
            return form.pair(torch.empty(size, dtype=torch.uint8, device=device), positions)
        self._pool.set_budget(size + self._most_reading + _WRITING)
        self._whole = self._lease(size)
        return form.pair(self._whole.buffer, positions)

    def let_go(self) -> None:
        """Of the memory for a layer."""
        self.shown = None
        if self._whole is not None:
            self._whole.release()
            self._whole = None

    def resident(self, device: torch.device, nbytes: int) -> torch.Tensor:
        """Memory for what is not on the drive: pinned where it goes to a device and comes from there."""
        return empty_aligned(nbytes) if device.type == "cpu" else self.engine.empty_pinned(nbytes, torch.uint8)

    def close(self) -> None:
        """Wait for what is under way, and remove the files. Idempotent."""
        self._closed = True
        self._ahead.clear()
        for chunk in list(self._reading):
            self._forget(chunk)
        self.let_go()
        if self._store is not None:
            with contextlib.suppress(OSError):  # of writes, whose bytes nobody wants any more
                self._store.close()
        self.engine.close()
        self._pool.trim()

    def _read_on(self) -> None:
        while self._ahead and (
            self._ahead[0] in self._reading
            or sum(chunk.nbytes for chunk in self._reading) + self._ahead[0].nbytes <= self._most_reading
        ):
            chunk = self._ahead.popleft()
            if chunk not in self._reading:
                self._start(chunk)

    def _start(self, chunk: KVChunk) -> None:
        assert self._store is not None
        lease = self._lease(chunk.nbytes)
        self._reading[chunk] = (lease, self._store.get(chunk.name, out=lease.buffer))
        self.bytes_read += chunk.nbytes

    def _forget(self, chunk: KVChunk, device: torch.device | None = None) -> None:
        """Let go of what was read of it, or is being read, or copied to a device."""
        found = self._reading.pop(chunk, None)
        if found is None:
            return
        lease, future = found
        after: Ending = future
        if device is not None and device.type == "cuda" and future.done():
            after = Computed(device)
        lease.release(after=after)

    def _lease(self, nbytes: int) -> Lease:
        lease = self._pool.try_lease(nbytes)
        if lease is None:  # somebody keeps what he was given
            self._pool.set_budget(self._pool.in_use + 2 * padded(nbytes))
            lease = self._pool.lease(nbytes)
        return lease


class _Changing(AbstractContextManager[None]):
    """See :meth:`KVDrive.changing`. A change counts as broken off from its beginning to its end, whatever interrupts it."""

    def __init__(self, drive: KVDrive, layer: int | None) -> None:
        self._drive = drive
        self._layer = layer

    def __enter__(self) -> None:
        drive = self._drive
        drive.check()
        drive._broken = _INTERRUPTED
        if drive.shown is not None and drive.shown[0] == self._layer:
            drive.let_go()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drive._broken = None if error is None else _without_traceback(error)


_INTERRUPTED = KeyboardInterrupt("a change was interrupted")


def _without_traceback(error: BaseException) -> BaseException:
    """Another like it: its traceback would keep the memory of all callers."""
    return copy.copy(error) if isinstance(error, OSError) else RuntimeError(f"{type(error).__name__}: {error}")


def _raise_error(future: StoreFuture[Any]) -> None:
    """Wait for it. The store keeps its error: what is raised is another, whose traceback would keep the memory of all callers."""
    error = future.exception()
    if error is not None:
        raise copy.copy(error)


def _open(path: Path, engine: Engine) -> TensorStore:
    """In a directory of its own in ``path``: the first that nobody has. What a dead process has left in it goes."""
    for number in itertools.count():
        try:
            return TensorStore(path / f"deepnvme-kv-{number}", engine=engine)
        except StoreLocked:
            continue
    raise AssertionError
