"""TensorNVMe's ``AsyncFileWriter``: one file that is written from its start, in the background."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from typing import IO

import torch

from deepnvme._descriptions import path_list, representation
from deepnvme._lazy import public_names
from deepnvme.checkpoint.file_io import shared_engine
from deepnvme.engine import File

from .backends import settings_with
from .operations import Callback, Operations

__all__ = ["AsyncFileWriter"]

__dir__ = public_names(__name__)

_UNCOPIED = frozenset({"uncopied tensor"})
"""Marks writes from a tensor's own memory: ``sync_h2d`` waits for these, so that training may change the tensor."""


class DescriptorWriter:
    """Writes memory to offsets of an open file, in the background. Contract: ``tensornvme._C.AsyncFileWriter``.

    Errors of writes are raised by the method that waits for them. If it is dropped, or the interpreter exits, all writes are
    waited for, and an error is only reported on stderr. Not thread-safe.

    Args:
        fd: Descriptor of an open file, which stays the caller's and may be closed at once.
        n_entries: Accepted and checked; the settings of the drive say how many blocks are under way.
        backend: ``uring``, ``aio`` or ``pthread``. If it does not work here, another is used, with a RuntimeWarning. None for the
            first that works.
        n_tasks: Accepted without effect.

    Raises:
        RuntimeError: For an unknown backend.
        ValueError: If ``n_entries`` is less than 1.
        OSError: If the file cannot be opened again to read and write it.
    """

    def __init__(self, fd: int, n_entries: int = 16, backend: str | None = "aio", n_tasks: int | None = None) -> None:
        self.path = _path_of(fd)
        self._operations = Operations()
        self._engine = shared_engine(self.path, settings_with(self.path, n_entries, backend))
        self._file = self._engine.open(self.path, "r+")
        weakref.finalize(self, _finish, self._operations, self._file, os.getpid())

    def write(self, buffer: int, n_bytes: int, offset: int, callback: Callback | None = None) -> None:
        """Start writing memory by its address.

        Args:
            buffer: Address of the memory, which must be kept and not be changed until the write is waited for.
            n_bytes: Bytes to write.
            offset: Bytes from the start of the file.
            callback: Called without arguments when the write is waited for, if it succeeded.
        """
        self.start(bytes_at(buffer, n_bytes, None), offset, callback)

    def write_tensor(
        self, tensor: torch.Tensor, offset: int, callback: Callback | None = None, pinned: torch.Tensor | None = None
    ) -> None:
        """Start writing a tensor, which may be changed after :meth:`sync_h2d`. See :meth:`AsyncFileWriter.write_tensor`."""
        if pinned is None:
            self.start(tensor, offset, callback, _UNCOPIED)
            return
        if pinned.shape != tensor.shape or pinned.dtype != tensor.dtype or not pinned.is_cpu:
            wanted, got = (f"{each.dtype} of shape {tuple(each.shape)}" for each in (tensor, pinned))
            raise ValueError(f"pinned must be on the CPU, {wanted}, as the tensor; got {got} on {pinned.device}")
        pinned.detach().copy_(tensor.detach())
        self.start(pinned, offset, callback)

    def register_h2d(self, num_tensors: int) -> None:
        """Accept the number of tensors that will be written. No effect: they are counted as they come."""

    def sync_h2d(self) -> None:
        """Wait for the writes of tensors that were not copied. Raises the OSError of the first that failed."""
        self._operations.finish_all(_UNCOPIED)

    def synchronize(self) -> None:
        """Wait for all writes, and call their callbacks. Raises the OSError of the first that failed."""
        self._operations.finish_all()

    def start(
        self, tensor: torch.Tensor, offset: int, callback: Callback | None, subjects: frozenset[object] = frozenset()
    ) -> None:
        """Start writing a tensor at an offset in bytes. Returns at once, and keeps the tensor's storage until it is written.

        Not part of TensorNVMe's contract.
        """
        self._operations.start(lambda: self._engine.write(tensor, self._file, offset), subjects, _nothing, _nothing, callback)


class AsyncFileWriter:
    """Writes one file from its start, in the background, each piece directly after the one before.

    The errors of writes are raised by :meth:`synchronize`, or :meth:`sync_before_step`. If the writer is dropped, or the
    interpreter exits, without synchronizing, all writes are waited for and an error is only reported on stderr. Bytes are on
    stable storage after an ``fsync`` of the file, not before. Not thread-safe. Contract: ``tensornvme.async_file_io``.

    Args:
        path: Path of the file, which is created or emptied. Or, for callers of older TensorNVMe versions, a binary file object
            open for writing; it is written from its start and never closed.
        n_entries: Accepted and checked; the settings of the drive say how many blocks are under way.
        backend: ``uring``, ``aio`` or ``pthread``. If it does not work here, another is used, with a RuntimeWarning. None for the
            first that works.
        n_tasks: Accepted without effect.
        fp: The same file object, by keyword.

    Attributes:
        fd: Descriptor of the file.
        fp: The file object that the writer was made with, or None.
        offset: Where the next piece is written, in bytes from the start of the file.
        io: What writes by offsets, with the methods of ``tensornvme._C.AsyncFileWriter``.

    Raises:
        TypeError: If it is given no file, or two.
        RuntimeError: For an unknown backend.
        ValueError: If ``n_entries`` is less than 1.
        OSError: If the file cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | IO[bytes] | None = None,
        n_entries: int = 16,
        backend: str | None = None,
        n_tasks: int | None = None,
        *,
        fp: IO[bytes] | None = None,
    ) -> None:
        target = path if fp is None else fp
        if target is None or (path is not None and fp is not None):
            raise TypeError("an AsyncFileWriter needs either path or fp")
        self.offset = 0
        self.fp: IO[bytes] | None = None
        owned = None
        if isinstance(target, str | os.PathLike):
            self.fd = owned = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o664)
        else:
            target.flush()
            self.fp, self.fd = target, target.fileno()
        try:
            self.io = DescriptorWriter(self.fd, n_entries, backend)
        except BaseException:
            if owned is not None:
                os.close(owned)
            raise
        if owned is not None:
            weakref.finalize(self, os.close, owned)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Start writing bytes, and return how many. A bytearray or memoryview is copied first: it may be changed at once."""
        kept = data if isinstance(data, bytes) else bytes(memoryview(data))
        address = ctypes.cast(ctypes.c_char_p(kept), ctypes.c_void_p).value
        assert address is not None
        self.write_raw(kept, address, len(kept), self.offset)
        return len(kept)

    def write_raw(self, py_ref: object, buffer: int, n_bytes: int, offset: int) -> None:
        """Start writing host memory, given by its address, and advance :attr:`offset` by ``n_bytes``.

        Args:
            py_ref: What the memory belongs to. Kept until it is written, and not to be changed until then.
            buffer: Address of the memory.
            n_bytes: Bytes to write.
            offset: Bytes from the start of the file.

        Raises:
            ValueError: If ``py_ref`` is a tensor on a device.
        """
        if isinstance(py_ref, torch.Tensor) and not py_ref.is_cpu:
            raise ValueError(f"only host memory can be written by its address, got a tensor on {py_ref.device}: use write_tensor")
        self.io.start(bytes_at(buffer, n_bytes, py_ref), offset, None)
        self.offset += n_bytes

    def write_tensor(self, tensor: torch.Tensor, pinned: torch.Tensor | None = None) -> None:
        """Start writing a tensor. It may be changed after :meth:`sync_before_step`.

        Args:
            tensor: CPU or CUDA tensor of any dtype. One that is not contiguous is copied.
            pinned: CPU tensor of the same shape and dtype. The tensor is copied to it before this returns, and the copy is
                written: the tensor may be changed at once, ``pinned`` only after :meth:`synchronize`.

        Raises:
            ValueError: If ``pinned`` has another shape or dtype, or is not on the CPU.
            OSError: If the drive has too little room (ENOSPC).
        """
        self.io.write_tensor(tensor, self.offset, None, pinned)
        self.offset += tensor.nbytes

    def register_h2d(self, num_tensors: int) -> None:
        """Accept the number of tensors that will be written. No effect: they are counted as they come."""

    def sync_before_step(self) -> None:
        """Wait until all tensors given to :meth:`write_tensor` may be changed: until those without ``pinned`` are written.

        Raises:
            OSError: The error of the first write that failed.
        """
        self.io.sync_h2d()

    def flush(self) -> None:
        """Do nothing: for ``torch.save`` and others that flush what they write to."""

    def synchronize(self) -> None:
        """Wait for all writes.

        Raises:
            OSError: The error of the first write that failed. The file is incomplete then.
        """
        self.io.synchronize()

    def __repr__(self) -> str:
        return representation(self, lambda: path_list([self.io.path]), lambda: f"offset={self.offset}")


def bytes_at(address: int, nbytes: int, owner: object) -> torch.Tensor:
    """Return memory as a tensor of bytes, which keeps what the memory belongs to."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = (ctypes.c_char * nbytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


def _path_of(fd: int) -> str:
    """Return the path that an open file has now, or ``/proc/self/fd/N`` if it was renamed, removed or cannot be looked up."""
    link = f"/proc/self/fd/{fd}"
    with contextlib.suppress(OSError):
        path = os.readlink(link)
        if os.path.samestat(os.stat(path), os.fstat(fd)):
            return path
    return link


def _nothing() -> None:
    """Do nothing."""


def _finish(operations: Operations, file: File, process: int) -> None:
    """Wait for all writes, then close the file; nothing in a forked child. Raises the first error."""
    if os.getpid() != process:
        return
    first: OSError | None = None
    while operations:
        try:
            operations.finish_all()
        except OSError as error:
            first = first or error
    file.close()
    if first is not None:
        raise first
