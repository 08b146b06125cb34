"""The public engine for asynchronous tensor I/O: futures, files, pinned tensors and statistics."""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

from deepnvme.telemetry.descriptions import representation, size_for_people, state_text
from deepnvme.telemetry.report_figures import ReportFigures
from deepnvme.telemetry.sizes import ByteCount, byte_count

from .ops import load_async_io

if TYPE_CHECKING:
    import torch

    from .ops.aio.async_io_op import Engine as NativeEngine

__all__ = ["AnySource", "Backend", "Engine", "File", "FileMode", "Future", "Stats"]

Backend = Literal["auto", "io_uring", "libaio", "threads"]
"""Names of the I/O backends, which ``csrc/engine/backend.cpp`` makes; ``"auto"`` for the first that the kernel accepts."""
FileMode = Literal["r", "r+", "rw", "w", "w+", "x", "x+"]
"""Modes of :meth:`Engine.open`."""
AnySource: TypeAlias = "str | bytes | os.PathLike[str] | File"
"""A path, or a file opened with :meth:`Engine.open`."""


@runtime_checkable
class Future(Protocol):
    """A read, write or fsync that an engine has started, or all transfers of one call such as ``read_many``."""

    @property
    def nbytes(self) -> int:
        """Bytes that the transfer was asked for; :meth:`result` says how many were moved."""

    def done(self) -> bool:
        """Return whether the transfer has ended, with or without an error. Never blocks.

        Raises:
            RuntimeError: In a forked child, where the result would never become True.
        """

    def result(self, timeout: float | None = None) -> int:
        """Wait until the transfer has ended, and return the number of bytes transferred.

        Args:
            timeout: Seconds to wait; None waits for as long as it takes. Ctrl-C interrupts the waiting, not the transfer.

        Raises:
            OSError: The error of the transfer (of a fitting subclass where there is one), with errno and filename set.
            TimeoutError: After ``timeout``. The transfer continues.
        """

    def exception(self, timeout: float | None = None) -> OSError | None:
        """Wait like :meth:`result`, and return the transfer's error, or None."""

    def cancel(self) -> bool:
        """Cancel the transfer, which then ends with OSError (ECANCELED) as soon as possible. Never blocks.

        Best effort: I/O that has not begun is never started, but a drive or file system usually finishes I/O that has begun,
        and if it hangs, the transfer stays in progress. The tensor must still not be touched until :meth:`done` is True.
        Afterwards the tensor or the file may have any part of the bytes, perhaps all. A CUDA transfer that waits for its
        stream ends when the stream reaches it.

        Returns:
            False if the transfer had ended already.

        Raises:
            RuntimeError: In a forked child.
        """


@runtime_checkable
class File(Protocol):
    """A file opened once for many transfers by :meth:`Engine.open`. Usable with any engine, and as a context manager."""

    @property
    def path(self) -> str:
        """The path as it was given to :meth:`Engine.open`."""

    @property
    def closed(self) -> bool:
        """Whether no more transfers are accepted, because :meth:`close` was called."""

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache. Becomes False if the file system refuses the first direct transfer."""

    @property
    def alignment(self) -> int:
        """Bytes. Transfers whose memory and file offset are multiples of this need no copy. 1 if the file has no direct I/O."""

    @property
    def sector_size(self) -> int:
        """Bytes. Direct transfers begin and end at multiples of this, in the file and in memory. 1 without direct I/O."""

    def size(self) -> int:
        """Return the file's present size in bytes."""

    def close(self) -> None:
        """Close the file: refuse further transfers. Idempotent.

        Does not wait for transfers in progress: the descriptors are closed when the last transfer has ended. Leaving a
        ``with`` block closes the file too, but raises nothing if another exception is leaving the block.

        Raises:
            OSError: Naming the file, if the system reports a failed write only when the file is closed, as network file systems
                do. If transfers are still in progress, the future of the last one to end raises this error instead; if that one
                is a read, no future does. If the file is dropped without closing it, the error is lost.
        """

    def __enter__(self) -> File: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


@dataclass(frozen=True)
class Stats(ReportFigures):
    """Counters of an engine's transfers since it was made. ``as_dict()`` returns the numbers."""

    backend: str
    """Name of the backend in use."""
    requests: int
    """Reads, writes and fsyncs that have ended.

    A call for many transfers counts as one request for each file in each batch of tensors.
    """
    failed_requests: int
    """Requests that ended with an error."""
    bytes_read: int
    """Bytes read from files."""
    bytes_written: int
    """Bytes written to files."""
    bytes_direct: int
    """Bytes that bypassed the page cache: zero-copy, staged and GPU-direct together."""
    bytes_zero_copy: int
    """Direct bytes transferred from or into the tensor's own memory."""
    bytes_staged: int
    """Direct bytes copied through an aligned buffer: the tensor was misaligned or on a device, or its last page was padded."""
    bytes_buffered: int
    """Bytes through the page cache: unaligned ends of transfers (not in files with whole_pages), and files without direct I/O."""
    bytes_gds: int
    """Direct bytes between the drive and GPU memory that did not pass through host memory (only with the gds op)."""
    blocks: int
    """I/O blocks (reads and writes of at most ``block_size`` bytes) that succeeded."""
    block_latency: dict[int, int]
    """Histogram of the time that I/O blocks took: upper bound of a bin in nanoseconds -> number of blocks.

    Ascending; empty bins are left out, and the counts sum to ``blocks``. A bin is at most 12.5 % wide. The time runs from
    when a block is handed to the system until all of it has been transferred, including retries and resumed transfers,
    but without the wait for a place in the queue. An fsync is not a block.
    """
    short_transfers: int
    """Blocks that the system transferred only in part, and that were resumed where they stopped."""
    retries: int
    """Blocks submitted again after EINTR or EAGAIN."""
    fallbacks: dict[str, int]
    """Reason why a slower method was used -> number of times."""


class Engine:
    """Transfers tensors to and from files, asynchronously.

    >>> with deepnvme.Engine() as engine:
    ...     engine.write(tensor, "/mnt/nvme/tensor").result()
    ...     engine.read(tensor, "/mnt/nvme/tensor").result()

    Aligned tensors need no further memory. Misaligned tensors, and padded last pages of files opened with ``whole_pages``, are
    staged: per worker at most queue_depth x block_size (64 KiB at least), in all 64 MiB per drive; of this, reads use at most
    8 MiB per worker. CUDA tensors are staged in further memory, with the same limits and 16 MiB per worker.

    In the signatures, ``AnySource`` is a path or a file opened with :meth:`open`.

    The op is compiled on first use if it was not installed precompiled. Thread-safe. A process forked from this one must make
    its own engine: in the child, every method of this engine raises RuntimeError.

    Args:
        backend: ``"auto"`` uses the first of io_uring, libaio and threads that the kernel accepts. Another name uses only
            that backend.
        block_size: Most bytes of one I/O block (one system-level transfer), 512 to 1 GiB; or a size such as "1MiB".
        queue_depth: Most I/O blocks in progress at a time for each worker, 1 to 4096. The queue is filled from several
            requests.
        num_threads: Number of workers for each drive, 1 to 256. One saturates most drives; more share the copying of
            misaligned tensors.
        single_submit: Make one system call for each I/O block.
        in_flight_bytes: A worker starts no further I/O block while it has this many bytes in progress, at least 1; or a size
            such as "8MiB". So large blocks can be few, and small ones as many as the queue is deep. None for no limit besides
            the queue's depth.

    Raises:
        TypeError: If a number of bytes is neither a whole number nor a size.
        ValueError: If a setting is out of range.
        OSError: With the kernel's errno, if the kernel refuses the backend.
        RuntimeError: If the op cannot be built.
    """

    def __init__(
        self,
        backend: Backend = "auto",
        block_size: ByteCount = 1048576,
        queue_depth: int = 128,
        num_threads: int = 1,
        single_submit: bool = False,
        in_flight_bytes: ByteCount | None = None,
    ) -> None:
        self._process = os.getpid()
        nbytes = byte_count(block_size, "block_size", least=None)
        in_flight = None if in_flight_bytes is None else byte_count(in_flight_bytes, "in_flight_bytes", least=None)
        self._op = load_async_io()
        self._native: NativeEngine = self._op.Engine(backend, nbytes, queue_depth, num_threads, single_submit, in_flight)

    @property
    def backend(self) -> str:
        """Name of the backend in use."""
        return self._native.backend

    @property
    def block_size(self) -> int:
        """Most bytes of one system-level transfer."""
        return self._native.block_size

    @property
    def queue_depth(self) -> int:
        """Most blocks under way at a time, for each worker."""
        return self._native.queue_depth

    @property
    def in_flight_bytes(self) -> int:
        """Most bytes of full-size I/O blocks that each worker has in progress at a time."""
        return self._native.in_flight_bytes

    @property
    def num_threads(self) -> int:
        """Number of workers for each drive."""
        return self._native.num_threads

    @property
    def closed(self) -> bool:
        """Whether no more transfers are accepted, because :meth:`close` was called."""
        return self._native.closed

    def read(self, tensor: torch.Tensor, source: AnySource, offset: int = 0) -> Future:
        """Start reading ``tensor.nbytes`` bytes at ``offset`` into ``tensor``; return at once.

        If very many requests on paths are pending, blocks until some of them have closed their files.

        Args:
            tensor: Contiguous, on the CPU or a CUDA device, any dtype, at any address. Memory from :meth:`empty_pinned` is read
                in place, without a copy. The tensor must not be touched until the future is done.

                Until then the engine keeps the tensor's storage alive, also if the tensor is dropped or is given another storage
                (``tensor.data = ...``, ``set_``, ``torch.utils.swap_tensors``). The storage must not be resized: torch would
                free the memory, and the transfer would continue in memory that may have a new owner. Memory from
                :meth:`empty_pinned` cannot be resized.

                A CUDA tensor is written to only after the work that this thread has queued on the device's current stream. When
                the future is done, the copy to the device is complete.
            source: Path, or a file opened with :meth:`open`.
            offset: Bytes from the start of the file. Any value, aligned or not.

        Returns:
            A future. Its result is the number of bytes read.

        Raises:
            TypeError: If ``tensor`` is not a dense tensor.
            ValueError: If the tensor is not contiguous or on another device, the offset is negative, the range ends past the
                end of the file, or the engine or the file is closed. For a range past the end of the file, and only then, the
                error has an attribute ``file_size``: the size of the file in bytes.
            RuntimeError: For a CUDA tensor without libcuda.
            OSError: If the file cannot be opened: FileNotFoundError and so on. Later errors are raised by ``Future.result``.
        """
        return self._native.read(tensor, source, offset)

    def write(self, tensor: torch.Tensor, target: AnySource, offset: int = 0) -> Future:
        """Start writing the tensor's bytes at ``offset``; return at once.

        A path is created if it is missing (mode 0666 less the umask) and never truncated: bytes outside [offset, offset + nbytes)
        stay as they are. The bytes are on stable storage after :meth:`fsync`, not before.

        Space past the end of the file is reserved first, so a full disk raises OSError (ENOSPC) from this call, before a byte is
        written.

        Args:
            tensor: On the CPU or a CUDA device, any dtype. Not to be changed until the future is done. Until then its storage is
                kept, and must not be resized, as for :meth:`read`. A tensor that is not contiguous is copied first. A CUDA tensor
                is written after the work that this thread has queued on the device's current stream.
            target: Path, or a file opened with :meth:`open`.
            offset: Bytes from the start of the file. Any value, aligned or not.

        Returns:
            A future. Its result is the number of bytes written.

        Raises:
            OSError: If the file cannot be opened; with ENOSPC if there is too little space. Later errors are raised by
                ``Future.result``.
            TypeError, ValueError, RuntimeError: As for :meth:`read`, but a tensor need not be contiguous, and a range may end
                past the end of the file.
        """
        return self._native.write(tensor, target, offset)

    def read_many(
        self, tensors: Sequence[torch.Tensor], source: AnySource | Sequence[AnySource], offsets: Sequence[int] | None = None
    ) -> Future:
        """Start reading several ranges of one file or of several, each into its own tensor; return when all are submitted.

        The workers get one request for each file in each batch of 256 to 4096 tensors, without holding the GIL. Reads may
        complete in any order. Ranges that follow one another both in the file and in memory are read together.

        Args:
            tensors: Contiguous CPU or CUDA tensors, any dtype. Not to be touched until the future is done. Until then their
                storages are kept, and must not be resized, as for :meth:`read`. The sequence is not kept.
            source: Path, or a file opened with :meth:`open`; or a sequence with a path or file for each tensor, in which a
                file may occur more than once.
            offsets: Bytes from the start of the file, one for each tensor; any value, aligned or not. May be left out only if
                ``source`` is a sequence: each tensor is then read from the start of its file.

        Returns:
            One future for all reads. Its result is the number of bytes read. If some reads fail, the others go on, and the
            OSError has an attribute ``indices``: the numbers of the tensors that could not be read, in ascending order.

        Raises:
            TypeError, ValueError, RuntimeError: As for :meth:`read`, and ValueError if the lengths differ.
            OSError: If a file cannot be opened. If this error, or one about a tensor, occurs after other reads have been
                submitted, those reads are first cancelled and waited for.
        """
        return self._native.read_many(tensors, source, offsets)

    def write_many(
        self, tensors: Sequence[torch.Tensor], target: AnySource | Sequence[AnySource], offsets: Sequence[int] | None = None
    ) -> Future:
        """Start writing several tensors to ranges of one file or of several; return when all are submitted.

        Arguments, result and errors are those of :meth:`read_many` and :meth:`write`. Ranges must not overlap. If the call
        raises, some tensors may have been written.
        """
        return self._native.write_many(tensors, target, offsets)

    def gather(
        self, source: AnySource, ids: torch.Tensor, out: torch.Tensor, *, record_size: int | None = None, base: int = 0
    ) -> Future:
        """Start reading records of one file, by their numbers, into the rows of a tensor; return at once.

        Record i of the file begins at ``base + i * record_size``. Records that follow one another in the file are read
        together if ``ids`` has them in that order.

        Args:
            source: Path, or a file opened with :meth:`open`.
            ids: Numbers of the records; any integer dtype and shape, on the CPU. The same number may occur several times. May
                be changed when this returns.
            out: Contiguous tensor whose shape is ``ids.shape`` followed by the shape of a record. Not to be touched until the
                future is done. Until then its storage is kept, and must not be resized, as for :meth:`read`.
            record_size: Bytes of a record, to be checked against the bytes of a row of ``out``; None uses the latter without
                a check.
            base: Bytes from the start of the file to record 0.

        Returns:
            One future for all records. Its result is the number of bytes read. If some reads fail, the others go on, and the
            OSError has an attribute ``indices``: the positions in ``ids.flatten()`` of the records that could not be read.

        Raises:
            TypeError: If ``ids`` is not a tensor of integers.
            ValueError: If the shapes do not match, a number is negative, or a record ends past the end of the file. Nothing is
                read then.
            TypeError, ValueError, RuntimeError, OSError: As for :meth:`read`.
        """
        return self._native.gather(source, ids, out, record_size=record_size, base=base)

    def scatter(
        self, target: AnySource, ids: torch.Tensor, values: torch.Tensor, *, record_size: int | None = None, base: int = 0
    ) -> Future:
        """Start writing the rows of a tensor to records of one file, by their numbers; return at once.

        Arguments, result and errors are those of :meth:`gather` and :meth:`write`. Records that follow one another in the
        file are written together if ``ids`` has them in that order. A record may end past the end of the file. If a number
        occurs more than once, any of its rows may be the one that is kept.
        """
        return self._native.scatter(target, ids, values, record_size=record_size, base=base)

    def fsync(self, target: AnySource) -> Future:
        """Start flushing a file to stable storage; return at once.

        The flush covers all writes to the file that were submitted to this engine earlier. It begins when all earlier writes
        to the same drive have ended. The future's result is 0. Raises like :meth:`read`.
        """
        return self._native.fsync(target)

    def open(
        self,
        path: str | bytes | os.PathLike[str],
        mode: FileMode = "r",
        *,
        whole_pages: bool = False,
        whole_sectors: bool = False,
    ) -> File:
        """Open a file once, for many transfers.

        If this call creates the file, and its first write finds too little space, the file is removed when it is closed, unless
        something else was written to it.

        Args:
            path: The file.
            mode: As for the built-in ``open``: r, r+, w, w+, x, x+. In addition rw, to read and write a file that is created
                if it is missing, and never truncated.
            whole_pages: Set it if each page of the file (4096 bytes, or the system's page if that is larger) belongs to one
                tensor. Begin each transfer at a multiple of the page size. A write then fills the rest of its last page with
                zeros, so the file may get longer than the tensor, and the last bytes are written directly too. Without it,
                and where the file system has no direct I/O or sectors larger than a page, unaligned ends go through the page
                cache: if they cannot be written, only :meth:`fsync` reports it.
            whole_sectors: Set it if every write to the file, by any program, begins and ends at multiples of
                :attr:`File.sector_size`. Transfers that do so are then direct even if they cover only a part of a page.

        Raises:
            OSError: From opening (a subclass such as FileNotFoundError).
            ValueError: For another mode, or both ``whole_pages`` and ``whole_sectors``.
        """
        return self._native.open(path, mode, whole_pages=whole_pages, whole_sectors=whole_sectors)

    def empty_pinned(
        self, shape: int | Sequence[int], dtype: torch.dtype | None = None, *, node: int | None = None
    ) -> torch.Tensor:
        """Return a new tensor in page-locked memory on huge pages, filled with zeros. The memory is freed with its last view.

        If torch already uses CUDA, the memory is registered with it, so that ``tensor.to(device, non_blocking=True)`` is
        asynchronous.

        Args:
            shape: Shape of the tensor.
            dtype: Any dtype; torch's default dtype if None.
            node: NUMA node to take the memory from while it has room. If the system refuses that (as some containers do),
                there is a RuntimeWarning, and the memory is taken from anywhere.

        Raises:
            MemoryError: If the system has too little memory. If it only refuses to lock the memory (mlock), there is a
                RuntimeWarning, and the tensor works all the same.
            TypeError: If ``dtype`` is not a torch dtype.
            ValueError: If a size is negative, or the machine has no such node.
        """
        import torch

        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        sizes = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
        if any(size < 0 for size in sizes):
            raise ValueError(f"sizes must not be negative, got {sizes}")
        numel = math.prod(sizes)
        if numel == 0:
            return torch.empty(sizes, dtype=dtype, device="cpu")
        nbytes = numel * dtype.itemsize
        if nbytes > sys.maxsize:
            raise MemoryError(f"the system has no {nbytes} bytes of memory to pin")
        buffer = self._op.empty_pinned(nbytes, node)
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be written to outside of it
            return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(sizes)

    def stats(self) -> Stats:
        """Return counters of the engine's transfers since it was made. Never blocks."""
        return Stats(**self._native.stats())

    def cancel(self) -> int:
        """Cancel all futures that are not done, as :meth:`Future.cancel` does, and return how many. Never blocks."""
        return self._native.cancel()

    def close(self, timeout: float | None = None) -> None:
        """Wait for all transfers in progress, then stop the workers. Idempotent.

        Leaving a ``with`` block, dropping the last reference, and the interpreter's exit do the same. Errors of transfers are
        raised by their futures only. Ctrl-C interrupts the waiting of this method, and leaves the engine open. At the
        interpreter's exit, a message says after 3 s which transfers are waited for, and Ctrl-C then ends the process at once,
        by SIGINT.

        Args:
            timeout: Seconds to wait; None waits for as long as it takes, which may be for ever on a file system that hangs.

        Raises:
            TimeoutError: After ``timeout``. The transfers go on, their tensors stay in use, and the engine stays open:
                :meth:`cancel` them, or close it again later.
        """
        self._native.close(timeout)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return representation(
            self,
            lambda: self.backend,
            lambda: f"block_size={size_for_people(self.block_size)}",
            lambda: f"queue_depth={self.queue_depth}",
            lambda: f"num_threads={self.num_threads}",
            lambda: state_text(os.getpid() == self._process and self.closed, self._process),
        )
