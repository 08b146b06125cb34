"""What the compiled ``async_io`` op offers: the engine, and DeepSpeed's handle. The implementation is ``csrc/bindings``.

The submodules ``checkpoint``, ``kvstore``, ``memory``, ``quantization`` and ``tables`` hold what DeepSpeed does not have, and is
compiled for its speed. ``deepnvme.ops.load_async_io`` returns the op.

Every method here releases the GIL while it waits or makes a system call.
"""

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

import torch

from deepnvme.engine import AnySource
from deepnvme.engine import File as AnyFile

from . import checkpoint as checkpoint
from . import kvstore as kvstore
from . import memory as memory
from . import quantization as quantization
from . import tables as tables

source_hash: str
"""Hash of the sources this module was compiled from; ``AsyncIOBuilder.load`` compares it."""

def backends() -> dict[str, str | None]:
    """Try each backend. Return, by name, fastest first, None if it works on this machine, else the reason why it does not."""

def fail_at_exit() -> None:
    """Have the process exit with status 1 if its exit status would be 0. No effect on ``os._exit`` and signals."""

class Future:
    """A read, write or fsync that this op has started: :class:`deepnvme.Future`, which documents it."""

    @property
    def nbytes(self) -> int: ...
    def done(self) -> bool: ...
    def result(self, timeout: float | None = None) -> int: ...
    def exception(self, timeout: float | None = None) -> OSError | None: ...
    def cancel(self) -> bool: ...

class File:
    """A file opened once and used for many transfers: :class:`deepnvme.File`, which documents it."""

    @property
    def path(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    @property
    def direct(self) -> bool: ...
    @property
    def alignment(self) -> int: ...
    @property
    def sector_size(self) -> int: ...
    def size(self) -> int: ...
    def close(self) -> None: ...
    def __enter__(self) -> File: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

class PinnedBuffer:
    """Page-locked, huge-page-backed memory with the buffer protocol; freed with its last view."""

    @property
    def nbytes(self) -> int:
        """Return the size of the memory in bytes."""
    @property
    def locked(self) -> bool:
        """Whether the system has locked the memory into RAM (mlock)."""
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Engine:
    """The native engine behind :class:`deepnvme.Engine`, which documents it."""

    def __init__(
        self,
        backend: str = "auto",
        block_size: int = 1048576,
        queue_depth: int = 128,
        num_threads: int = 1,
        single_submit: bool = False,
        in_flight_bytes: int | None = None,
    ) -> None: ...
    @property
    def in_flight_bytes(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def queue_depth(self) -> int: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def read(self, tensor: torch.Tensor, source: str | bytes | os.PathLike[str] | AnyFile, offset: int = 0) -> Future: ...
    def write(self, tensor: torch.Tensor, target: str | bytes | os.PathLike[str] | AnyFile, offset: int = 0) -> Future: ...
    def read_many(
        self, tensors: Sequence[torch.Tensor], source: AnySource | Sequence[AnySource], offsets: Sequence[int] | None = None
    ) -> Future: ...
    def write_many(
        self, tensors: Sequence[torch.Tensor], target: AnySource | Sequence[AnySource], offsets: Sequence[int] | None = None
    ) -> Future: ...
    def gather(
        self, source: AnySource, ids: torch.Tensor, out: torch.Tensor, *, record_size: int | None = None, base: int = 0
    ) -> Future: ...
    def scatter(
        self, target: AnySource, ids: torch.Tensor, values: torch.Tensor, *, record_size: int | None = None, base: int = 0
    ) -> Future: ...
    def fsync(self, target: str | bytes | os.PathLike[str] | AnyFile) -> Future: ...
    def open(
        self, path: str | bytes | os.PathLike[str], mode: str = "r", *, whole_pages: bool = False, whole_sectors: bool = False
    ) -> File: ...
    def stats(self) -> dict[str, Any]: ...
    def cancel(self) -> int: ...
    def close(self, timeout: float | None = None) -> None: ...

class aio_handle:
    """Reads tensors from files and writes tensors to files, on CPU or CUDA: DeepSpeed's handle, with the same methods.

    >>> handle = aio_handle(block_size=1 << 20, queue_depth=32)
    >>> handle.async_pwrite(tensor, "/mnt/nvme/tensor.bin")  # returns at once
    0
    >>> handle.wait()  # blocks until the tensor is written
    1

    The ``sync_`` methods, ``read`` and ``write`` block until the transfer has ended. The ``async_`` methods return at once, and
    :meth:`wait` waits for them. Offsets and sizes are in bytes; any value and any address works. Transfers whose memory, size and
    file offset are multiples of 4096 bytes need no copy; :meth:`new_cpu_locked_tensor` returns such memory.

    Blocking methods release the GIL. A handle may be used by several threads. In a forked child every transfer raises
    RuntimeError. Dropping the handle waits for its transfers.

    Args:
        block_size: Most bytes of one system-level transfer, 512 to 1 GiB. Larger tensors are split.
        queue_depth: Most blocks in progress at a time for each worker, 1 to 4096.
        single_submit: Make one system call for each block rather than one for many.
        overlap_events: Has no effect: the engine always overlaps submission and completion.
        intra_op_parallelism: Number of workers (threads, each with its own queue), 1 to 256. One saturates most drives.
        num_threads: Another name for ``intra_op_parallelism``.
        backend: "io_uring", "libaio" or "threads"; "auto" is the first of these that the kernel accepts.

    Raises:
        TypeError: For an argument of the wrong type, from every method.
        ValueError: For a setting out of range; reads also raise it for a tensor that is not contiguous, or a range past the
            end of the file.
        OSError: If the kernel refuses the backend; from transfers, with errno and filename. After an error the handle stays
            usable.
    """

    def __init__(
        self,
        block_size: int = 1048576,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
        *,
        num_threads: int | None = None,
        backend: str = "auto",
    ) -> None: ...
    def read(self, buffer: torch.Tensor, filename: str | os.PathLike[str], validate: bool, file_offset: int = 0) -> Literal[0]:
        """Read ``buffer.nbytes`` bytes of the file, from byte ``file_offset`` on, into the tensor. Blocks. Returns 0.

        With ``validate``, compares the tensor with the file afterwards.

        Raises:
            ValueError: If the tensor is not contiguous, or the range ends past the end of the file.
            OSError: If the file cannot be opened or read; EIO, with the first byte that differs, from ``validate``.
        """
    def write(self, buffer: torch.Tensor, filename: str | os.PathLike[str], validate: bool, file_offset: int = 0) -> Literal[0]:
        """Write the tensor's bytes to the file, from byte ``file_offset`` on. Blocks. Returns 0.

        The file is created if it is missing, and never truncated. The drive has the bytes, but a power cut can still lose them:
        call ``os.fsync`` if that matters. With ``validate``, compares the tensor with the file afterwards.

        Raises:
            OSError: If the file cannot be opened or written; ENOSPC before a byte is written if the disk has too little space;
                EIO, with the first byte that differs, from ``validate``.
        """
    # pread(buffer, filename, validate, async, file_offset=0): `async` is a Python keyword, so the stub cannot spell it;
    # pass it by position.
    def pread(
        self, buffer: torch.Tensor, filename: str | os.PathLike[str], validate: bool, async_: bool, /, file_offset: int = 0
    ) -> int:
        """Without ``async``, read like :meth:`read`, and return 1. With it, start reading, and return 0; :meth:`wait` waits.

        ``async`` is a keyword of Python: pass it by position.
        """
    def pwrite(
        self, buffer: torch.Tensor, filename: str | os.PathLike[str], validate: bool, async_: bool, /, file_offset: int = 0
    ) -> int:
        """Without ``async``, write like :meth:`write`, and return 1. With it, start writing, and return 0; :meth:`wait` waits.

        ``async`` is a keyword of Python: pass it by position.
        """
    def sync_pread(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Read ``buffer.nbytes`` bytes of the file into the tensor. Blocks. Returns 1: one operation has ended.

        ``file_offset``: bytes from the start of the file. Raises like :meth:`read`.
        """
    def sync_pwrite(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Write the tensor's bytes to the file. Blocks. Returns 1: one operation has ended.

        ``file_offset``: bytes from the start of the file. The file is created, and errors are raised, as by :meth:`write`.
        """
    def async_pread(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> Literal[0]:
        """Start reading ``buffer.nbytes`` bytes of the file into the tensor. Returns 0 at once; :meth:`wait` waits.

        The tensor must not be touched before :meth:`wait` has returned. Until then the handle keeps the tensor's storage, which
        must not be resized. A CUDA tensor is written to after the work queued on the device's current stream.

        Args:
            buffer: Contiguous tensor of any dtype, on the CPU or a CUDA device.
            filename: Path of the file.
            file_offset: Bytes from the start of the file.

        Raises:
            ValueError: If the tensor is not contiguous, or the range ends past the end of the file.
            OSError: If the file cannot be opened. Errors of the transfer are raised by :meth:`wait`.
        """
    def async_pwrite(self, buffer: torch.Tensor, filename: str | os.PathLike[str] | int, file_offset: int = 0) -> Literal[0]:
        """Start writing the tensor's bytes to the file. Returns 0 at once; :meth:`wait` waits.

        The tensor must not be changed before :meth:`wait` has returned. Until then the handle keeps the tensor's storage, which
        must not be resized.

        Args:
            buffer: Tensor of any dtype, on the CPU or a CUDA device. A tensor that is not contiguous is copied first.
            filename: Path of the file, which is created if it is missing, and never truncated; or the descriptor (int) of a file
                that is open for writing.
            file_offset: Bytes from the start of the file.

        Raises:
            OSError: If the file cannot be opened, or the disk has too little space (ENOSPC). Errors of the transfer are raised by
                :meth:`wait`.
        """
    def async_pread_many(
        self, buffers: Sequence[torch.Tensor], filenames: Sequence[AnySource], file_offsets: Sequence[int] | None = None
    ) -> Literal[0]:
        """Start reading into several tensors, each from its own file, by one call. DeepSpeed has no such method.

        Otherwise like :meth:`async_pread`. ``file_offsets``: bytes from the start of each file; None reads all from the start.
        If the call raises, none of its reads is in progress, or counted by :meth:`wait`.
        """
    def async_pwrite_many(
        self, buffers: Sequence[torch.Tensor], filenames: Sequence[AnySource], file_offsets: Sequence[int] | None = None
    ) -> Literal[0]:
        """Start writing several tensors, each to its own file, by one call: see :meth:`async_pread_many`."""
    def wait(self) -> int:
        """Block until all operations in progress have ended. Returns how many operations were started since the last wait.

        Returns 0 if there was none. Ctrl-C interrupts the wait, not the operations: call it again.

        Raises:
            OSError: The first error of any operation, with errno and filename, after all have ended. The next wait counts from
                zero.
        """
    def get_block_size(self) -> int:
        """Return the most bytes of one system-level transfer."""
    def get_queue_depth(self) -> int:
        """Return the most blocks that each worker has in progress at a time."""
    def get_single_submit(self) -> bool:
        """Return whether each block is submitted by a separate system call."""
    def get_overlap_events(self) -> bool:
        """Return ``overlap_events`` as it was given. The engine always overlaps."""
    def get_intra_op_parallelism(self) -> int:
        """Return the number of workers, each with its own queue."""
    def get_thread_count(self) -> int:
        """Return the number of workers, like :meth:`get_intra_op_parallelism`."""
    def get_alignment(self) -> int:
        """Return 512 bytes times the number of workers. DeepSpeed pads its buffers to a multiple of this."""
    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor of ``num_elem`` zeros in page-locked memory, with the dtype of ``example_tensor``.

        Transfers of such a tensor need no copy. Raises MemoryError if the system has too little memory.
        """
    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Forget that a tensor of :meth:`new_cpu_locked_tensor` is pinned. Returns whether it was known to be.

        The memory is freed with its last view.
        """
    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Return whether the tensor lies in memory that any handle or engine of this package has pinned."""
    def stats(self) -> dict[str, Any]:
        """Return counters of the handle's transfers, by the names of :class:`deepnvme.Stats`. Never blocks."""

def empty_pinned(nbytes: int, node: int | None = None) -> PinnedBuffer:
    """Allocate page-locked memory of ``nbytes`` bytes, zeroed, on a NUMA node if one is given.

    Raises MemoryError, or ValueError if the machine has no such node.
    """

def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether the tensor lies in memory that this package has pinned."""

def aio_read(
    buffer: torch.Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> Literal[0]:
    """Read the start of a file into a tensor, with a handle made for this call alone. Blocks. Returns 0.

    Arguments are those of :class:`aio_handle` and its ``read``.
    """

def aio_write(
    buffer: torch.Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> Literal[0]:
    """Write a tensor to the start of a file, with a handle made for this call alone. Blocks. Returns 0.

    Arguments are those of :class:`aio_handle` and its ``write``.
    """

def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> Literal[0]:
    """Copy the bytes of ``src`` into ``dest``. Returns 0. Raises ValueError if their sizes in bytes differ."""
