"""What the compiled ``async_io`` op offers; the implementation is ``csrc/bindings``.

Every method here releases the GIL while it waits or makes a system call.
"""

import os
from array import array
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

import torch
from typing_extensions import Buffer

source_hash: str
"""Hash of the sources this module was compiled from; ``AsyncIOBuilder.load`` compares it."""

def backends() -> dict[str, str | None]:
    """Every backend by name, fastest first; ``None`` where it works here, else why it does not. Tries each in earnest."""

def copy_many(destinations: Buffer, sources: Buffer, lengths: Buffer) -> None:
    """What :func:`deepnvme.memory.tensor_bytes.copy_many` documents. Any contiguous buffers of uint64 serve."""

def none_for(types: frozenset[type], otherwise: Callable[[object], Any]) -> Callable[[object], Any]:
    """A function that returns None for an object of exactly one of the types, and otherwise what ``otherwise`` returns for it."""

def pickle_walk(
    stream: bytes, most_nested: int, most_unregistered: int = ...
) -> tuple[int, int, int, bool, bool, list[bytes] | None]:
    """Look through a pickle without making anything of it.

    Stops early, not complete, above ``most_nested`` (at most 16382) levels, above ``most_unregistered``
    objects, or at a memo index not below ``len(stream)``.

    Returns:
        (nesting, unregistered, largest_memo_index, changes_globals, complete, names): levels of nesting; most containers and
        call results that were not in the memo at one time, with entries of the memo that no pickler makes; the largest memo
        index; whether it sets the state of a global; whether it ends within the stream; and the globals that it names, each
        once as b"module\\nname", or None if unpickling might find others.
    """

def zip_layout(names: list[str], sizes: Buffer, crcs: Buffer, alignment: int) -> tuple[bytes, array[int], array[int]]:
    """What :func:`deepnvme.checkpoint.formats.zip_layout.lay_out` documents."""

def dequantize(matrices: list[tuple[str, str, int, int, int, int, int]], threads: int, in_turn: bool = False) -> None:
    """Work out matrices' values: each (scheme, dtype, rows, columns, and the addresses of values, scales and codes), as
    :mod:`deepnvme.streaming.weights.quantization` has them. Nothing checks the addresses."""

def quantize(matrix: tuple[str, str, int, int, int, int, int], threads: int) -> int | None:
    """Work out one matrix's scales and codes, or say in which row is what cannot be: a value not finite, or above 2**126."""

class Future:
    """One transfer under way."""

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""
    def done(self) -> bool:
        """Whether the transfer has ended, well or not. Never blocks."""
    def result(self, timeout: float | None = None) -> int:
        """Wait and return the bytes moved. Raises OSError as the transfer did, TimeoutError after ``timeout`` seconds."""
    def exception(self, timeout: float | None = None) -> OSError | None:
        """Wait and return the error the transfer ended with, or None. Raises TimeoutError after ``timeout`` seconds."""

class File:
    """A file opened once and used for many transfers. Closed by ``close``, ``with`` or the last reference."""

    @property
    def path(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache (O_DIRECT)."""
    @property
    def alignment(self) -> int:
        """Memory and offsets that are multiples of this many bytes are transferred without a copy."""
    def size(self) -> int:
        """Bytes in the file now."""
    def close(self) -> None:
        """Refuse further transfers; descriptors close once those under way have ended. Idempotent, never blocks."""
    def __enter__(self) -> File: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class PinnedBuffer:
    """Page-locked, huge-page-backed memory with the buffer protocol; freed with its last view."""

    @property
    def nbytes(self) -> int: ...
    @property
    def locked(self) -> bool:
        """Whether mlock succeeded."""
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
    ) -> None: ...
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
    def read(self, tensor: torch.Tensor, source: str | bytes | os.PathLike[str] | File, offset: int = 0) -> Future: ...
    def write(
        self, tensor: torch.Tensor, target: str | bytes | os.PathLike[str] | File, offset: int = 0
    ) -> Future: ...
    def fsync(self, target: str | bytes | os.PathLike[str] | File) -> Future: ...
    def open(self, path: str | bytes | os.PathLike[str], mode: str = "r", *, whole_pages: bool = False) -> File: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...

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
    def read(
        self, buffer: torch.Tensor, filename: str | os.PathLike[str], validate: bool, file_offset: int = 0
    ) -> Literal[0]: ...
    def write(
        self, buffer: torch.Tensor, filename: str | os.PathLike[str], validate: bool, file_offset: int = 0
    ) -> Literal[0]: ...
    # pread(buffer, filename, validate, async, file_offset=0): `async` is a Python keyword, so the stub cannot spell it;
    # pass it by position.
    def pread(
        self, buffer: torch.Tensor, filename: str | os.PathLike[str], validate: bool, async_: bool, /, file_offset: int = 0
    ) -> int: ...
    def pwrite(
        self, buffer: torch.Tensor, filename: str | os.PathLike[str], validate: bool, async_: bool, /, file_offset: int = 0
    ) -> int: ...
    def sync_pread(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int: ...
    def sync_pwrite(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> int: ...
    def async_pread(self, buffer: torch.Tensor, filename: str | os.PathLike[str], file_offset: int = 0) -> Literal[0]: ...
    def async_pwrite(
        self, buffer: torch.Tensor, filename: str | os.PathLike[str] | int, file_offset: int = 0
    ) -> Literal[0]: ...
    def wait(self) -> int: ...
    def get_block_size(self) -> int: ...
    def get_queue_depth(self) -> int: ...
    def get_single_submit(self) -> bool: ...
    def get_overlap_events(self) -> bool: ...
    def get_intra_op_parallelism(self) -> int: ...
    def get_thread_count(self) -> int: ...
    def get_alignment(self) -> int: ...
    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor: ...
    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool: ...
    def is_pinned(self, buffer: torch.Tensor) -> bool: ...
    def stats(self) -> dict[str, Any]: ...

def empty_pinned(nbytes: int) -> PinnedBuffer:
    """Allocate page-locked memory of ``nbytes`` bytes, zeroed. Raises MemoryError."""

def is_pinned(tensor: torch.Tensor) -> bool: ...
def aio_read(
    buffer: torch.Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> Literal[0]: ...
def aio_write(
    buffer: torch.Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> Literal[0]: ...
def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> Literal[0]: ...
