"""Runs fio in turn with a job of ours: the same bytes, the same settings, the same state of the page cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from deepnvme.memory.meminfo import meminfo
from deepnvme.ops.op_builder import packages

from . import fio
from .figures import Spread
from .folder import Unsuitable, drop_pages
from .job import FioComparison, FioSample, Job, Sample, file_name


def find_suitable(job: Job) -> str:
    """Return the path of fio. Raises Unsuitable if it is not installed, or cannot do the same as the job."""
    program = fio.find()
    if program is None:
        raise Unsuitable("--compare fio: fio was not found; install your distribution's package of that name")
    if job.engine != "aio_handle" or job.gpu:
        raise Unsuitable("--compare fio: fio moves what aio_handle does in host memory; leave out --engine and --gpu")
    if not all(fio.can_move(piece, job.setting.block_size) for piece in _pieces(job, Path())):
        raise Unsuitable("--compare fio: fio moves whole blocks only; give an --io_size that is a multiple of --block_size")
    return program


class FioComparisonRun:
    """Repeats a job's transfer with fio, and compares the results.

    Args:
        job: The job; :func:`find_suitable` has accepted it.
        program: Path of fio.
        backend: The backend that our handle uses. fio uses io_uring if that does, otherwise libaio.
        directories: The job's directory for each place.

    Raises:
        FioFailed: If fio fails; the methods raise it too.
    """

    def __init__(self, job: Job, program: str, backend: str | None, directories: Sequence[Path]) -> None:
        self._job = job
        self._version = fio.version(program)
        self._samples: list[FioSample] = []
        # fio reads the file that our job reads; if that has a file for each loop, the first loop's.
        names = [file_name("read", index, 0) if job.operation == "read" else f"fio.{index}" for index in range(len(directories))]
        self._paths = [directory / name for directory, name in zip(directories, names, strict=True)]
        self._work = [piece for path in self._paths for piece in _pieces(job, path)]
        ioengine = "io_uring" if backend == "io_uring" else "libaio"
        ordinary = fio.FioSettings(program, ioengine, job.setting.block_size, job.setting.queue_depth, huge_pages=False)
        page = meminfo("Hugepagesize")
        missing = fio.huge_pages_needed(ordinary, len(self._work), page) - meminfo("HugePages_Free") if page else 0
        huge = page > 0 and missing <= 0
        self._settings = dataclasses.replace(ordinary, huge_pages=huge)
        self._buffers = "huge pages, as ours are" if huge else "ordinary memory, which is slower than the huge pages of ours"
        if missing > 0:
            total = meminfo("HugePages_Total") + missing
            self._buffers += f"; to give it some: {packages.as_root(f'sysctl vm.nr_hugepages={total}')}"

    def loop(self) -> None:
        """Make one transfer with fio. Blocks. The file's pages in the page cache are dropped first."""
        job = self._job
        if job.operation == "write" and job.different_files:
            for path in self._paths:
                path.unlink(missing_ok=True)
        drop_pages(self._paths)
        fresh = job.operation == "write" and not self._paths[0].exists()
        self._samples.append(
            fio.run(self._settings, job.operation, self._work, fallocate="native" if fresh else "none", fsync=job.fsync)
        )

    def comparison(self, ours: Sequence[Sample], first: int) -> FioComparison:
        """Return fio's results compared with ours.

        Args:
            ours: Our samples, one for each loop of fio.
            first: Number of the first loop that counts.
        """
        pairs = list(zip(ours, self._samples, strict=True))[first:]
        return FioComparison(
            version=self._version,
            ioengine=self._settings.ioengine,
            buffers=self._buffers,
            samples=tuple(theirs for _, theirs in pairs),
            ratio=Spread.of([mine.gb_per_second / theirs.gb_per_second for mine, theirs in pairs]),
        )


def _pieces(job: Job, path: Path) -> list[fio.FioRange]:
    return fio.pieces(path, job.io_size, job.setting.block_size, job.setting.intra_op_parallelism)
