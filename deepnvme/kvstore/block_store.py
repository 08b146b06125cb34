"""The store of blocks by key, and the futures of its puts and gets.

Each drive has one preallocated file: a header, a record of 128 bytes for each slot, and the slots, which begin at multiples of
4096 bytes. A block lies in one slot; its record has its key, its length and the CRC-32 of key and block.

1. A put writes its new blocks by direct I/O, side by side where slots are neighbours, and computes their checksums meanwhile.
   Then it writes their records, and only then are they found.
2. Before a slot is used for another block, its record is cleared. So a killed process leaves whole blocks, and no others.
3. A get compares the checksum of each block before it counts as a hit, whatever a power cut or a drive did to the file.
4. The index is in memory (``csrc/kvstore/block_index.h``): 54 bytes for each slot, rebuilt from the records when a store
   is opened. It evicts as ARC does, and nothing that is pinned, being read or being written.
5. Four threads in C++ run puts and gets without the GIL (``csrc/kvstore/block_store.h``). Python keeps the memory until they end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from deepnvme._interrupts import defer_interrupts
from deepnvme.drives.profiles import engine_for
from deepnvme.engine import Engine
from deepnvme.files.directory_lock import DirectoryLock, DirectoryOwner, lock_directories
from deepnvme.ops import load_async_io
from deepnvme.store.volumes import Directory, as_directories
from deepnvme.telemetry.descriptions import path_list, representation, size_for_people, state_text
from deepnvme.telemetry.report_figures import ReportFigures
from deepnvme.telemetry.sizes import ByteCount, byte_count

from .block_files import FILE_NAME, FileLayout, layout_for, prepare_file
from .block_memory import BlockMemory, Blocks

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig
    from deepnvme.ops.aio.async_io_op.kvstore import BlockStore as NativeStore
    from deepnvme.ops.aio.async_io_op.kvstore import Job

_PATIENCE_AT_EXIT = 3.0
"""Seconds until the exit says what it waits for, as that of an engine does."""
_lost_memory: list[BlockMemory] = []
"""Memory that the system may still use, though the transfer has ended with an error: kept for good."""


@dataclass(frozen=True)
class BlockStoreStats(ReportFigures):
    """Counters of a store since it was opened, and its state now. ``as_dict()`` returns the numbers."""

    hits: int
    """Blocks that gets have returned."""
    misses: int
    """Blocks that gets did not return."""
    corrupt: int
    """Misses because a block did not match its checksum, or its file was cut off. The block is forgotten."""
    read_errors: int
    """Misses because the drive could not read the block."""
    stored: int
    """Blocks that puts have written."""
    duplicates: int
    """Blocks of puts that were stored already, or being stored by another put."""
    refused: int
    """Blocks of puts for which there was no slot: all other blocks were pinned, being read or being written."""
    write_errors: int
    """Blocks that could not be written, and deletions that could not be recorded."""
    evictions: int
    """Blocks evicted for others."""
    bytes_written: int
    """Bytes of the blocks that puts have written."""
    bytes_read: int
    """Bytes of the blocks that gets have returned."""
    slots: int
    """Blocks that the files have room for."""
    used: int
    """Slots with a block that is stored or being written."""
    pinned: int
    """Blocks that are pinned."""
    set_aside: int
    """Slots not used any more, because the drive failed there. They are tried again when the store is opened again."""
    index_bytes: int
    """Bytes of memory that the index takes."""
    last_error: str
    """The last error of a drive, with file and offset; empty if there was none."""


class BlocksFuture:
    """The future flags of a put or get. Keeps the store open until it is dropped.

    When :meth:`done` is True, the memory of the blocks may be changed again.
    """

    def __init__(self, store: BlockStore, job: Job) -> None:
        self._store, self._job = store, job

    def __repr__(self) -> str:
        return representation(self, lambda: "done" if self.done() else "under way")

    def done(self) -> bool:
        """Return whether the put or get has ended. Never blocks. Raises RuntimeError in a forked child."""
        if self._job.done:
            _forget(self._store._under_way, self._job)
            return True
        return False

    def result(self, timeout: float | None = None) -> list[bool]:
        """Wait, and return a flag for each key, in the order of the call: whether its block is stored, or was read.

        Errors of drives are no errors here: the block counts as not stored, or as a miss, and ``stats()`` counts them.

        Args:
            timeout: Seconds to wait; None waits for as long as it takes. Ctrl-C interrupts the waiting, not the transfers.

        Raises:
            TimeoutError: After ``timeout``. The transfers go on, and use the memory of the blocks.
        """
        if not self._job.wait(math.inf if timeout is None else timeout):
            raise TimeoutError(f"the blocks of {self._store!r} have not all been transferred within {timeout} s")
        _forget(self._store._under_way, self._job)
        return self._job.flags


class BlockStore:
    """Blocks of bytes by key, in a bounded space on one or several drives. Survives crashes, and never returns a wrong byte.

    >>> store = deepnvme.kvstore.BlockStore("/mnt/nvme/kv", capacity="200GB", block_bytes=1 << 20)
    >>> store.put_many(keys, blocks).result()
    >>> hits = store.get_many(keys, out).result()

    A key names its content: a put of a key that is stored, or that another put is storing, writes nothing and returns what that
    put returned. To replace a block, delete it first. A get finds the blocks whose put is done. A put, delete or eviction beside
    a get does not change what the get returns.

    When the space is full, blocks that were used seldom or long ago are evicted, but none that is pinned or being read.

    After a crash of the process the store has all blocks whose put was done. A power cut can lose the blocks of the last
    half minute, and deletions.

    Blocks can be private: they are what users have asked a model. The files can be read by their owner only (0600); whoever can
    read the drive can read the blocks. All who use the store share its blocks; keys of tenants who must not be told which blocks
    others have stored need a secret of each tenant in them.

    Thread-safe. In a forked child every method raises RuntimeError.

    Args:
        path: A directory, or several on different drives, which get equal shares. Created if they are missing. Locked by one
            store, unless ``read_only``.
        capacity: Most bytes of all files together, or a size such as "200GB". They are reserved at once. None for the files that
            are there.
        block_bytes: Most bytes of a block, or a size such as "1MiB". None for that of the files that are there.
        fingerprint: Text that says what the blocks are of, such as the model, its revision, the dtype and the layout of the
            server's cache. Files with another fingerprint are refused.
        read_only: Read the blocks that are stored when this store is opened, also beside the process that writes. Later blocks
            are found after :meth:`refresh`. A block that is evicted meanwhile is a miss.
        engine: An engine to share; None for an engine of the store's own.
        aio_config: Settings of the store's own engine; None for the profile of the drive.

    Raises:
        StoreLocked: If another store, which the message names, has a directory.
        TypeError: If ``fingerprint`` is no text.
        ValueError: If a file was made with another capacity, block size or fingerprint, only one of ``capacity`` and
            ``block_bytes`` is given, no block fits, or both ``engine`` and ``aio_config`` are given.
        FileNotFoundError: If a file is missing, and ``read_only`` is set or ``capacity`` is None.
        OSError: With ENOSPC if a drive has too little space; with EBADMSG if a file's header is damaged. Naming the file.
    """

    def __init__(
        self,
        path: Directory | Sequence[Directory],
        capacity: ByteCount | None = None,
        block_bytes: ByteCount | None = None,
        *,
        fingerprint: str = "",
        read_only: bool = False,
        engine: Engine | None = None,
        aio_config: AioConfig | None = None,
    ) -> None:
        if engine is not None and aio_config is not None:
            raise ValueError("aio_config is for the store's own engine: give either engine or aio_config")
        if (capacity is None) != (block_bytes is None):
            raise ValueError("capacity and block_bytes belong together: give both, or neither for the files that are there")
        if not isinstance(fingerprint, str):
            raise TypeError(f"fingerprint must be a text, got {type(fingerprint).__name__}")
        self._process = os.getpid()
        self._paths = as_directories(path)
        wanted = None
        if capacity is not None and block_bytes is not None:
            sizes = byte_count(capacity, "capacity"), len(self._paths), byte_count(block_bytes, "block_bytes")
            wanted = layout_for(*sizes, fingerprint)
        self._read_only = read_only
        self._under_way: dict[Job, BlockMemory] = {}
        stack = contextlib.ExitStack()
        try:
            locks: list[DirectoryLock] = []
            stack.callback(_release, locks)
            if not read_only:
                with defer_interrupts():
                    lock_directories(self._paths, DirectoryOwner("BlockStore"), locks)
            self._layout = self._prepare(wanted, fingerprint)
            self._engine = engine_for(self._paths, aio_config) if engine is None else engine
            if engine is None:
                stack.callback(self._engine.close)
            self._native: NativeStore = load_async_io().kvstore.BlockStore(
                engine=self._engine._native,
                paths=[str(each / FILE_NAME) for each in self._paths],
                block_bytes=self._layout.block_bytes,
                slot_bytes=self._layout.slot_bytes,
                records_begin=self._layout.records_begin,
                blocks_begin=self._layout.blocks_begin,
                slots=self._layout.slots,
                read_only=read_only,
            )
            stack.callback(self._native.close)
            self._end = weakref.finalize(self, _end, self._process, stack, self._under_way)
            # Exit handlers run in reverse order: before that of the engine, which puts still need.
            atexit.register(_end_at_exit, self._end, self._process, self._under_way)
        except BaseException:
            with defer_interrupts():
                stack.close()
            raise

    def _prepare(self, wanted: FileLayout | None, fingerprint: str) -> FileLayout:
        """Make or check the file of each directory, and return the layout that all have in common."""
        create = wanted is not None and not self._read_only
        for directory in self._paths:
            found = prepare_file(directory, wanted, self._read_only, create)
            if wanted is None and found.fingerprint != fingerprint:
                raise ValueError(f"'{directory / FILE_NAME}' has the fingerprint {found.fingerprint!r}, not {fingerprint!r}")
            wanted = found
        assert wanted is not None  # there is at least one directory
        return wanted

    # Transfers.

    def put_many(
        self, keys: Sequence[bytes], blocks: Blocks, index: Iterable[int] | None = None, *, event_fd: int | None = None
    ) -> BlocksFuture:
        """Start storing blocks; return at once.

        Args:
            keys: The keys, each of at most 64 bytes.
            blocks: Tensors on the CPU or buffers, one for each key; or one tensor or buffer whose rows along the first dimension
                are the blocks. Each block is contiguous and has 1 to ``block_bytes`` bytes. Memory at multiples of 4096 bytes,
                as that of :meth:`deepnvme.Engine.empty_pinned`, is written in place, other memory is copied. Not to be
                changed, freed or resized until the future is done.
            index: Numbers of the rows of ``blocks`` to store, one for each key.
            event_fd: Descriptor of an ``eventfd``, to which 1 is added when the future is done. The caller may close it before.

        Returns:
            A future. Its flags say which keys are stored. Blocks that could not be written, or for which there was no slot, are
            not; of the latter the last keys of the call.

        Raises:
            TypeError: If a key is not bytes, a block neither a tensor nor a buffer of numbers, or ``index`` has
                other numbers than integers.
            ValueError: If there are not as many blocks as keys, a key or block is too long, a block is empty, not contiguous or
                not on the CPU, or the store is closed or read-only.
            IndexError: If ``blocks`` has no row with a number of ``index``.
        """
        return self._submit(keys, BlockMemory(blocks, index, writable=False), False, event_fd)

    def get_many(
        self, keys: Sequence[bytes], out: Blocks, index: Iterable[int] | None = None, *, event_fd: int | None = None
    ) -> BlocksFuture:
        """Start reading blocks; return at once.

        Args:
            keys: The keys.
            out: Memory for the blocks, as for :meth:`put_many`. A block is read if it has as many bytes as its memory; a block of
                another length is a miss. Not to be touched until the future is done. The memory of a miss then has any bytes.
            index: Numbers of the rows of ``out`` to read into, one for each key.
            event_fd: As for :meth:`put_many`.

        Returns:
            A future. Its flags say which keys were hits.

        Raises:
            TypeError, ValueError, IndexError: As for :meth:`put_many`, and ValueError if memory is read-only.
        """
        return self._submit(keys, BlockMemory(out, index, writable=True), True, event_fd)

    def _submit(self, keys: Sequence[bytes], memory: BlockMemory, read: bool, event_fd: int | None) -> BlocksFuture:
        """Start a put or get, and keep its memory until it has ended."""
        if isinstance(keys, bytes):
            raise TypeError("keys must be a sequence of bytes, got one key: give [key]")
        for nbytes in set(memory.lengths):
            if not 1 <= nbytes <= self._layout.block_bytes:
                raise ValueError(f"a block of this store has 1 to {self._layout.block_bytes} bytes, got {nbytes}")
        native = self._open(writable=not read)
        for ended in [job for job in list(self._under_way) if job.done]:  # whose futures nobody has asked
            _forget(self._under_way, ended)
        with defer_interrupts():  # the memory of a job that was submitted must be kept
            job = native.submit(read, keys, memory.addresses, memory.lengths, -1 if event_fd is None else event_fd)
            self._under_way[job] = memory
        return BlocksFuture(self, job)

    # Keys.

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether each key is stored, without counting it as used. Does not read the drive."""
        return self._open().contains(keys)

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Count keys as used now, so that they are evicted later. Returns whether each is stored."""
        return self._open().touch(keys)

    def pin(self, keys: Sequence[bytes]) -> list[bool]:
        """Keep blocks from being evicted or deleted until :meth:`unpin` was called as often. Returns whether each is stored.

        Pins end when the store is closed, and a block that turns out to be damaged loses them. Raises ValueError if the store is
        read-only: the process that writes evicts.
        """
        return self._open(writable=True).pin(keys)

    def unpin(self, keys: Sequence[bytes]) -> list[bool]:
        """Take back one :meth:`pin` of each key. Returns whether each had one."""
        return self._open(writable=True).unpin(keys)

    def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove blocks. Returns which were removed: those that were stored and not pinned.

        Gets that have begun still return them. A put of the key that is under way is not affected. If the drive fails, which
        ``stats()`` counts in ``write_errors``, a block can be there again when the store is opened again.

        Raises:
            ValueError: If the store is read-only.
        """
        return self._open(writable=True).remove(keys)

    def clear(self) -> int:
        """Remove all blocks that are not pinned, and return how many. Raises ValueError if the store is read-only."""
        return self._open(writable=True).clear()

    def refresh(self) -> None:
        """Find the blocks that another process has stored since: read all records again. Blocks for the drive.

        Raises:
            ValueError: If the store is not read-only: it has written all blocks itself.
        """
        if not self._read_only:
            raise ValueError("only a read-only store has blocks of another process to find")
        self._open().refresh()

    def _open(self, writable: bool = False) -> NativeStore:
        """Return the store in C++. Raises ValueError if it is closed, or read-only and has to be ``writable``."""
        self._check_process()
        if self.closed:
            raise ValueError("the store is closed")
        if writable and self._read_only:
            raise ValueError("the store is open for reading only")
        return self._native

    # State.

    @property
    def block_bytes(self) -> int:
        """Most bytes of a block."""
        return self._layout.block_bytes

    @property
    def fingerprint(self) -> str:
        """What the blocks are of."""
        return self._layout.fingerprint

    @property
    def directories(self) -> tuple[Path, ...]:
        """Absolute paths of the store's directories."""
        return tuple(self._paths)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called. Never blocks."""
        return not self._end.alive

    def stats(self) -> BlockStoreStats:
        """Return counters since the store was opened. Never blocks on a drive. Raises ValueError if the store is closed."""
        figures = self._native.figures()
        return BlockStoreStats(**{field.name: figures[field.name] for field in fields(BlockStoreStats)})

    def close(self) -> None:
        """Wait for all puts and gets, flush the records to stable storage, and release the directories. Idempotent.

        Ctrl-C interrupts the waiting, and leaves the store open. Dropping the store and the interpreter's exit close it, too. At
        exit Ctrl-C gives the store up.

        Raises:
            OSError: If a drive does not take the records: a power cut can lose their blocks. The store is closed all the same.
        """
        self._check_process()
        for job in list(self._under_way):
            job.wait(math.inf)
        with defer_interrupts():
            self._end()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("the store is the parent process's: a forked child cannot use it")

    def __enter__(self) -> BlockStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return representation(
            self,
            lambda: f"in {path_list(self._paths)}",
            lambda: f"blocks of {size_for_people(self.block_bytes)}",
            lambda: "" if self._process != os.getpid() else f"{self.stats().used} of {self.stats().slots} slots used",
            lambda: "read-only" if self._read_only else "",
            lambda: state_text(self._process == os.getpid() and self.closed, self._process),
        )


def _release(locks: list[DirectoryLock]) -> None:
    for lock in locks:
        lock.release()


def _end(process: int, stack: contextlib.ExitStack, under_way: dict[Job, BlockMemory]) -> None:
    """Close a store, unless this is a forked child. ``under_way`` keeps the memory of jobs until they have ended."""
    if process != os.getpid():
        return
    with defer_interrupts():
        try:
            stack.close()
        finally:
            for job in list(under_way):
                _forget(under_way, job)


def _end_at_exit(end: weakref.finalize[..., BlockStore], process: int, under_way: dict[Job, BlockMemory]) -> None:
    """Close a store at the interpreter's exit, unless Ctrl-C interrupts the waiting for a drive that hangs.

    The store is given up then, with all that its threads use. The engine, whose exit handler comes next, ends the process.
    """
    if process == os.getpid():
        try:
            for job in list(under_way):
                if not job.wait(_PATIENCE_AT_EXIT):
                    print("deepnvme: waiting at exit for puts and gets of blocks; Ctrl-C gives them up", file=sys.stderr)
                    job.wait(math.inf)
        except KeyboardInterrupt:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(end.detach()))  # never freed: to end the threads would wait for the drive
            return
    end()


def _forget(under_way: dict[Job, BlockMemory], job: Job) -> None:
    """Let go of the memory of a job that has ended."""
    memory = under_way.get(job)
    if memory is not None and job.memory_lost:
        _lost_memory.append(memory)
    under_way.pop(job, None)
