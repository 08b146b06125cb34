"""Runs fio, parses its results, and compares them with those of a job of ours.

Both move the same bytes with the same settings, and find the page cache in the same state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deepnvme.memory.system_memory import meminfo
from deepnvme.ops.op_builder import packages

from .figures import Spread
from .folder import drop_pages
from .job import FioComparison, Job, Observation, Operation, Sample, file_name
from .unsuitable import Unsuitable


class FioFailed(Exception):
    """Raised if fio fails. The message is fio's own."""


@dataclass(frozen=True)
class FioRange:
    """A range of a file that one fio job moves."""

    path: Path
    """The file."""
    offset: int
    """Where the range begins, in bytes from the start of the file."""
    nbytes: int
    """Bytes of the range."""


@dataclass(frozen=True)
class FioSettings:
    """How fio is to move data."""

    program: str
    """Path of fio."""
    ioengine: str
    """fio's I/O engine, such as "io_uring" or "libaio"."""
    block_size: int
    """Bytes of a request."""
    queue_depth: int
    """Requests in flight of each job."""
    huge_pages: bool
    """Whether buffers are in reserved huge pages (vm.nr_hugepages), instead of ordinary memory."""


def version(program: str) -> str:
    """Return the version that fio prints. Raises FioFailed."""
    return output_of([program, "--version"]).strip()


def huge_pages_needed(settings: FioSettings, jobs: int, page: int) -> int:
    """Return the number of huge pages of ``page`` bytes that fio's buffers need for that many jobs.

    fio aligns the buffers of each job to a huge page, and needs one more for each.
    """
    return jobs * (math.ceil(settings.queue_depth * settings.block_size / page) + 1)


def split_file(path: Path, nbytes: int, block_size: int, count: int) -> list[FioRange]:
    """Divide a file of ``nbytes`` into ranges for ``count`` jobs, in whole blocks, as our workers share a tensor.

    Empty ranges are left out.
    """
    blocks = math.ceil(nbytes / block_size)
    bounds = [min(nbytes, blocks * each // count * block_size) for each in range(count + 1)]
    return [FioRange(path, begin, end - begin) for begin, end in itertools.pairwise(bounds) if end > begin]


def can_move(piece: FioRange, block_size: int) -> bool:
    """Return whether fio can move all of a range: it skips a last partial block, and O_DIRECT requires whole sectors."""
    block = min(block_size, piece.nbytes)
    return piece.nbytes % block == 0 and block % 512 == 0


def run(
    settings: FioSettings,
    operation: Operation,
    work: Sequence[FioRange],
    *,
    fallocate: Literal["native", "none"],
    fsync: bool = False,
) -> Observation:
    """Let fio move all ranges at the same time, by O_DIRECT, and return its result. Blocks.

    An interrupt of this process ends fio's processes. Times are those that fio itself measured, without its start.

    Args:
        settings: How to move the data.
        operation: Whether to read or to write.
        work: The ranges, one fio job for each.
        fallocate: "native" reserves the space of a new file before fio's measured time begins.
        fsync: Whether fio ends writes by an fsync.

    Raises:
        FioFailed: If fio fails, does not move all bytes, or its report cannot be read.
    """
    command = [
        settings.program,
        f"--rw={operation}",
        f"--iodepth={settings.queue_depth}",
        f"--ioengine={settings.ioengine}",
        f"--iomem={'mmaphuge' if settings.huge_pages else 'malloc'}",
        f"--fallocate={fallocate}",
        f"--end_fsync={int(fsync)}",
        "--direct=1",
        "--group_reporting",
        "--output-format=json",
    ]
    for index, piece in enumerate(work):
        # fio splits file names at colons.
        filename = str(piece.path).replace(":", "\\:")
        command += [f"--name=job{index}", f"--filename={filename}", f"--offset={piece.offset}", f"--size={piece.nbytes}"]
        command.append(f"--bs={min(settings.block_size, piece.nbytes)}")
    output = output_of(command)
    try:
        # fio may print notes before the JSON document.
        document = output[f"\n{output}".index("\n{") :]
        return _sample(json.loads(document), operation, sum(piece.nbytes for piece in work))
    except (ValueError, LookupError, TypeError) as error:
        raise FioFailed(f"the report of {settings.program} cannot be read: {error!r}") from error


def output_of(command: Sequence[str]) -> str:
    """Run fio with these arguments and return its standard output. Raises FioFailed if it fails."""
    # fio's jobs are separate processes; in a session of their own, an interrupt can end all of them.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, errors = process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode != 0:
        said = (errors.strip() or output.strip()).splitlines()
        raise FioFailed(f"fio ended with {process.returncode}: {said[0] if said else 'no message'}")
    return output


def _sample(report: dict[str, Any], operation: Operation, nbytes: int) -> Observation:
    """Return the values in fio's JSON report. Raises FioFailed if fio has not moved ``nbytes``."""
    (job,) = report["jobs"]  # --group_reporting combines all jobs into one
    moved = job[operation]
    if moved["io_bytes"] != nbytes:
        raise FioFailed(f"fio moved {moved['io_bytes']} bytes of {nbytes}")
    percentiles = moved["clat_ns"].get("percentile", {})
    return Observation(
        nbytes,
        # fio's clock has a resolution of a millisecond: a shorter job counts as one.
        max(moved["runtime"], 1) / 1000,
        # usr_cpu and sys_cpu are percentages of the jobs' milliseconds, by fio's own getrusage.
        (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000,
        percentiles.get("50.000000", 0) / 1e9,
        percentiles.get("99.000000", 0) / 1e9,
    )


# A job of ours compared with fio's.


def find_suitable(job: Job) -> str:
    """Return the path of fio. Raises Unsuitable if it is not installed, or cannot do the same as the job."""
    program = shutil.which("fio")
    if program is None:
        raise Unsuitable("--compare fio: fio was not found; install your distribution's package of that name")
    if job.engine != "aio_handle" or job.gpu:
        raise Unsuitable("--compare fio: fio moves what aio_handle does in host memory; leave out --engine and --gpu")
    if not all(can_move(piece, job.setting.block_size) for piece in _job_pieces(job, Path())):
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
        self._version = version(program)
        self._samples: list[Observation] = []
        # fio reads the file that our job reads; if that has a file for each loop, the first loop's.
        names = [file_name("read", index, 0) if job.operation == "read" else f"fio.{index}" for index in range(len(directories))]
        self._paths = [directory / name for directory, name in zip(directories, names, strict=True)]
        self._work = [piece for path in self._paths for piece in _job_pieces(job, path)]
        ioengine = "io_uring" if backend == "io_uring" else "libaio"
        ordinary = FioSettings(program, ioengine, job.setting.block_size, job.setting.queue_depth, huge_pages=False)
        page = meminfo("Hugepagesize")
        missing = huge_pages_needed(ordinary, len(self._work), page) - meminfo("HugePages_Free") if page else 0
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
            run(self._settings, job.operation, self._work, fallocate="native" if fresh else "none", fsync=job.fsync)
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


def _job_pieces(job: Job, path: Path) -> list[FioRange]:
    """Return the ranges of one file that fio's jobs move, one for each of our workers."""
    return split_file(path, job.io_size, job.setting.block_size, job.setting.intra_op_parallelism)
