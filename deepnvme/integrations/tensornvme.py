"""TensorNVMe's ``DiskOffloader`` and file writer on this package's engine, for code that was written for TensorNVMe.

    import deepnvme.integrations.tensornvme as d
    d.enable()                                  # ``import tensornvme`` then imports these classes

TensorNVMe need not be installed, and is never imported. Contract: hpcaitech/TensorNVMe at commit cb5c3a9f.

The method that waits for a transfer raises the transfer's error, or calls its callback. If the method raises or is interrupted,
it does not wait for the remaining transfers: they stay in flight, and the next call waits for them. No class is thread-safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import uuid
import weakref
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from deepnvme._interrupts import defer_interrupts
from deepnvme.checkpoint.file_io import shared_engine
from deepnvme.drives.profiles import AnyPath, engine_for
from deepnvme.engine import File, Future
from deepnvme.memory.alignment import padded
from deepnvme.memory.tensor_bytes import flat_bytes
from deepnvme.ops import load_async_io
from deepnvme.store.extents import ExtentMap

__all__ = ["AsyncFileWriter", "DiskOffloader", "disable", "enable", "get_backends"]

Callback = Callable[[], object]
_BACKENDS = {"uring": "io_uring", "aio": "libaio", "pthread": "threads"}


def get_backends() -> set[str]:
    """Return which of the backends ``uring``, ``aio`` and ``pthread`` work on this machine.

    TensorNVMe instead returns the backends that it was compiled with, whether or not the kernel accepts them.
    """
    works = load_async_io().backends()
    return {name for name, ours in _BACKENDS.items() if works[ours] is None}


class _Stored(NamedTuple):
    """Where tensors that were offloaded together are in the file."""

    offsets: list[int]
    """Offset of each tensor in the file, in bytes: a multiple of the page size."""
    sizes: list[int]
    """Bytes of each tensor."""
    storages: list[torch.UntypedStorage]
    """The freed storages. They are kept, because otherwise a new storage could get the same address."""


class _Transfer(NamedTuple):
    """One write or read in flight. It has no reference to its offloader, so that it does not keep an unused offloader alive."""

    future: Future
    reading: bool = False
    storages: tuple[torch.UntypedStorage, ...] = ()
    """Storages of a DiskOffloader's tensors that are written or read."""
    callback: Callback | None = None
    """The user's function, called once after the transfer has succeeded; None for none."""
    copied: bool = False
    """Whether an AsyncFileWriter writes a copy, so that the user's own memory may be changed."""


class _Transfers:
    """Base class with the transfers in flight, oldest first."""

    def __init__(self, backend: str | None) -> None:
        if backend is not None and backend not in _BACKENDS:
            raise RuntimeError(f"backend must be one of {', '.join(_BACKENDS)}, got {backend!r}")
        self._transfers: list[_Transfer] = []

    def synchronize(self) -> None:
        """Wait for all transfers, and call their callbacks. Raises the OSError of the first that failed."""
        self._finish(lambda transfer: True)

    def _finish(self, chosen: Callable[[_Transfer], bool]) -> None:
        """Wait for the transfers that ``chosen`` selects, oldest first, and call their callbacks. Raises the first error.

        Also waits for selected transfers that callbacks start. Ctrl-C interrupts only the waiting and the callbacks.
        """
        while (transfer := next(filter(chosen, self._transfers), None)) is not None:
            error = transfer.future.exception()
            with defer_interrupts():
                self._transfers.remove(transfer)
                self._end(transfer.reading, transfer.storages, error is None)
            if error is not None:
                raise error
            if transfer.callback is not None:
                transfer.callback()

    def _end(self, reading: bool, storages: tuple[torch.UntypedStorage, ...], succeeded: bool) -> None:
        """Update the records at the end of a transfer. Called once for each transfer. The base class does nothing."""


class DiskOffloader(_Transfers):
    """Moves tensors to a file and back: after a successful write, the tensor's memory is freed; reading allocates it again.

    A tensor is identified by its storage. The whole storage is moved, so tensors that share a storage are written and read
    together, and reading any one of them reads all. Contract: ``tensornvme.DiskOffloader``.

    >>> offloader = DiskOffloader("/mnt/nvme/offload")
    >>> offloader.sync_write(x)     # x has no memory now
    >>> offloader.sync_read(x)

    Args:
        dir_name: Directory for the file ``offload-UUID``, created if missing. The file is removed by :meth:`close`, with the
            last reference, or when the interpreter exits.
        n_entries: Accepted without effect: the settings of the drive determine how many I/O blocks are in flight.
        backend: ``uring``, ``aio`` or ``pthread``. Checked, but the settings of the drive determine the backend.

    Raises:
        RuntimeError: For an unknown backend.
        OSError: If the directory or the file cannot be created.
    """

    def __init__(self, dir_name: AnyPath, n_entries: int = 16, backend: str = "uring") -> None:
        super().__init__(backend)
        self._extents = ExtentMap()
        self._stored: dict[tuple[int, ...], _Stored] = {}  # by the addresses of the storages
        os.makedirs(dir_name, exist_ok=True)
        filename = os.path.join(dir_name, f"offload-{uuid.uuid4().hex}")
        self._engine = engine_for(filename)
        with defer_interrupts():
            self._file = self._engine.open(filename, "w+", whole_pages=True)
            os.chmod(filename, 0o600)
            self._finalizer = weakref.finalize(self, _close, os.getpid(), self._transfers, self._file, os.path.abspath(filename))

    def sync_write_events(self) -> None:
        """Wait for all writes, and call their callbacks. Raises the OSError of the first that failed."""
        self._finish(lambda transfer: not transfer.reading)

    def sync_read_events(self) -> None:
        """Wait for all reads, and call their callbacks. Raises the OSError of the first that failed."""
        self._finish(lambda transfer: transfer.reading)

    def close(self) -> None:
        """Wait for all transfers, call their callbacks, and remove the file. Idempotent.

        The offloader also waits and removes the file, but calls no callbacks, when its last reference is dropped or the
        interpreter exits. TensorNVMe has no such method and removes the file only on ``del``.

        Raises:
            OSError: The error of a transfer. The file is removed all the same.
        """
        try:
            self.synchronize()
        finally:
            self._finalizer()

    def async_write(self, tensor: torch.Tensor, callback: Callback | None = None) -> None:
        """Start writing a tensor. If the write succeeds, the tensor's memory is freed when the write is waited for.

        Args:
            tensor: Contiguous CPU tensor, whose storage torch can resize. Not to be changed until the write is waited for.
            callback: Called without arguments when the memory is freed.

        Raises:
            RuntimeError: If the tensor is not contiguous, not on the CPU, has a storage that cannot be resized, or has no
                memory because it is empty or already offloaded.
            OSError: If the drive has too little room (ENOSPC); or the error of an earlier transfer of this tensor.
            ValueError: If the offloader is closed.
        """
        self._start(False, [tensor], callback)

    def async_read(self, tensor: torch.Tensor, callback: Callback | None = None) -> None:
        """Start reading a tensor into new memory. Reading frees the tensor's space in the file.

        Args:
            tensor: A tensor that was written alone, not in a list. Not to be touched until the read is waited for.
            callback: Called without arguments after the read has succeeded, by the method that waits for it.

        Raises:
            RuntimeError: As for :meth:`async_write`; or if the tensor was not written, or has been read since.
            OSError: The error of an earlier transfer of this tensor.
            ValueError: If the offloader is closed.
        """
        self._start(True, [tensor], callback)

    def sync_write(self, tensor: torch.Tensor) -> None:
        """Write a tensor as :meth:`async_write` does, wait for this write and free the memory. Raises its OSError too."""
        self._run(False, [tensor])

    def sync_read(self, tensor: torch.Tensor) -> None:
        """Read a tensor as :meth:`async_read` does, and wait for this read. Raises its OSError too."""
        self._run(True, [tensor])

    def async_writev(self, tensors: Sequence[torch.Tensor], callback: Callback | None = None) -> None:
        """Start writing several tensors, like :meth:`async_write`. They can only be read together, in the same order."""
        self._start(False, tensors, callback)

    def async_readv(self, tensors: Sequence[torch.Tensor], callback: Callback | None = None) -> None:
        """Start reading tensors that were written together, in the same order, like :meth:`async_read`."""
        self._start(True, tensors, callback)

    def sync_writev(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write several tensors as :meth:`async_writev` does, and wait for this write. Raises its OSError too."""
        self._run(False, tensors)

    def sync_readv(self, tensors: Sequence[torch.Tensor]) -> None:
        """Read several tensors as :meth:`async_readv` does, and wait for this read. Raises its OSError too."""
        self._run(True, tensors)

    def _start(self, reading: bool, tensors: Sequence[torch.Tensor], callback: Callback | None) -> _Transfer:
        """Start a transfer, and return it. Waits only for earlier transfers of the same memory.

        Raises what :meth:`async_write` and :meth:`async_read` document.
        """
        fit = (each.layout is torch.strided and each.is_cpu and each.is_contiguous() and not each.is_conj() for each in tensors)
        if not tensors or not all(fit):
            raise RuntimeError("tensors must be dense, contiguous, on the CPU, one at least: copy by resolve_conj().contiguous()")
        storages = tuple(tensor.untyped_storage() for tensor in tensors)
        known = {storage._cdata for storage in storages}
        self._finish(lambda other: not known.isdisjoint(part._cdata for part in other.storages))
        sizes = [storage.nbytes() for storage in storages]
        stored = self._stored.get(_key(storages))
        if reading and stored is None:
            raise RuntimeError("nothing is stored for this: it was not written, or has been read since")
        if not reading and not all(sizes):
            raise RuntimeError("a tensor without memory cannot be written: it is empty, or has been offloaded already")
        if not all(storage.resizable() for storage in storages):
            raise RuntimeError("a tensor's memory cannot be freed: it is not torch's own, but shared with NumPy or the like")
        if reading and stored is not None and any(sizes) and sizes != stored.sizes:
            raise RuntimeError(f"what is stored has {stored.sizes} bytes, the tensors to read it into have {sizes}")
        with defer_interrupts():
            try:
                if not reading or stored is None:
                    self._forget(storages)
                    offsets = [self._extents.take(padded(size)) for size in sizes]
                    stored = self._stored[_key(storages)] = _Stored(offsets, sizes, list(storages))
                else:
                    for storage, size in zip(storages, stored.sizes, strict=True):
                        storage.resize_(size)
                transfers = self._engine.read_many if reading else self._engine.write_many
                future = transfers(list(map(flat_bytes, storages)), self._file, stored.offsets)
            except BaseException:
                self._end(reading, storages, False)
                raise
            self._transfers.append(_Transfer(future, reading, storages, callback))
        return self._transfers[-1]

    def _run(self, reading: bool, tensors: Sequence[torch.Tensor]) -> None:
        """Start a transfer and wait for it."""
        started = self._start(reading, tensors, None)
        self._finish(lambda transfer: transfer is started)

    def _end(self, reading: bool, storages: tuple[torch.UntypedStorage, ...], succeeded: bool) -> None:
        """After a write or a failed read, free the memory. After a read or a failed write, forget the stored bytes."""
        if reading == succeeded:
            self._forget(storages)
        else:
            for storage in storages:
                storage.resize_(0)

    def _forget(self, storages: tuple[torch.UntypedStorage, ...]) -> None:
        """Forget what is stored of these storages, and free its space in the file. Does nothing if there is nothing."""
        stored = self._stored.pop(_key(storages), None)
        for offset, size in zip(stored.offsets, stored.sizes, strict=True) if stored is not None else ():
            self._extents.give_back(offset, padded(size))


def _key(storages: tuple[torch.UntypedStorage, ...]) -> tuple[int, ...]:
    """Return the addresses that identify the storages of tensors that are offloaded together."""
    return tuple(storage._cdata for storage in storages)


def _close(process: int, transfers: list[_Transfer], file: File, path: str | None = None) -> None:
    """Wait for all transfers, close the file, and remove it if its path is given. Does nothing in a forked child.

    Raises the first error.
    """
    if os.getpid() == process:
        errors = [transfer.future.exception() for transfer in transfers]
        file.close()
        with contextlib.suppress(FileNotFoundError):  # all of its directory may have been removed
            os.unlink(path) if path else None
        for error in filter(None, errors):
            raise error


class AsyncFileWriter(_Transfers):
    """Writes one file from its start, in the background. Each write begins where the previous one ended.

    The errors of writes are raised by :meth:`synchronize` or :meth:`sync_before_step`. If the writer is dropped, or the
    interpreter exits, without synchronizing, all writes are waited for and an error is only reported on stderr. Bytes are on
    stable storage only after an ``fsync`` of the file. Contract: ``tensornvme.async_file_io``.

    Args:
        path: Path of the file, which is created or emptied. File objects, which older versions of TensorNVMe took, are refused.
        n_entries: Accepted without effect: the settings of the drive determine how many I/O blocks are in flight.
        backend: ``uring``, ``aio``, ``pthread`` or None. Checked, but the settings of the drive determine the backend.
        n_tasks: Accepted without effect.

    Attributes:
        offset: Where the next write begins, in bytes from the start of the file.

    Raises:
        TypeError: If ``path`` is a file object.
        RuntimeError: For an unknown backend.
        OSError: If the file cannot be opened.
    """

    def __init__(self, path: AnyPath, n_entries: int = 16, backend: str | None = None, n_tasks: int | None = None) -> None:
        super().__init__(backend)
        self.offset = 0
        self._engine = shared_engine(Path(path))
        with defer_interrupts():
            self._file = self._engine.open(path, "w")
            weakref.finalize(self, _close, os.getpid(), self._transfers, self._file)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Start writing bytes, and return how many. A bytearray or memoryview is copied first and may be changed at once."""
        kept = data if isinstance(data, bytes) else bytes(memoryview(data))
        self.write_raw(kept, ctypes.cast(ctypes.c_char_p(kept), ctypes.c_void_p).value or 0, len(kept), self.offset)
        return len(kept)

    def write_raw(self, py_ref: object, buffer: int, n_bytes: int, offset: int) -> None:
        """Start writing host memory, given by its address, and advance :attr:`offset` by ``n_bytes``.

        Args:
            py_ref: Owner of the memory. Kept alive, and not to be changed, until the write has ended.
            buffer: Address of the memory.
            n_bytes: Bytes to write.
            offset: Where to write, in bytes from the start of the file.

        Raises:
            ValueError: If ``py_ref`` is a tensor on a device.
        """
        if isinstance(py_ref, torch.Tensor) and not py_ref.is_cpu:
            raise ValueError(f"only host memory can be written by its address, got a tensor on {py_ref.device}: use write_tensor")
        if n_bytes:
            memory = (ctypes.c_char * n_bytes).from_address(buffer)
            memory.owner = py_ref  # type: ignore[attr-defined]
            self._write(torch.frombuffer(memory, dtype=torch.uint8), offset, copied=True)
        self.offset += n_bytes

    def write_tensor(self, tensor: torch.Tensor, pinned: torch.Tensor | None = None) -> None:
        """Start writing a tensor. It may be changed after :meth:`sync_before_step`.

        Args:
            tensor: CPU or CUDA tensor of any dtype. A tensor that is not contiguous is copied.
            pinned: CPU tensor of the same shape and dtype. The tensor is copied to it before this returns, and the copy is
                written: the tensor may be changed at once, ``pinned`` only after :meth:`synchronize`.

        Raises:
            ValueError: If ``pinned`` has another shape or dtype, or is not on the CPU.
            OSError: If the drive has too little room (ENOSPC).
        """
        if pinned is not None:
            if pinned.shape != tensor.shape or pinned.dtype != tensor.dtype or not pinned.is_cpu:
                wanted, got = (f"{each.dtype} of shape {tuple(each.shape)}" for each in (tensor, pinned))
                raise ValueError(f"pinned must be on the CPU, {wanted}, as the tensor; got {got} on {pinned.device}")
            pinned.detach().copy_(tensor.detach())
        self._write(tensor if pinned is None else pinned, self.offset, copied=pinned is not None)
        self.offset += tensor.nbytes

    def register_h2d(self, num_tensors: int) -> None:
        """Ignore the number of tensors that will be written: it need not be known in advance."""

    def sync_before_step(self) -> None:
        """Wait until all tensors passed to :meth:`write_tensor` may be changed: until those without ``pinned`` are written.

        Raises:
            OSError: The error of the first write that failed.
        """
        self._finish(lambda transfer: not transfer.copied)

    def flush(self) -> None:
        """Do nothing. ``torch.save`` and other code that writes to a file object calls it."""

    def _write(self, tensor: torch.Tensor, offset: int, copied: bool) -> None:
        """Start writing a tensor, and record the write. Unless ``copied``, :meth:`sync_before_step` waits for it."""
        with defer_interrupts():
            self._transfers.append(_Transfer(self._engine.write(tensor, self._file, offset), copied=copied))


_modules: dict[str, ModuleType] = {}
"""The modules that :func:`enable` has made, by name; empty while disabled."""


def enable() -> None:
    """Make ``import tensornvme`` and its submodules import this package's classes, in this process.

    Call it before the program imports TensorNVMe or ColossalAI. TensorNVMe need not be installed; if it is, it is not imported.
    Idempotent.

    Raises:
        RuntimeError: If TensorNVMe itself has been imported already; nothing is changed then.
    """
    if _modules:
        return
    if "tensornvme" in sys.modules:
        raise RuntimeError("tensornvme has been imported already: call enable() before the program imports TensorNVMe")
    contents = {
        "tensornvme": (DiskOffloader,),
        "tensornvme.offload": (DiskOffloader, get_backends),
        "tensornvme.async_file_io": (AsyncFileWriter,),
    }
    for name, members in contents.items():
        package, _, last = name.rpartition(".")
        _modules[name] = module_from_spec(ModuleSpec(name, None, origin=__name__, is_package=not package))
        vars(_modules[name]).update({each.__name__: each for each in members})
        if package:
            setattr(_modules[package], last, _modules[name])
    sys.modules.update(_modules)


def disable() -> None:
    """Undo :func:`enable`: remove its modules. Classes imported from them stay usable. Idempotent."""
    for name, module in _modules.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _modules.clear()
