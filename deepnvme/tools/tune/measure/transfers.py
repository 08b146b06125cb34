"""The ways to move a tensor that ds_io can measure: one handle, a new handle for each call, and torch.save and torch.load."""

from __future__ import annotations

import abc
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from deepnvme.config import AioConfig
from deepnvme.integrations.deepspeed.io.fast_file_writer import SMALLEST_TENSOR, FastFileWriter, FastFileWriterConfig
from deepnvme.memory.tensor_bytes import memory_of
from deepnvme.ops import load_async_io

from .buffer import TransferBuffer, page_locked, random_bytes
from .job import EngineName, Job
from .unsuitable import Unsuitable, first_line

CHUNK = 64 << 20


class TensorMover(abc.ABC):
    """A tensor, and a way to write it to files and to read it. All methods block.

    Args:
        job: What is to be measured.
        tensor: The tensor, with bytes that :meth:`write` may write.
        memory: Kind of memory that the tensor is in.
    """

    def __init__(self, job: Job, tensor: torch.Tensor, memory: str) -> None:
        self._job = job
        self.tensor = tensor
        self.memory = memory

    @abc.abstractmethod
    def write(self, path: Path) -> None:
        """Write all of the tensor to a file."""

    @abc.abstractmethod
    def read(self, path: Path) -> None:
        """Read all of the tensor from a file that :meth:`write` has written."""

    def move(self, path: Path) -> None:
        """Read or write all of the tensor: the operation that is measured."""
        if self._job.operation == "read":
            self.read(path)
        else:
            self.write(path)

    def matches(self, path: Path) -> bool:
        """Return whether file and tensor have the same content: here, just the bytes of the tensor."""
        if path.stat().st_size != self.tensor.numel():
            return False
        with path.open("rb", buffering=0) as file:
            for start in range(0, self.tensor.numel(), CHUNK):
                part = self.tensor[start : start + CHUNK].cpu()
                with memory_of(part) as view:
                    if file.read(len(view)) != view:
                        return False
        return True

    def renew(self) -> None:
        """Change the bytes that the next transfer replaces or writes, so that a transfer that does nothing is noticed."""
        random_bytes(self.tensor)

    def stats(self) -> Mapping[str, Any]:
        """Return the engine's statistics; empty if it has none."""
        return {}


def make(job: Job, device_number: int) -> TensorMover:
    """Return the mover for a job's engine, with its tensor allocated.

    Args:
        job: The job.
        device_number: Number of the GPU for the tensor, if the job uses GPUs.

    Raises:
        Unsuitable: If this machine or the engine cannot do what the job wants.
        MemoryError: If there is not enough memory for the tensor.
        OSError: From the op; RuntimeError likewise.
    """
    device = gpu(device_number) if job.gpu else None
    engines: dict[EngineName, Callable[[Job, torch.device | None], TensorMover]]
    engines = {"aio_handle": AioHandle, "aio_basic": AioBasic, "torch_io": TorchIo, "torch_fastio": TorchFastIo}
    return engines[job.engine](job, device)


def op() -> ModuleType:
    """Load the async_io op, which compiles it at first use. Raises Unsuitable, with a one-line message, if that fails."""
    try:
        return load_async_io()
    except RuntimeError as error:
        raise Unsuitable(first_line(error)) from error


def make_handle(setting: AioConfig) -> Any:
    """Return an ``aio_handle`` with these settings; with ``use_gds`` a ``gds_handle``. Raises Unsuitable if that fails."""
    try:
        if setting.use_gds:
            from deepnvme.ops.op_builder import GDSBuilder

            return GDSBuilder().load().gds_handle(**setting.handle_arguments())
        return op().aio_handle(**setting.handle_arguments())
    except (OSError, RuntimeError, ValueError) as error:
        raise Unsuitable(first_line(error)) from error


def gpu(number: int, in_turn: bool = False) -> torch.device:
    """Return GPU ``number``; with ``in_turn``, numbers beyond the last GPU begin again with the first.

    Raises:
        Unsuitable: If there is no such GPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise Unsuitable(f"--gpu: PyTorch {torch.__version__} sees no CUDA device; leave --gpu out to measure host memory")
    if number >= count and not in_turn:
        raise Unsuitable(f"--gpu: there is no device {number}, PyTorch sees {count}")
    return torch.device("cuda", number % count)


class AioHandle(TensorMover):
    """Moves the tensor by one aio_handle or gds_handle, used in all loops."""

    def __init__(self, job: Job, device: torch.device | None) -> None:
        self._handle = make_handle(job.setting)
        self._buffer = TransferBuffer(
            job.io_size,
            self._handle,
            device,
            gds=job.setting.use_gds,
            hand_over=job.slow_bounce_buffer,
            by_accelerator=job.accelerator_pin_memory,
        )
        super().__init__(job, self._buffer.tensor, self._buffer.kind)

    def write(self, path: Path) -> None:
        """Write all of the tensor to a file by one ``sync_pwrite``. Raises OSError."""
        self._handle.sync_pwrite(self._buffer.to_write(), str(path))

    def read(self, path: Path) -> None:
        """Read all of the tensor from a file by one ``sync_pread``, and copy it to the GPU if it is there. Raises OSError."""
        self._handle.sync_pread(self._buffer.to_read(), str(path))
        self._buffer.arrived()

    def renew(self) -> None:
        """Change the bytes that the next transfer replaces or writes, also in the buffer that they go through."""
        self._buffer.renew()

    def stats(self) -> Mapping[str, Any]:
        """Return what the handle's engine has done so far, by the names of :class:`deepnvme.Stats`."""
        return dict(self._handle.stats())


class AioBasic(TensorMover):
    """Moves the tensor by the functions aio_read and aio_write, which make a handle for each call."""

    def __init__(self, job: Job, device: torch.device | None) -> None:
        setting = job.setting
        if device is not None:
            raise Unsuitable("--gpu: aio_basic moves host memory only; use --engine aio_handle")
        if setting.backend != "auto":
            raise Unsuitable("--backend: aio_basic takes no backend; use --engine aio_handle")
        if setting.intra_op_parallelism != 1:
            raise Unsuitable("--io_parallel: aio_basic has one worker; use --engine aio_handle")
        self._op = op()
        self._arguments = (setting.block_size, setting.queue_depth, setting.single_submit, setting.overlap_events, False)
        buffer = TransferBuffer(job.io_size, self._op.aio_handle(), None, by_accelerator=job.accelerator_pin_memory)
        super().__init__(job, buffer.tensor, buffer.kind)

    def write(self, path: Path) -> None:
        """Write all of the tensor to a file by ``aio_write``. Raises OSError."""
        self._op.aio_write(self.tensor, str(path), *self._arguments)

    def read(self, path: Path) -> None:
        """Read all of the tensor from a file by ``aio_read``. Raises OSError."""
        self._op.aio_read(self.tensor, str(path), *self._arguments)


class TorchIo(TensorMover):
    """Moves the tensor by torch.save and torch.load."""

    def __init__(self, job: Job, device: torch.device | None) -> None:
        tensor = random_bytes(torch.empty(job.io_size, dtype=torch.uint8, device=device))
        super().__init__(job, tensor, "ordinary memory" if device is None else str(device))
        self._loaded: torch.Tensor | None = None

    def write(self, path: Path) -> None:
        """Write the tensor to a file by ``torch.save``."""
        self._save(path)

    def read(self, path: Path) -> None:
        """Read a tensor by ``torch.load`` into new memory, kept for :meth:`matches` if the job validates, else dropped."""
        loaded = self._load(path)
        self._loaded = loaded if self._job.validate else None  # not kept otherwise: the next loop would need memory for two

    def matches(self, path: Path) -> bool:
        """Return whether the tensor read last, or else that in the file, is equal to the one written."""
        return self.tensor.equal(self._load(path) if self._loaded is None else self._loaded)

    def renew(self) -> None:
        """Forget what was read. Change the tensor only before a write: ``torch.load`` allocates new memory each time."""
        self._loaded = None  # torch.load allocates new memory each time
        if self._job.operation == "write":
            super().renew()

    def _load(self, path: Path) -> torch.Tensor:
        """Return the tensor in a file. Raises ValueError if there is none that torch.load can read."""
        try:
            found: torch.Tensor = torch.load(path, map_location=self.tensor.device, weights_only=True)
        except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
            raise ValueError(f"'{path}' holds no tensor that torch.load can read: {first_line(error)}") from error
        return found

    def _save(self, file: Any) -> None:
        torch.save(self.tensor, file, _use_new_zipfile_serialization=not self._job.torch_legacy_save)


class TorchFastIo(TorchIo):
    """Moves the tensor by torch.save to a file object that writes with a handle, and by torch.load."""

    def __init__(self, job: Job, device: torch.device | None) -> None:
        if job.fast_io_size < SMALLEST_TENSOR:
            raise Unsuitable(f"--fast_io_size: must be at least {SMALLEST_TENSOR}, got {job.fast_io_size}")
        super().__init__(job, device)
        self._handle = make_handle(job.setting)
        self._buffer = page_locked(self._handle, job.fast_io_size)

    def write(self, path: Path) -> None:
        """Write the tensor to a file by ``torch.save`` through a :class:`FastFileWriter`."""
        with FastFileWriter(path, FastFileWriterConfig(self._handle, self._buffer)) as file:
            self._save(file)

    def stats(self) -> Mapping[str, Any]:
        """Return the handle's statistics for writes; empty for reads, which do not use the handle."""
        return dict(self._handle.stats()) if self._job.operation == "write" else {}
