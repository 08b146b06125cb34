"""Ways to move a tensor that ds_io can measure: one handle, a new handle for each call, or torch.save and torch.load."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deepnvme.drives.aio_config import AioConfig
from deepnvme.integrations.deepspeed.io.fast_file_writer import SMALLEST_TENSOR, FastFileWriter, FastFileWriterConfig
from deepnvme.memory.tensor_bytes import memory_of
from deepnvme.ops import load_async_io

from .folder import NotMeasurable, first_line
from .job import Job

CHUNK = 64 << 20


def make_handle(setting: AioConfig) -> Any:
    """Return an ``aio_handle``, or with ``use_gds`` a ``gds_handle``. Raises OSError, RuntimeError or ValueError."""
    if setting.use_gds:
        from deepnvme.ops.op_builder import GDSBuilder

        return GDSBuilder().load().gds_handle(**setting.handle_arguments())
    return load_async_io().aio_handle(**setting.handle_arguments())


def gpu(number: int, in_turn: bool = False) -> torch.device:
    """Return GPU ``number``; with ``in_turn``, numbers beyond the last GPU begin again with the first.

    Raises:
        NotMeasurable: If there is no such GPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise NotMeasurable(f"--gpu: PyTorch {torch.__version__} sees no CUDA device; leave --gpu out to measure host memory")
    if number >= count and not in_turn:
        raise NotMeasurable(f"--gpu: there is no device {number}, PyTorch sees {count}")
    return torch.device("cuda", number % count)


def page_locked(handle: Any, nbytes: int) -> torch.Tensor:
    """Return a uint8 tensor of ``nbytes`` random bytes in page-locked memory of a handle."""
    tensor: torch.Tensor = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8, device="cpu"))
    return random_bytes(tensor)


def random_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a uint8 tensor with random bytes, which no drive can compress, and return it."""
    # Words of 8 bytes are faster to fill than bytes.
    words = tensor.numel() // 8 * 8
    tensor[:words].view(torch.int64).random_()
    tensor[words:].random_()
    return tensor


class TransferBuffer:
    """A tensor of random bytes to be written or read, in host memory or on a GPU.

    A tensor on a GPU is copied through a locked buffer in host memory, except with ``gds`` or ``hand_over``.

    Args:
        nbytes: Size of the tensor in bytes.
        handle: The handle that will move the tensor, and that allocates locked memory.
        device: The GPU; None for host memory.
        gds: Register the GPU tensor with the handle, for GPUDirect Storage.
        hand_over: Pass the GPU tensor itself to the handle.
        by_accelerator: Let PyTorch pin the host memory, instead of locking it by the handle.

    Raises:
        MemoryError: If there is not enough host memory (torch.OutOfMemoryError for GPU memory).
    """

    def __init__(
        self,
        nbytes: int,
        handle: Any,
        device: torch.device | None,
        gds: bool = False,
        hand_over: bool = False,
        by_accelerator: bool = False,
    ) -> None:
        direct = device is not None and (gds or hand_over)
        if direct:
            self._host, kind = None, ""
        elif not by_accelerator:
            self._host, kind = page_locked(handle, nbytes), "locked memory"
        elif torch.cuda.is_available():
            self._host, kind = random_bytes(torch.empty(nbytes, dtype=torch.uint8)).pin_memory(), "memory pinned by PyTorch"
        else:  # as with DeepSpeed's CPU accelerator: nothing is pinned if there is no device to pin for
            self._host, kind = random_bytes(torch.empty(nbytes, dtype=torch.uint8)), "ordinary memory, as no accelerator pins it"
        if device is None:
            assert self._host is not None
            self.tensor, self.kind = self._host, kind
        else:
            self.tensor = random_bytes(torch.empty(nbytes, dtype=torch.uint8, device=device))
            self.kind = str(device) if direct else f"{device} by way of {kind}"
        if direct and gds:
            handle.pin_device_tensor(self.tensor)

    def to_write(self, nbytes: int | None = None) -> torch.Tensor:
        """Return the memory for a handle to write from: the first ``nbytes`` bytes of the tensor, or all of it."""
        if self._host is None or self._host is self.tensor:
            return self.tensor[:nbytes]
        return self._host[:nbytes].copy_(self.tensor[:nbytes])

    def to_read(self, nbytes: int | None = None) -> torch.Tensor:
        """Return the memory for a handle to read into.

        :meth:`arrived` must be called after the read.

        Args:
            nbytes: Bytes to read; None for the size of the tensor.
        """
        return (self.tensor if self._host is None else self._host)[:nbytes]

    def arrived(self, nbytes: int | None = None) -> None:
        """Copy the bytes that were read from the host buffer to the GPU tensor. Does nothing if there is no host buffer.

        Args:
            nbytes: Bytes that were read; None for the size of the tensor.
        """
        if self._host is not None and self._host is not self.tensor:
            self.tensor[:nbytes].copy_(self._host[:nbytes])

    def renew(self) -> None:
        """Refill tensor and host buffer with new random bytes."""
        for each in {id(each): each for each in (self.tensor, self._host) if each is not None}.values():
            random_bytes(each)


class TensorMover:
    """Moves one tensor to and from files, by the engine of a job. All methods block.

    Args:
        job: The job to measure.
        device_number: Number of the GPU for the tensor, if the job uses GPUs.

    Raises:
        NotMeasurable: If this machine or the engine cannot do the job.
        MemoryError: If there is not enough memory for the tensor.
        OSError, RuntimeError: From the op.
    """

    def __init__(self, job: Job, device_number: int) -> None:
        setting, self._job = job.setting, job
        device = gpu(device_number) if job.gpu else None
        if job.engine == "torch_fastio" and job.fast_io_size < SMALLEST_TENSOR:
            raise NotMeasurable(f"--fast_io_size: must be at least {SMALLEST_TENSOR}, got {job.fast_io_size}")
        if job.engine == "aio_basic":
            if device is not None:
                raise NotMeasurable("--gpu: aio_basic moves host memory only; use --engine aio_handle")
            if (setting.backend, setting.intra_op_parallelism) != ("auto", 1):
                raise NotMeasurable("--backend, --io_parallel: aio_basic has one worker and no choice; use --engine aio_handle")
        self._handle = load_async_io().aio_handle() if job.engine in ("aio_basic", "torch_io") else make_handle(setting)
        if job.by_torch:
            self.tensor = random_bytes(torch.empty(job.io_size, dtype=torch.uint8, device=device))
            self.memory = "ordinary memory" if device is None else str(device)
        else:
            gds, hand_over, by_accelerator = setting.use_gds, job.slow_bounce_buffer, job.accelerator_pin_memory
            self._buffer = TransferBuffer(job.io_size, self._handle, device, gds, hand_over, by_accelerator)
            self.tensor, self.memory = self._buffer.tensor, self._buffer.kind
        if job.engine == "torch_fastio":
            self._writer = FastFileWriterConfig(self._handle, page_locked(self._handle, job.fast_io_size))
        self._basic = (setting.block_size, setting.queue_depth, setting.single_submit, setting.overlap_events, False)
        self._loaded: torch.Tensor | None = None

    def write(self, path: Path) -> None:
        """Write all of the tensor to a file. Raises OSError."""
        match self._job.engine:
            case "aio_handle":
                self._handle.sync_pwrite(self._buffer.to_write(), str(path))
            case "aio_basic":
                load_async_io().aio_write(self.tensor, str(path), *self._basic)
            case "torch_io":
                self._save(path)
            case "torch_fastio":
                with FastFileWriter(path, self._writer) as file:
                    self._save(file)

    def _save(self, file: Any) -> None:
        torch.save(self.tensor, file, _use_new_zipfile_serialization=not self._job.torch_legacy_save)

    def read(self, path: Path) -> None:
        """Read the whole tensor from a file that :meth:`write` has written. Raises OSError.

        A tensor that torch.load returns is kept only if the job validates: otherwise the next loop would need memory for two.
        """
        match self._job.engine:
            case "aio_handle":
                self._handle.sync_pread(self._buffer.to_read(), str(path))
                self._buffer.arrived()
            case "aio_basic":
                load_async_io().aio_read(self.tensor, str(path), *self._basic)
            case _:
                loaded = self._load(path)
                self._loaded = loaded if self._job.validate else None

    def _load(self, path: Path) -> torch.Tensor:
        """Load the tensor in a file with torch.load. Raises ValueError if the file has none that it can read."""
        try:
            found: torch.Tensor = torch.load(path, map_location=self.tensor.device, weights_only=True)
        except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
            raise ValueError(f"'{path}' holds no tensor that torch.load can read: {first_line(error)}") from error
        return found

    def move(self, path: Path) -> None:
        """Transfer the whole tensor in the job's direction. This is the operation that is measured."""
        if self._job.operation == "read":
            self.read(path)
        else:
            self.write(path)

    def matches(self, path: Path) -> bool:
        """Return whether file and tensor have the same content.

        With torch.load, the tensor that was loaded last is compared; if none was loaded, the file is read.
        """
        if self._job.by_torch:
            return self.tensor.equal(self._load(path) if self._loaded is None else self._loaded)
        if path.stat().st_size != self.tensor.numel():
            return False
        with path.open("rb", buffering=0) as file:
            for start in range(0, self.tensor.numel(), CHUNK):
                with memory_of(self.tensor[start : start + CHUNK].cpu()) as view:
                    if file.read(len(view)) != view:
                        return False
        return True

    def renew(self) -> None:
        """Change the bytes that the next transfer replaces or writes, so that a transfer that does nothing is noticed."""
        self._loaded = None  # torch.load allocates new memory each time
        if not self._job.by_torch:
            self._buffer.renew()
        elif self._job.operation == "write":
            random_bytes(self.tensor)

    def stats(self) -> Mapping[str, Any]:
        """Return the engine statistics of the handle, named as in :class:`deepnvme.Stats`; empty if the handle moves no bytes."""
        by_handle = self._job.engine == "aio_handle" or (self._job.engine == "torch_fastio" and self._job.operation == "write")
        return dict(self._handle.stats()) if by_handle else {}
