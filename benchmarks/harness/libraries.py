"""Ours and DeepSpeed as contenders: each in a process that stays from the first measurement to the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness import drive
from harness.worker_process import WorkerProcess, importing_from
from harness.workloads import ContenderFailed, Memory, Sample, Workload


class LibraryProcess(WorkerProcess):
    """A ``transfer_worker``. ``described``: versions and defaults. ``folder`` has the library, if not the installed one."""

    def __init__(
        self, python: str, library: Literal["deepnvme", "deepspeed"], directory: Path, backend: str, folder: Path | None = None
    ) -> None:
        variables = importing_from(folder) if folder else None
        super().__init__(python, "harness.transfer_worker", [library, backend], directory, variables)


@dataclass(frozen=True)
class LibraryContender:
    """One face of a library with one kind of memory. ``seed`` marks what it writes as its own."""

    process: LibraryProcess
    name: str
    face: Literal["handle", "engine"]
    memory: Memory
    seed: int

    def files(self, workload: Workload, directory: Path) -> list[Path]:
        if workload.files == 1:
            return [directory / workload.state]
        return [directory / f"{workload.state}.{index}" for index in range(workload.files)]

    def measure(self, workload: Workload, paths: Sequence[Path]) -> Sample:
        return self._transfer(workload, paths)

    def rehearse(self, workload: Workload, paths: Sequence[Path], contents: int) -> None:
        if workload.operation == "read":
            self._transfer(workload, paths, fill=self.seed, check=contents)
            return
        self._transfer(workload, paths, fill=self.seed)
        for index, path in enumerate(paths):
            nbytes = workload.tensors * workload.nbytes
            if not drive.holds(path, nbytes, self.seed, index * nbytes):
                raise ContenderFailed(f"file {index} of {len(paths)} does not hold what its tensor does")

    def _transfer(self, workload: Workload, paths: Sequence[Path], fill: int | None = None, check: int | None = None) -> Sample:
        """Have the process move all files once; fill the tensors before, or check them after."""
        measured = self.process.call(
            "transfer",
            face=self.face,
            memory=self.memory,
            operation=workload.operation,
            paths=[str(path) for path in paths],
            nbytes=workload.nbytes,
            tensors_a_file=workload.tensors,
            fill=fill,
            check=check,
        )
        return Sample(workload.total_bytes, **measured)
