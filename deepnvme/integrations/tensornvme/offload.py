"""TensorNVMe's ``Offloader`` and ``DiskOffloader``: tensors in one file, by keys or by themselves."""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
import weakref
from collections.abc import Hashable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch

from deepnvme._descriptions import path_list, representation, state_text
from deepnvme._interrupts import defer_interrupts
from deepnvme._lazy import public_names
from deepnvme.engine import Engine, File
from deepnvme.memory.alignment import padded
from deepnvme.memory.tensor_bytes import flat_bytes
from deepnvme.profiles import create_engine
from deepnvme.store.extents import ExtentMap

from .backends import settings_with
from .operations import Callback, Operation, Operations

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DiskOffloader", "Offloader"]

__dir__ = public_names(__name__)

Memory = torch.Tensor | torch.UntypedStorage
"""What is written and read. A storage is also freed when it is written, and allocated to be read into."""


class _Stored(NamedTuple):
    """What the file has under one key."""

    offset: int
    """Bytes from the start of the file. Each tensor begins at a multiple of the page size."""
    sizes: list[int]
    """Bytes of each tensor."""
    storages: list[torch.UntypedStorage]
    """A DiskOffloader's freed storages. Kept, since their addresses are the key, and a new storage could get the same one."""

    @property
    def length(self) -> int:
        """Bytes that the tensors have in the file, each padded to whole pages."""
        return sum(map(padded, self.sizes))

    def offsets(self) -> list[int]:
        """Return where each tensor begins in the file."""
        starts = [self.offset]
        for size in self.sizes[:-1]:
            starts.append(starts[-1] + padded(size))
        return starts


class TensorFile:
    """Base of both offloaders: a file of tensors, each kept under a key until it is read. Not thread-safe.

    A transfer's error is raised, and its callback called, by the method that waits for it: ``sync_*``, ``synchronize``, or one
    that uses a key or memory of a transfer that is still under way.
    """

    def __init__(self, filename: str | os.PathLike[str], n_entries: int, backend: str) -> None:
        self._path = os.path.abspath(os.fspath(filename))
        self._process = os.getpid()
        self._extents = ExtentMap()
        self._stored: dict[Hashable, _Stored] = {}
        self._reads, self._writes = Operations(), Operations()
        self._engine = create_engine(settings_with(self._path, n_entries, backend), from_user=False)
        with defer_interrupts():
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
            try:
                self._file = self._engine.open(self._path, "r+", whole_pages=True)
            except BaseException:
                os.unlink(self._path)
                raise
            self._finalizer = weakref.finalize(self, _close_and_remove, self._engine, self._file, self._path, self._process)

    def sync_write_events(self) -> None:
        """Wait for all writes, and call their callbacks. Raises the OSError of the first that failed."""
        self._writes.finish_all()

    def sync_read_events(self) -> None:
        """Wait for all reads, and call their callbacks. Raises the OSError of the first that failed."""
        self._reads.finish_all()

    def synchronize(self) -> None:
        """Wait for all writes and reads, and call their callbacks. Raises the OSError of the first that failed."""
        while self._writes or self._reads:  # their callbacks may start others
            self._writes.finish_all()
            self._reads.finish_all()

    def close(self) -> None:
        """Synchronize, then remove the file with all that is in it. Idempotent.

        Leaving a ``with`` block does the same. Dropping the last reference, and the interpreter's exit, wait and remove the file,
        but call no callbacks. Not in TensorNVMe, which leaves it to ``del``.

        Raises:
            OSError: The error of a transfer; the file is removed all the same.
        """
        try:
            self.synchronize()
        finally:
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return representation(
            self, lambda: path_list([self._path]), lambda: state_text(not self._finalizer.alive, self._process)
        )

    def _write(self, key: Hashable, memory: Sequence[Memory], callback: Callback | None = None) -> Operation:
        """Start writing under a key, replacing what is there. Blocks only for earlier transfers that conflict."""
        self._finish_before(key, memory, writing=True)
        sizes = list(map(_nbytes, memory))
        if not all(sizes):
            raise RuntimeError("a tensor without memory cannot be written: it is empty, or has been offloaded already")
        storages = _resized(memory)
        tensors = [flat_bytes(each) for each in memory]  # raises for a lazy conjugate: before what is stored is forgotten
        with defer_interrupts():
            if key in self._stored:
                _forget(self._stored, self._extents, key)
            stored = _Stored(self._extents.take(sum(map(padded, sizes))), sizes, storages)
            self._stored[key] = stored
            return self._writes.start(
                lambda: self._engine.write_many(tensors, self._file, stored.offsets()),
                _subjects(key, memory),
                on_success=functools.partial(_free, storages),
                on_failure=functools.partial(_forget, self._stored, self._extents, key),
                callback=callback,
            )

    def _read(self, key: Hashable, memory: Sequence[Memory], callback: Callback | None = None) -> Operation:
        """Start reading what is under a key. Its space is free when it has been read; after an error it can be read again."""
        self._finish_before(key, memory, writing=False)
        stored = self._stored.get(key)
        if stored is None:
            raise RuntimeError("nothing is stored for this: it was not written, or has been read since")
        storages = _resized(memory)
        sizes = [_nbytes(each) for each in memory]
        freed = bool(storages) and not any(sizes)
        if sizes != stored.sizes and not freed:
            raise RuntimeError(f"what is stored has {stored.sizes} bytes, the tensors to read it into have {sizes}")
        with defer_interrupts():
            if freed:
                _allocate(storages, stored.sizes)
            tensors = [flat_bytes(each) for each in memory]
            return self._reads.start(
                lambda: self._engine.read_many(tensors, self._file, stored.offsets()),
                _subjects(key, memory),
                on_success=functools.partial(_forget, self._stored, self._extents, key),
                on_failure=functools.partial(_free, storages),
                callback=callback,
            )

    def _finish_before(self, key: Hashable, memory: Sequence[Memory], writing: bool) -> None:
        """Wait for earlier transfers that conflict with this one.

        A write conflicts with reads of the same key or memory, and a read with writes of them. Two writes, or two reads, conflict
        only if they have the same key, or free or allocate the same storage: slices of one tensor can be written at a time.

        Raises:
            ValueError: If the offloader is closed.
            OSError: The error of a transfer waited for.
        """
        if not self._finalizer.alive:
            raise ValueError(f"this {type(self).__name__} is closed")
        subjects = _subjects(key, memory)
        exclusive = _subjects(key, _resized(memory))
        self._writes.finish_all(exclusive if writing else subjects)
        self._reads.finish_all(subjects if writing else exclusive)


class Offloader(TensorFile):
    """Tensors in one file, each or each list of them under a key. Contract: ``tensornvme._C.Offloader``.

    An existing file is overwritten. The file is removed by :meth:`close`, with the last reference, or when the interpreter exits.

    Args:
        filename: The file.
        n_entries: Accepted and checked; the settings of the drive say how many blocks are under way.
        backend: ``uring``, ``aio`` or ``pthread``. If it does not work here, another is used, with a RuntimeWarning.

    Raises:
        RuntimeError: For an unknown backend.
        ValueError: If ``n_entries`` is less than 1.
        OSError: If the file cannot be made.
    """

    def __init__(self, filename: str | os.PathLike[str], n_entries: int, backend: str = "aio") -> None:
        super().__init__(filename, n_entries, backend)

    def async_write(self, tensor: torch.Tensor, key: str, callback: Callback | None = None) -> None:
        """Start writing a tensor under a key, in place of what is there. It must not be changed until the write is waited for.

        Args:
            tensor: Contiguous CPU tensor.
            key: The key.
            callback: Called without arguments when the write is waited for, if it succeeded.

        Raises:
            RuntimeError: If the tensor is not contiguous, not on the CPU or empty.
            OSError: If the drive has too little room (ENOSPC); or the error of an earlier transfer of this key or tensor.
            ValueError: If the offloader is closed.
        """
        self._write(key, _checked([tensor]), callback)

    def async_read(self, tensor: torch.Tensor, key: str, callback: Callback | None = None) -> None:
        """Start reading what is under a key into a tensor. Reading it frees its space in the file, and the key.

        Args:
            tensor: Contiguous CPU tensor of as many bytes as were written. Not to be touched until the read is waited for.
            key: The key.
            callback: Called without arguments when the read is waited for, if it succeeded.

        Raises:
            RuntimeError: As for :meth:`async_write`; if nothing is stored under the key, or something of another size.
            OSError: The error of an earlier transfer of this key or tensor.
            ValueError: If the offloader is closed.
        """
        self._read(key, _checked([tensor]), callback)

    def sync_write(self, tensor: torch.Tensor, key: str) -> None:
        """Write a tensor as :meth:`async_write` does, and wait for this write. Raises its OSError too."""
        self._writes.finish(self._write(key, _checked([tensor])))

    def sync_read(self, tensor: torch.Tensor, key: str) -> None:
        """Read a tensor as :meth:`async_read` does, and wait for this read. Raises its OSError too."""
        self._reads.finish(self._read(key, _checked([tensor])))

    def async_writev(self, tensors: Sequence[torch.Tensor], key: str, callback: Callback | None = None) -> None:
        """Start writing several tensors under one key, as :meth:`async_write` does one."""
        self._write(key, _checked(tensors), callback)

    def async_readv(self, tensors: Sequence[torch.Tensor], key: str, callback: Callback | None = None) -> None:
        """Start reading the tensors that are under one key, in the order that they were written, as :meth:`async_read` does."""
        self._read(key, _checked(tensors), callback)

    def sync_writev(self, tensors: Sequence[torch.Tensor], key: str) -> None:
        """Write several tensors as :meth:`async_writev` does, and wait for this write. Raises its OSError too."""
        self._writes.finish(self._write(key, _checked(tensors)))

    def sync_readv(self, tensors: Sequence[torch.Tensor], key: str) -> None:
        """Read several tensors as :meth:`async_readv` does, and wait for this read. Raises its OSError too."""
        self._reads.finish(self._read(key, _checked(tensors)))


class DiskOffloader(TensorFile):
    """Moves tensors to a file and back: when a write has succeeded, the tensor's memory is freed; reading brings it back.

    A tensor is known by its storage. All of the storage is moved, so tensors that share it come and go together, and any of them
    reads it. Contract: ``tensornvme.DiskOffloader``.

    >>> offloader = DiskOffloader("/mnt/nvme/offload")
    >>> offloader.sync_write(x)     # x has no memory now
    >>> offloader.sync_read(x)

    Args:
        dir_name: Directory, made if missing, for the file ``offload-UUID``. The file is removed by :meth:`close`, with the last
            reference, or when the interpreter exits.
        n_entries: Accepted and checked; the settings of the drive say how many blocks are under way.
        backend: ``uring``, ``aio`` or ``pthread``. If it does not work here, another is used, with a RuntimeWarning.

    Raises:
        RuntimeError: For an unknown backend.
        ValueError: If ``n_entries`` is less than 1.
        OSError: If the directory or the file cannot be made.
    """

    def __init__(self, dir_name: str | os.PathLike[str], n_entries: int = 16, backend: str = "uring") -> None:
        os.makedirs(dir_name, exist_ok=True)
        super().__init__(os.path.join(dir_name, f"offload-{uuid.uuid4().hex}"), n_entries, backend)

    def async_write(self, tensor: torch.Tensor, callback: Callback | None = None) -> None:
        """Start writing a tensor. Its memory is freed when the write is waited for, if it succeeded.

        Args:
            tensor: Contiguous CPU tensor, whose storage torch can resize. Not to be changed until the write is waited for.
            callback: Called without arguments when the memory is freed.

        Raises:
            RuntimeError: If the tensor is not contiguous, not on the CPU, of a storage that cannot be resized, or has no memory
                because it has been offloaded already or is empty.
            OSError: If the drive has too little room (ENOSPC); or the error of an earlier transfer of this tensor.
            ValueError: If the offloader is closed.
        """
        self.async_writev([tensor], callback)

    def async_read(self, tensor: torch.Tensor, callback: Callback | None = None) -> None:
        """Start reading a tensor, into new memory. Reading it frees its space in the file.

        Args:
            tensor: A tensor that was written alone, not in a list. Not to be touched until the read is waited for.
            callback: Called without arguments when the read is waited for, if it succeeded.

        Raises:
            RuntimeError: As for :meth:`async_write`; if the tensor was not written, or has been read since.
            OSError: The error of an earlier transfer of this tensor.
            ValueError: If the offloader is closed.
        """
        self.async_readv([tensor], callback)

    def sync_write(self, tensor: torch.Tensor) -> None:
        """Write a tensor as :meth:`async_write` does, wait for this write and free the memory. Raises its OSError too."""
        self.sync_writev([tensor])

    def sync_read(self, tensor: torch.Tensor) -> None:
        """Read a tensor as :meth:`async_read` does, and wait for this read. Raises its OSError too."""
        self.sync_readv([tensor])

    def async_writev(self, tensors: Sequence[torch.Tensor], callback: Callback | None = None) -> None:
        """Start writing several tensors together, as :meth:`async_write` does one. They can only be read together."""
        self._write(*_storages(tensors), callback)

    def async_readv(self, tensors: Sequence[torch.Tensor], callback: Callback | None = None) -> None:
        """Start reading tensors that were written together, in the same order, as :meth:`async_read` does one."""
        self._read(*_storages(tensors), callback)

    def sync_writev(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write several tensors as :meth:`async_writev` does, and wait for this write. Raises its OSError too."""
        self._writes.finish(self._write(*_storages(tensors)))

    def sync_readv(self, tensors: Sequence[torch.Tensor]) -> None:
        """Read several tensors as :meth:`async_readv` does, and wait for this read. Raises its OSError too."""
        self._reads.finish(self._read(*_storages(tensors)))


def _checked(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors as a list.

    Raises:
        RuntimeError: As TensorNVMe does, if there are none, or one is not dense, contiguous and on the CPU.
        TypeError: If one is no tensor.
    """
    checked = list(tensors)
    if not checked:
        raise RuntimeError("a list of tensors must not be empty")
    for tensor in checked:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"only tensors can be offloaded, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided or not tensor.is_cpu or not tensor.is_contiguous():
            raise RuntimeError("a tensor must be dense, contiguous and on the CPU: make a copy by .cpu().contiguous()")
    return checked


def _storages(tensors: Sequence[torch.Tensor]) -> tuple[Hashable, list[torch.UntypedStorage]]:
    """Return the key of tensors that are offloaded together, and their storages. Raises RuntimeError for unsuitable ones."""
    storages = [tensor.untyped_storage() for tensor in _checked(tensors)]
    if not all(storage.resizable() for storage in storages):
        raise RuntimeError("a tensor's memory cannot be freed: it is not torch's own, as of a tensor that shares a NumPy array's")
    return tuple(storage._cdata for storage in storages), storages


def _nbytes(memory: Memory) -> int:
    """Return the bytes of a tensor or a storage."""
    return memory.nbytes() if isinstance(memory, torch.UntypedStorage) else memory.nbytes


def _resized(memory: Sequence[Memory]) -> list[torch.UntypedStorage]:
    """Return the storages that are freed when written, and allocated to be read: a DiskOffloader's; none of an Offloader's."""
    return [each for each in memory if isinstance(each, torch.UntypedStorage)]


def _subjects(key: Hashable, memory: Sequence[Memory]) -> frozenset[object]:
    """Return the key, marked as one, and the addresses of the storages: what :class:`Operations` finds conflicts by."""
    storages = (each if isinstance(each, torch.UntypedStorage) else each.untyped_storage() for each in memory)
    return frozenset({("key", key), *(storage._cdata for storage in storages)})


def _allocate(storages: Sequence[torch.UntypedStorage], sizes: Sequence[int]) -> None:
    """Allocate the memory of all storages, or of none: then the error is raised."""
    try:
        for storage, size in zip(storages, sizes, strict=True):
            storage.resize_(size)
    except BaseException:
        _free(storages)
        raise


def _free(storages: Sequence[torch.UntypedStorage]) -> None:
    """Free the memory of storages."""
    for storage in storages:
        storage.resize_(0)


# Takes no offloader: an operation that referred to its offloader would keep it after the last reference is dropped.
def _forget(entries: dict[Hashable, _Stored], extents: ExtentMap, key: Hashable) -> None:
    """Free the space of what is stored under a key."""
    stored = entries.pop(key)
    extents.give_back(stored.offset, stored.length)


def _close_and_remove(engine: Engine, file: File, path: str, process: int) -> None:
    """Wait for all transfers and remove the file; nothing in a forked child."""
    if os.getpid() != process:
        return
    try:
        engine.close()
    finally:
        try:
            file.close()
        finally:
            with contextlib.suppress(FileNotFoundError):  # the whole directory may have been removed
                os.unlink(path)
