"""What the compiled ``async_io`` op offers: the engine, and DeepSpeed's handle. The implementation is ``csrc/bindings``.

The submodules ``checkpoint``, ``memory``, ``quantization`` and ``tables`` hold what has nothing to do with transfers, and is
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
from . import memory as memory
from . import quantization as quantization
from . import tables as tables

source_hash: str
"""Hash of the sources this module was compiled from; ``AsyncIOBuilder.load`` compares it."""

def backends() -> dict[str, str | None]:
    """Try each backend. Return, by name, fastest first, None if it works on this machine, else the reason why it does not."""

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
    """DeepSpeed's handle: same names, same order, same results (DeepSpeed 0.19, ``py_ds_aio.cpp``).

    Where DeepSpeed returns -1, prints or aborts, this raises: ``OSError`` with errno and filename for I/O, ``ValueError`` and
    ``TypeError`` for arguments.
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
        """Read ``buffer.nbytes`` bytes at ``file_offset`` into the tensor, and return 0. Blocks.

        ``validate``: compare the tensor with the file afterwards; OSError (EIO) says at which byte they differ.
        """
    def write(self, buffer: torch.Tensor, filename: str | os.PathLike[str], validate: bool, file_offset: int = 0) -> Literal[0]:
        """Write the tensor's bytes at ``file_offset``, and return 0. Blocks. ``validate`` as for :meth:`read`."""
    # pread(buffer, filename, validate, async, file_offset=0): `async` is a Python keyword, so the stub cannot spell it;
    # pass it by position.
    def pread(
        self, buffer: torch.Tensor, filename: str | os.PathLike[str], validate: bool, async_: bool, /, file_offset: int = 0
    ) -> int:
        """Read like :meth:`read` and return 1; with ``async``, start reading and return 0: :meth:`wait` waits for it."""
    def pwrite(
        self, buffer: torch.Tensor, filename: str | os.PathLike[str], validate: bool, async_: bool, /, file_offset: int = 0
    ) -> int:
        """Write like :meth:`write` and return 1; with ``async``, start writing and return 0: :meth:`wait` waits for it."""
    def sync_pread(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Read into the tensor, and return 1, the number of operations that have ended. Blocks."""
    def sync_pwrite(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int:
        """Write the tensor, and return 1, the number of operations that have ended. Blocks."""
    def async_pread(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> Literal[0]:
        """Start reading into the tensor, which must not be touched before :meth:`wait`, and return 0.

        Until the read has ended, the tensor's storage is kept, and must not be resized: see ``deepnvme.Engine.read``.
        """
    def async_pwrite(self, buffer: torch.Tensor, filename: str | os.PathLike[str] | int, file_offset: int = 0) -> Literal[0]:
        """Start writing the tensor, which must not be changed before :meth:`wait`, and return 0.

        Until the write has ended, the tensor's storage is kept, and must not be resized, as for :meth:`async_pread`.
        ``filename``: a path, or the descriptor of a file that is open for writing.
        """
    def async_pread_many(
        self, buffers: Sequence[torch.Tensor], filenames: Sequence[AnySource], file_offsets: Sequence[int] | None = None
    ) -> Literal[0]:
        """Start reading into several tensors, each from its own file, by one call. DeepSpeed has no such method.

        Otherwise like :meth:`async_pread`. If it raises, none of its reads is in progress, or counted by :meth:`wait`.
        """
    def async_pwrite_many(
        self, buffers: Sequence[torch.Tensor], filenames: Sequence[AnySource], file_offsets: Sequence[int] | None = None
    ) -> Literal[0]:
        """Start writing several tensors, each to its own file, by one call: see :meth:`async_pread_many`."""
    def wait(self) -> int:
        """Wait for all operations in progress, and return how many operations were started since the last wait.

        After all have ended, raises the first error of any of them. The next wait counts from zero.
        """
    def get_block_size(self) -> int:
        """Return the most bytes of one system-level transfer."""
    def get_queue_depth(self) -> int:
        """Return the most blocks that each worker has in progress at a time."""
    def get_single_submit(self) -> bool:
        """Return whether each block is submitted by a separate system call."""
    def get_overlap_events(self) -> bool:
        """Return the setting as it was given; the engine overlaps in any case."""
    def get_intra_op_parallelism(self) -> int:
        """Return the number of workers, each with its own queue."""
    def get_thread_count(self) -> int:
        """Return the number of workers, under another of DeepSpeed's names."""
    def get_alignment(self) -> int:
        """Return 512 bytes times the number of workers: DeepSpeed's buffers are multiples of that."""
    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return a flat pinned tensor of ``num_elem`` zeros, with the dtype of ``example_tensor``. Raises MemoryError."""
    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Take a tensor of :meth:`new_cpu_locked_tensor` off the record of pinned memory; return whether it was on it.

        The memory is freed with its last view.
        """
    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Return whether the tensor lies in memory that any handle of this package has pinned."""
    def stats(self) -> dict[str, Any]:
        """Return what the handle's engine has done, by the names of :class:`deepnvme.Stats`."""

def empty_pinned(nbytes: int, node: int | None = None) -> PinnedBuffer:
    """Allocate page-locked memory of ``nbytes`` bytes, zeroed, on a NUMA node if one is given.

    Raises MemoryError, or ValueError for a node that the machine has not.
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
    """Read from the start of a file with a handle of these settings, made for this call alone: see :meth:`aio_handle.read`."""

def aio_write(
    buffer: torch.Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> Literal[0]:
    """Write to the start of a file with a handle of these settings, made for this call alone: see :meth:`aio_handle.write`."""

def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> Literal[0]:
    """Copy the bytes of one tensor into another of the same size. Raises ValueError if the sizes differ."""
