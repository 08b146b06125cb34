"""The engine for everyone: futures, files, pinned tensors, statistics."""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

Backend = Literal["auto", "io_uring", "libaio", "threads"]
FileMode = Literal["r", "r+", "rw", "w", "w+", "x", "x+"]


@runtime_checkable
class Future(Protocol):
    """One read, write or fsync under way."""

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks. RuntimeError in a forked child, where it would never turn True."""

    def result(self, timeout: float | None = None) -> int:
        """Wait until it has ended, and return the bytes moved.

        ``timeout``: seconds; None waits for as long as it takes. Raises the OSError (subclass) it ended with, errno and filename
        set, or TimeoutError, after which it is still under way. Ctrl-C interrupts the waiting, not the transfer.
        """

    def exception(self, timeout: float | None = None) -> OSError | None:
        """Wait like :meth:`result`, and return the error it ended with, or None."""


@runtime_checkable
class File(Protocol):
    """A file opened once for many transfers, by :meth:`Engine.open`; usable with any engine, and as a context manager."""

    @property
    def path(self) -> str:
        """As it was given to ``open``."""

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache. Turns False if the file system refuses at the first transfer."""

    @property
    def alignment(self) -> int:
        """Bytes: memory and offsets that are multiples of this are transferred without a copy. 1 where nothing is direct."""

    def size(self) -> int:
        """Bytes in the file now."""

    def close(self) -> None:
        """Refuse further transfers. Idempotent. Does not wait for those under way: the descriptors close when the last has ended.

        Raises OSError naming the file where it closes them itself, after a write, and the system says only now that it could not
        write: network file systems do. Of a transfer under way, its future tells. So does leaving ``with``, unless with another
        exception. A file that is dropped without this cannot tell.
        """

    def __enter__(self) -> File: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True)
class Stats:
    """What an engine has done since it was made."""

    backend: str
    requests: int
    """Reads, writes and fsyncs that have ended."""
    failed_requests: int
    bytes_read: int
    bytes_written: int
    bytes_direct: int
    """Bytes that bypassed the page cache: zero-copy, staged and GPU-direct together."""
    bytes_zero_copy: int
    """Direct bytes from or into the tensor itself."""
    bytes_staged: int
    """Direct bytes copied through an aligned buffer: the tensor was not aligned, or on a device, or the last page was padded."""
    bytes_buffered: int
    """Bytes through the page cache: unaligned ends of transfers (not in files with whole_pages), and files without direct I/O."""
    bytes_gds: int
    """Direct bytes between the drive and GPU memory, without host memory: the gds op's."""
    blocks: int
    """Reads and writes of at most block_size bytes that ended well."""
    block_latency: dict[int, int]
    """How long blocks took: nanoseconds -> how many took at most that long, and longer than the bin before allows.

    Ascending; empty bins are left out, and the counts sum to ``blocks``. A bin is at most 12.5 % wide. The time runs from when a
    block is handed to the system until all of it has moved, with what had to be tried again or resumed, and without the wait for
    a place in the queue. An fsync is not a block.
    """
    short_transfers: int
    """Blocks that the system moved in part, and that were resumed where they stopped."""
    retries: int
    """Blocks submitted again after EINTR or EAGAIN."""
    fallbacks: dict[str, int]
    """Why something slower was used, and how often."""


class Engine:
    """Asynchronous transfers between tensors and files.

    >>> with deepnvme.Engine() as engine:
    ...     engine.write(tensor, "/mnt/nvme/tensor").result()
    ...     engine.read(tensor, "/mnt/nvme/tensor").result()

    ``backend``: ``"auto"`` takes the first of io_uring, libaio and threads that the kernel accepts; a name insists on it.
    ``block_size``: bytes in one system-level transfer, 512 to 1 GiB. ``queue_depth``: blocks under way at a time for each worker,
    1 to 4096, filled across requests. ``num_threads``: workers, 1 to 256; one saturates most drives, more share the copying of
    misaligned tensors. ``single_submit``: one system call for each block.

    Memory beyond the tensors: nothing for aligned ones; for misaligned ones, and for files of whole pages, at most 8 MiB per
    worker, 64 MiB in all, and no more than queue_depth x block_size (or 64 KiB, the largest sector) per worker. For tensors on
    devices the same, with 16 MiB.

    The op is compiled on first use where it was not installed ready-made. Raises ValueError for a setting out of range, OSError
    with the kernel's errno for a backend that it refuses, RuntimeError for one that was compiled out or an op that cannot be
    built. Thread-safe. A process forked from this one must make its own: there every method raises RuntimeError.
    """

    def __init__(
        self,
        backend: Backend = "auto",
        block_size: int = 1048576,
        queue_depth: int = 128,
        num_threads: int = 1,
        single_submit: bool = False,
    ) -> None:
        from .ops.op_builder import AsyncIOBuilder

        self._op = AsyncIOBuilder().load()
        self._native = self._op.Engine(backend, block_size, queue_depth, num_threads, single_submit)

    @property
    def backend(self) -> str:
        """The backend in use."""
        return str(self._native.backend)

    @property
    def block_size(self) -> int:
        """Bytes."""
        return int(self._native.block_size)

    @property
    def queue_depth(self) -> int:
        """Blocks under way at a time, for each worker."""
        return int(self._native.queue_depth)

    @property
    def num_threads(self) -> int:
        """Workers."""
        return int(self._native.num_threads)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return bool(self._native.closed)

    def read(
        self, tensor: torch.Tensor, source: str | bytes | os.PathLike[str] | File, offset: int = 0
    ) -> Future:
        """Start reading ``tensor.nbytes`` bytes at ``offset`` into ``tensor``; return at once.

        ``tensor``: contiguous, on the CPU or a CUDA device, any dtype. Kept alive, and not to be touched, until the future is
        done. Any address works; memory from :meth:`empty_pinned` is read in place, without a copy. What a device's current
        stream has been given before, on the calling thread, is done with the tensor first; when the future is done, so is the
        copy to the device. ``offset``: bytes from the start of the file; any value, aligned or not.

        Raises TypeError for what is no dense tensor; ValueError for one that is not contiguous or on another device, a negative
        offset, a range past the end of the file, or a closed engine or file; RuntimeError for a CUDA tensor without libcuda;
        FileNotFoundError and its kin from opening. What fails later is raised
        by ``Future.result``. With very many requests on paths pending, waits until some have closed their files.
        """
        future: Future = self._native.read(tensor, source, offset)
        return future

    def write(
        self, tensor: torch.Tensor, target: str | bytes | os.PathLike[str] | File, offset: int = 0
    ) -> Future:
        """Start writing the tensor's bytes at ``offset``; return at once.

        A path is created where missing (mode 0666 less the umask) and never truncated: bytes outside
        [offset, offset + nbytes) stay as they are. A tensor that is not contiguous is copied first. A CUDA tensor is written as
        its device's current stream, on the calling thread, leaves it. The tensor is kept alive, and not to be changed, until
        the future is done. The bytes are on stable storage after :meth:`fsync`, not before.

        Space past the end of the file is reserved first, so a full disk raises OSError (ENOSPC) here, before a byte is written.
        Other errors as for :meth:`read`.
        """
        future: Future = self._native.write(tensor, target, offset)
        return future

    def fsync(self, target: str | bytes | os.PathLike[str] | File) -> Future:
        """Start flushing a file to stable storage; return at once.

        Begins when every write submitted to this engine before has ended, and covers them. The future's result is 0 bytes.
        Raises like :meth:`read`.
        """
        future: Future = self._native.fsync(target)
        return future

    def open(self, path: str | bytes | os.PathLike[str], mode: FileMode = "r", *, whole_pages: bool = False) -> File:
        """Open a file once, for many transfers.

        ``mode``: as for the built-in ``open``: r, r+, w, w+, x, x+; and rw, to read and write a file that is created where
        missing and never truncated. Raises OSError (subclasses) from opening, ValueError for another mode.

        ``whole_pages``: set it if each page of the file (4096 bytes, or the system's page, if larger) belongs to one tensor.
        Begin each transfer at a multiple of the page size. A write then fills the rest of its last page with zeros, so the file
        may get longer than the tensor, and the last bytes go to the drive directly. Without it, and where the file system has no
        direct I/O or sectors larger than a page, unaligned ends go through the page cache: only :meth:`fsync` reports those that
        could not be written.
        """
        file: File = self._native.open(path, mode, whole_pages=whole_pages)
        return file

    def empty_pinned(self, shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new tensor in page-locked memory on huge pages, zeroed; freed with its last view.

        Registered with CUDA if torch uses it by now: ``tensor.to(device, non_blocking=True)`` is asynchronous then.

        ``dtype``: torch's default dtype if None. A refused mlock is a RuntimeWarning: the memory serves all the same. Raises
        MemoryError, and ValueError for a negative size.
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
        buffer = self._op.empty_pinned(nbytes)
        with torch.inference_mode(False):  # what is made in that mode cannot be written to outside of it
            return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(sizes)

    def stats(self) -> Stats:
        """Figures since the engine was made. Never blocks."""
        return Stats(**self._native.stats())

    def close(self) -> None:
        """Wait for everything under way, then end the workers. Idempotent.

        Leaving ``with``, dropping the last reference, and the interpreter's exit do it too. Errors stay with their futures.
        Ctrl-C interrupts the waiting and leaves the engine open.
        """
        self._native.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def without_python(start: Callable[..., Future]) -> Callable[..., Future]:
    """What an engine's ``read``, ``write`` or ``fsync`` calls, which is no Python code; anything else as it is.

    A function of the interpreter can call it, and keep the future at once: Ctrl-C cannot come in between.
    """
    if getattr(start, "__func__", None) not in (Engine.read, Engine.write, Engine.fsync):
        return start
    native: Callable[..., Future] = getattr(start.__self__._native, start.__name__)  # type: ignore[attr-defined]
    return native
