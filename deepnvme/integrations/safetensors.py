"""Have the ``safetensors`` library read tensors through the engine, and with it transformers, diffusers and accelerate.

    import deepnvme.integrations.safetensors as integration
    integration.enable()
    model = AutoModelForCausalLM.from_pretrained(name)

After that, ``safetensors.safe_open`` and what is built on it, such as ``safetensors.torch.load_file``, read whole tensors by
direct I/O into memory of their own. The library itself still opens each file and checks it. It also reads parts of tensors,
tensors for other frameworks and devices than torch on the CPU, and tensors of a file that was replaced or removed since it was
opened.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from deepnvme.checkpoint.file_io import shared_engine
from deepnvme.checkpoint.formats.elements import Elements
from deepnvme.checkpoint.formats.safetensors_header import read_header
from deepnvme.checkpoint.safetensors_files import load_elements

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig

__all__ = ["disable", "enable", "enabled"]

_AHEAD = 128 << 20
"""Bytes of the tensors that are read together, and of those that are read ahead meanwhile, unless one tensor is larger."""

_original: Any = None
"""The library's ``safe_open``; None until the first call of :func:`enable`."""
_aio_config: AioConfig | None = None
_changing = threading.Lock()


def enable(*, aio_config: AioConfig | None = None) -> None:
    """Read safetensors files through the engine, from now on.

    May be called before or after transformers, diffusers or accelerate are imported. Idempotent; the settings of the last call
    count. Tensors that are requested by ``get_slice`` are read ahead, in the order of the requests, when the first of them is
    used as a whole: up to 256 MiB.

    Args:
        aio_config: Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`.

    Raises:
        ImportError: If safetensors is not installed.
    """
    global _aio_config, _original
    import safetensors
    import safetensors.torch

    with _changing:
        _original = _original or safetensors.safe_open
        _aio_config = aio_config
        _replace(_original, OpenedFile)


def disable() -> None:
    """Restore the library's own reading. Files that are open stay as they are. Idempotent."""
    with _changing:
        if _original is not None:
            _replace(OpenedFile, _original)


@contextlib.contextmanager
def enabled(*, aio_config: AioConfig | None = None) -> Iterator[None]:
    """Call :func:`enable` for the ``with`` block, and :func:`disable` after it. The arguments are those of :func:`enable`."""
    enable(aio_config=aio_config)
    try:
        yield
    finally:
        disable()


def _replace(old: object, new: object) -> None:
    """Replace ``safe_open`` in every module that has imported it."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("safe_open") is old:
            names["safe_open"] = new


_TORCH = ("pt", "torch", "pytorch")
"""The library's names of the framework."""


class OpenedFile:
    """``safetensors.safe_open`` whose whole tensors are read by the engine. Arguments, methods and errors are the library's.

    In addition, reading raises OSError, which names the file, where the library's mapping would end the process.
    """

    def __init__(self, filename: str | os.PathLike[str], framework: str, device: Any = "cpu", **options: Any) -> None:
        reader = None
        if framework in _TORCH and str(device) == "cpu" and isinstance(filename, str | os.PathLike):
            # A file that this package cannot read is left to the library, which reads or refuses it.
            with contextlib.suppress(OSError):
                reader = _ReadAhead(filename)
        self._file = _original(filename, framework, device, **options)
        self._reader = reader

    def __enter__(self) -> OpenedFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor. Blocks."""
        tensor = None if self._reader is None else self._reader.tensor(name)
        return self._file.get_tensor(name) if tensor is None else tensor

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name, in the order of the file. Blocks."""
        names = self._file.offset_keys()
        if self._reader is not None:
            self._reader.want(names)
        return {name: self.get_tensor(name) for name in names}

    def stop_reading_ahead(self) -> None:
        """Read only what is asked for: somebody needs parts of tensors, such as the rank of a tensor-parallel model."""
        if self._reader is not None:
            self._reader.stop()

    def get_slice(self, name: str) -> TensorSlice:
        """Return an object to be indexed. Does not block."""
        part = self._file.get_slice(name)
        if self._reader is not None:
            self._reader.want([name])
        return TensorSlice(part, self, name)


class TensorSlice:
    """What ``get_slice`` returns: ``[...]`` and ``[:]`` are the whole tensor, which is read by the engine."""

    def __init__(self, part: Any, file: OpenedFile, name: str) -> None:
        self._part = part
        self._file = file
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, key: Any) -> torch.Tensor:
        if key is Ellipsis or (isinstance(key, slice) and key == slice(None) and self._part.get_shape()):
            return self._file.get_tensor(self._name)
        self._file.stop_reading_ahead()
        return self._part[key]  # type: ignore[no-any-return]


class _ReadAhead:
    """Reads the tensors of one file in groups: the tensor that is asked for, and tensors that were wanted after it. Thread-safe.

    While a group is being used, the next one is read. One thread reads, so that groups are read one after the other.

    Args:
        path: The file.

    Raises:
        CorruptCheckpoint: If the header is damaged.
        OSError: If the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._process = os.getpid()
        self._inode = _inode(path)
        self._elements = read_header(path)
        self._engine = shared_engine(path, _aio_config)
        self._reading = ThreadPoolExecutor(1, "deepnvme-safetensors")
        self._lock = threading.Lock()
        self._stopped = False
        self._wanted: dict[str, None] = {}
        self._groups: dict[str, Future[dict[str, torch.Tensor]]] = {}
        self._last: Future[dict[str, torch.Tensor]] | None = None

    def want(self, names: list[str]) -> None:
        """Announce tensors that will be asked for, in this order."""
        with self._lock:
            if not self._stopped:
                self._wanted.update((name, None) for name in names if name not in self._groups)

    def stop(self) -> None:
        """Read nothing ahead from now on."""
        with self._lock:
            self._stopped = True
            self._wanted.clear()

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return a tensor; None if the file has no such tensor, or was removed or replaced since it was opened. Blocks.

        Raises:
            OSError: From reading this tensor, naming the file.
        """
        if name not in self._elements or os.getpid() != self._process:  # a forked child has no thread that reads
            return None
        with self._lock:
            group = self._groups.get(name) or self._start(name)
            del self._groups[name]
            if group is self._last and self._wanted:
                self._start(next(iter(self._wanted)))
        try:
            try:
                tensor = group.result().pop(name)
            except OSError:  # perhaps from another tensor of the group
                tensor = self._read({name: self._elements[name]})[name]
        except OSError:
            if self._is_same_file():
                raise
            return None
        return tensor if self._is_same_file() else None

    def close(self) -> None:
        """Forget all tensors. Blocks while one group is read."""
        self._reading.shutdown(cancel_futures=True)

    def _start(self, first: str) -> Future[dict[str, torch.Tensor]]:
        """Start reading a group that begins with a tensor."""
        group = {first: self._elements[first]}
        self._wanted.pop(first, None)
        nbytes = group[first].nbytes
        for name in list(self._wanted):
            nbytes += self._elements[name].nbytes
            if nbytes > _AHEAD:
                break
            group[name] = self._elements[name]
            del self._wanted[name]
        self._last = self._reading.submit(self._read, group)
        self._groups.update(dict.fromkeys(group, self._last))
        return self._last

    def _read(self, group: dict[str, Elements]) -> dict[str, torch.Tensor]:
        """Read tensors. Blocks."""
        return load_elements(self._path, group, torch.device("cpu"), self._engine, None)

    def _is_same_file(self) -> bool:
        """Return whether the path still has the file that was opened, whose inode is in use while the library has it open."""
        try:
            return _inode(self._path) == self._inode
        except FileNotFoundError:
            return False


def _inode(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return the device and the number of a file's inode."""
    status = os.stat(path)
    return status.st_dev, status.st_ino
