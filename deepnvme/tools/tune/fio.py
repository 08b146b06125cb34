"""Runs fio, parses its results, and compares them with the results of a ds_io job.

Both move the same bytes with the same settings, and find the page cache in the same state.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepnvme.files.regular_files import lines_of
from deepnvme.ops.op_builder import packages

from .figures import Spread
from .folder import drop_pages
from .job import FioComparison, Job, Operation, Sample, Timing, file_name
from .workspace import NotMeasurable


class FioFailed(Exception):
    """Raised if fio fails. The message is fio's own."""


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


def version(program: str) -> str:
    """Return the version of fio, as it prints it. Raises FioFailed."""
    return output_of([program, "--version"]).strip()


@dataclass(frozen=True)
class FioTransfer:
    """A transfer that fio makes: all files at the same time, with O_DIRECT."""

    program: str
    """Path of fio."""
    ioengine: str
    """fio's I/O engine, such as "io_uring" or "libaio"."""
    operation: Operation
    """Whether to read or to write."""
    paths: Sequence[Path]
    """Paths of the files."""
    nbytes: int
    """Bytes of each file. Each job's part is a multiple of ``block_size``, or one smaller request of whole sectors."""
    block_size: int
    """Bytes of a request."""
    queue_depth: int
    """Requests that each job keeps in flight."""
    jobs: int = 1
    """Number of fio jobs that share each file."""
    huge_pages: bool = False
    """Whether buffers are in reserved huge pages (vm.nr_hugepages), instead of ordinary memory."""
    fsync: bool = False
    """Whether fio ends a write with an fsync."""

    def run(self, fresh: bool = False) -> Timing:
        """Run fio once, and return the time by fio's own clocks, which excludes its start-up. Blocks.

        An interrupt of this process ends fio's processes.

        Args:
            fresh: Whether the files are new: fio then reserves their space before its measured time begins.

        Raises:
            FioFailed: If fio fails, does not move all bytes, or its report cannot be read.
        """
        share = self.nbytes // self.jobs
        command = [self.program, f"--rw={self.operation}", f"--iodepth={self.queue_depth}", f"--ioengine={self.ioengine}"]
        command += [f"--iomem={'mmaphuge' if self.huge_pages else 'malloc'}", f"--fallocate={'native' if fresh else 'none'}"]
        command += [f"--bs={min(self.block_size, share)}", f"--size={share}", f"--offset_increment={share}"]
        command += [f"--numjobs={self.jobs}", f"--end_fsync={int(self.fsync)}", "--direct=1", "--group_reporting"]
        command.append("--output-format=json")
        for index, path in enumerate(self.paths):
            filename = str(path).replace(":", "\\:")  # fio splits file names at colons
            command += [f"--name=job{index}", f"--filename={filename}"]
        output = output_of(command)
        try:
            # fio may print notes before the JSON document.
            (job,) = json.loads(output[f"\n{output}".index("\n{") :])["jobs"]  # --group_reporting combines all jobs into one
            moved = job[self.operation]
            # fio's clock has a resolution of a millisecond: a shorter job counts as one.
            seconds = max(moved["runtime"], 1) / 1000
            # usr_cpu and sys_cpu are percentages of the jobs' milliseconds, by fio's own getrusage.
            found = Timing(moved["io_bytes"], seconds, (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000)
        except (ValueError, LookupError, TypeError) as error:
            raise FioFailed(f"the report of {self.program} cannot be read: {error!r}") from error
        if found.nbytes != self.nbytes * len(self.paths):
            raise FioFailed(f"fio moved {found.nbytes} bytes of {self.nbytes * len(self.paths)}")
        return found


# A job of ours compared with fio's.


def find_suitable(job: Job) -> str:
    """Return the path of fio. Raises NotMeasurable if fio is not installed, or cannot make the job's transfer."""
    program = shutil.which("fio")
    if program is None:
        raise NotMeasurable("--compare fio: fio was not found; install your distribution's package of that name")
    if job.engine != "aio_handle" or job.gpu:
        raise NotMeasurable("--compare fio: fio moves what aio_handle does in host memory; leave out --engine and --gpu")
    share, rest = divmod(job.io_size, job.setting.intra_op_parallelism)
    block = min(job.setting.block_size, share)
    if rest or share % block or block % 512:  # fio skips a last partial block, and O_DIRECT requires whole sectors
        each = "a multiple of --block_size for each worker (--io_parallel)"
        raise NotMeasurable(f"--compare fio: fio moves whole blocks only; give an --io_size that is {each}")
    return program


class FioContender:
    """Repeats a job's transfer with fio, and compares the results.

    Args:
        job: A job that :func:`find_suitable` has accepted.
        program: Path of fio.
        backend: The backend of the job's handle. fio uses io_uring if the handle does, otherwise libaio.
        directories: The job's directory for each place.

    Raises:
        FioFailed: If fio fails. All methods can raise it.
    """

    def __init__(self, job: Job, program: str, backend: str | None, directories: Sequence[Path]) -> None:
        self._job = job
        self._version = version(program)
        self._samples: list[Timing] = []
        # fio reads the file that our job reads; if that has a file for each loop, the first loop's.
        names = [file_name("read", index, 0) if job.operation == "read" else f"fio.{index}" for index in range(len(directories))]
        paths = [directory / name for directory, name in zip(directories, names, strict=True)]
        block, depth, jobs = job.setting.block_size, job.setting.queue_depth, job.setting.intra_op_parallelism
        # fio aligns the buffers of each job to a huge page, and needs one more for each.
        page, free = huge_pages_free()
        pages = len(paths) * jobs * (math.ceil(depth * block / page) + 1) if page else 0
        huge, ioengine = 0 < pages <= free, "io_uring" if backend == "io_uring" else "libaio"
        self._transfer = FioTransfer(program, ioengine, job.operation, paths, job.io_size, block, depth, jobs, huge, job.fsync)
        self._buffers = "huge pages, as ours are" if huge else "ordinary memory, which is slower than the huge pages of ours"
        if pages and not huge:
            self._buffers += f"; to give it some: {packages.as_root(f'sysctl vm.nr_hugepages={pages}')}"

    def loop(self, number: int) -> None:
        """Make one transfer with fio. Blocks. The pages of its files are dropped from the page cache first."""
        paths = self._transfer.paths
        if self._job.operation == "write" and self._job.different_files:
            for path in paths:
                path.unlink(missing_ok=True)
        drop_pages(paths)
        self._samples.append(self._transfer.run(fresh=not paths[0].exists()))

    def comparison(self, ours: Sequence[Sample], first: int) -> FioComparison:
        """Return fio's results compared with the job's.

        Args:
            ours: The job's samples, one for each loop of fio.
            first: Index of the first loop that counts, after the warm-up.
        """
        ratio = Spread.of([mine.gb_per_second / its.gb_per_second for mine, its in zip(ours, self._samples, strict=True)][first:])
        return FioComparison(self._version, self._transfer.ioengine, self._buffers, tuple(self._samples[first:]), ratio)


def huge_pages_free() -> tuple[int, int]:
    """Return the size of a huge page in bytes, and the number of free huge pages; (0, 0) if the kernel does not report them."""
    fields = dict(line.split(":", 1) for line in lines_of(Path("/proc/meminfo")))
    size, free = (int(fields.get(name, "0").split()[0]) for name in ("Hugepagesize", "HugePages_Free"))
    return size * 1024, free
