"""Contenders that move one tensor in this process: a handle of ours, and torch's own files.

A write is timed until it is on stable storage: torch's goes to the page cache, and would otherwise be timed to there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deepnvme.tools.tune.folder import drop_pages, sync
from deepnvme.tools.tune.job import Operation
from harness import drive, tensors
from harness.meter import measure
from harness.workloads import ContenderFailed, Sample, Workload


class OneTensor(ABC):
    """``seed`` marks what it writes as its own."""

    suffix = ""
    """Of its files, where they are of a format of their own."""

    def __init__(self, name: str, memory: str, tensor: torch.Tensor, seed: int) -> None:
        self.name, self.memory, self.tensor, self.seed = name, memory, tensor, seed
        self.first: Sample | None = None
        """The first request after start-up, which is none of the samples."""

    def files(self, workload: Workload, directory: Path) -> list[Path]:
        return [directory / f"{workload.state}{self.suffix}"]

    def measure(self, workload: Workload, paths: Sequence[Path]) -> Sample:
        try:
            sample = Sample(self.tensor.nbytes, **measure(lambda: self._move(workload.operation, paths[0])))  # type: ignore[arg-type]
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            raise ContenderFailed(f"{type(error).__name__}: {error}") from error
        self.first = self.first or sample
        return sample

    def rehearse(self, workload: Workload, paths: Sequence[Path], contents: int) -> None:
        tensors.fill_with(self.tensor, self.seed)
        self._before(workload.operation, paths[0])
        self.measure(workload, paths)
        if not self._arrived(workload, paths[0], contents):
            raise ContenderFailed("tensor and file do not hold the same")

    def _before(self, operation: Operation, path: Path) -> None:
        """What the first transfer needs."""
        return

    @abstractmethod
    def _move(self, operation: Operation, path: Path) -> None: ...

    @abstractmethod
    def _arrived(self, workload: Workload, path: Path, contents: int) -> bool:
        """Whether the transfer has moved the right bytes; an existing file held the pattern ``contents``."""


class HandleContender(OneTensor):
    """aio_handle or gds_handle, one for all its requests."""

    def __init__(self, name: str, memory: str, handle: Any, tensor: torch.Tensor, seed: int) -> None:
        super().__init__(name, memory, tensor, seed)
        self.handle = handle

    def _move(self, operation: Operation, path: Path) -> None:
        start = self.handle.async_pread if operation == "read" else self.handle.async_pwrite
        start(self.tensor, str(path))
        self.handle.wait()
        if operation == "write":
            sync(path)

    def _arrived(self, workload: Workload, path: Path, contents: int) -> bool:
        if workload.operation == "read":
            return tensors.holds(self.tensor, contents)
        return drive.holds(path, workload.nbytes, self.seed)


class TorchContender(OneTensor):
    """torch.save and torch.load. What is loaded is new memory each time."""

    suffix = ".pt"

    def _before(self, operation: Operation, path: Path) -> None:
        if operation == "read":
            torch.save(self.tensor, path)
            drop_pages([path])

    def _move(self, operation: Operation, path: Path) -> None:
        if operation == "write":
            torch.save(self.tensor, path)
            sync(path)
            return
        torch.load(path, weights_only=True, map_location=self.tensor.device)
        if self.tensor.is_cuda:
            torch.cuda.synchronize(self.tensor.device)

    def _arrived(self, workload: Workload, path: Path, contents: int) -> bool:
        return tensors.holds(torch.load(path, weights_only=True, map_location="cpu"), self.seed)
