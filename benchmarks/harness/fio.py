"""fio as a contender: large and small transfers, with its default buffers and with huge pages, and random reads."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deepnvme.files.regular_files import lines_of
from deepnvme.tools.tune.job import Operation, Timing
from harness.workloads import ContenderFailed, Sample, Workload

QUEUE_DEPTH = 32
_NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")


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
    """Bytes of each file: a multiple of ``block_size``, or one smaller request of whole sectors."""
    block_size: int
    """Bytes of a request."""
    queue_depth: int
    """Requests in flight for each file."""
    huge_pages: bool = False
    """Whether buffers are in reserved huge pages (vm.nr_hugepages), instead of ordinary memory."""

    def run(self, fresh: bool = False) -> Timing:
        """Run fio once, and return the time by fio's own clocks, which excludes its start-up. Blocks.

        An interrupt of this process ends fio's processes.

        Args:
            fresh: Whether the files are new: fio then reserves their space before its measured time begins.

        Raises:
            FioFailed: If fio fails, does not move all bytes, or its report cannot be read.
        """
        command = [self.program, f"--rw={self.operation}", f"--iodepth={self.queue_depth}", f"--ioengine={self.ioengine}"]
        command += [f"--iomem={'mmaphuge' if self.huge_pages else 'malloc'}", f"--fallocate={'native' if fresh else 'none'}"]
        command += [f"--bs={min(self.block_size, self.nbytes)}", f"--size={self.nbytes}"]
        command += ["--direct=1", "--group_reporting"]
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


def huge_pages_free() -> tuple[int, int]:
    """Return the size of a huge page in bytes, and the number of free huge pages; (0, 0) if the kernel does not report them."""
    fields = dict(line.split(":", 1) for line in lines_of(Path("/proc/meminfo")))
    size, free = (int(fields.get(name, "0").split()[0]) for name in ("Hugepagesize", "HugePages_Free"))
    return size * 1024, free


class HugePagesUnavailable(Exception):
    """fio cannot have huge pages here; the message says why and what to type."""


@contextlib.contextmanager
def huge_pages(nbytes: int, may_reserve: bool) -> Iterator[None]:
    """Have ``nbytes`` of huge pages free inside the block; those reserved for it are given back after it.

    ``may_reserve``: whether vm.nr_hugepages may be raised where too few are free. Raises HugePagesUnavailable.
    """
    page, free = huge_pages_free()
    if page == 0:
        raise HugePagesUnavailable("this kernel has no huge pages")
    missing = math.ceil(nbytes / page) - free
    if missing <= 0:
        yield
        return
    remedy = f"sysctl vm.nr_hugepages={int(_NR_HUGEPAGES.read_text()) + missing}"
    if not may_reserve:
        raise HugePagesUnavailable(f"too few huge pages are free, and none are reserved for a quick run ({remedy})")
    added = 0
    try:
        try:
            before = int(_NR_HUGEPAGES.read_text())
            _NR_HUGEPAGES.write_text(str(before + missing))
            added = int(_NR_HUGEPAGES.read_text()) - before
        except OSError as error:
            raise HugePagesUnavailable(f"vm.nr_hugepages: {error.strerror}; as root: {remedy}") from error
        if added < missing:
            raise HugePagesUnavailable(f"the kernel found only {added} of {missing} huge pages; memory is fragmented")
        yield
    finally:
        if added:
            # Relative, so that a change someone else made meanwhile survives.
            _NR_HUGEPAGES.write_text(str(max(0, int(_NR_HUGEPAGES.read_text()) - added)))


def ioengine(program: str, directory: Path) -> str:
    """io_uring where this kernel lets fio have it (a container's seccomp may not), else libaio."""
    probe = directory / "ioengine"
    try:
        FioTransfer(program, "io_uring", "write", [probe], 1 << 16, block_size=1 << 16, queue_depth=1).run()
        return "io_uring"
    except FioFailed:
        return "libaio"
    finally:
        probe.unlink(missing_ok=True)


@dataclass(frozen=True)
class Fio:
    """One fio job a measurement, on one file of the workload's total size. Its own clock is taken, so that starting the
    process costs it nothing; creating and preallocating a fresh file lies before that clock too (fio does both before it
    forks the job), which favours fio."""

    program: str
    ioengine: str
    buffers: Literal["default", "huge pages"]
    queue_depth: int = QUEUE_DEPTH

    @property
    def name(self) -> str:
        return "fio"

    @property
    def memory(self) -> str:
        return self.buffers if self.queue_depth == QUEUE_DEPTH else f"{self.buffers}, depth {self.queue_depth}"

    def files(self, workload: Workload, directory: Path) -> list[Path]:
        return [directory / (workload.state if workload.files == 1 else f"{workload.state}.small")]

    def measure(self, workload: Workload, paths: Sequence[Path]) -> Sample:
        what = (workload.operation, [paths[0]], workload.total_bytes, workload.block_size, self.queue_depth)
        transfer = FioTransfer(self.program, self.ioengine, *what, huge_pages=self.buffers == "huge pages")
        try:
            found = transfer.run(fresh=workload.state == "absent")
        except FioFailed as error:
            raise ContenderFailed(str(error)) from error
        return Sample(found.nbytes, found.seconds, found.cpu_seconds, peak_growth=None)

    def rehearse(self, workload: Workload, paths: Sequence[Path], contents: int) -> None:
        # What fio moves is not looked at: it reports a short transfer itself.
        self.measure(workload, paths)


@dataclass(frozen=True)
class FioOnFiles:
    """One fio job a measurement, on the files that ours move: opening them is part of its clock, as it is of ours."""

    program: str
    ioengine: str
    huge_pages: bool
    queue_depth: int
    order: Literal["roundrobin", "sequential"]

    @property
    def name(self) -> str:
        return "fio, same files"

    @property
    def memory(self) -> str:
        return f"{'huge pages' if self.huge_pages else 'default'}, depth {self.queue_depth}, {self.order}"

    def files(self, workload: Workload, directory: Path) -> list[Path]:
        return [directory / f"{workload.state}.{index}" for index in range(workload.files)]

    def measure(self, workload: Workload, paths: Sequence[Path]) -> Sample:
        command = [self.program, "--name=files", f"--ioengine={self.ioengine}", f"--rw={workload.operation}", "--direct=1"]
        command += ["--directory=" + _escaped(paths[0].parent), f"--filename_format={workload.state}.$filenum"]
        command += [f"--nrfiles={workload.files}", f"--filesize={workload.nbytes}", f"--size={workload.total_bytes}"]
        command += [f"--bs={workload.block_size}", f"--iodepth={self.queue_depth}", f"--file_service_type={self.order}"]
        job = _only_job([*command, f"--iomem={'mmaphuge' if self.huge_pages else 'malloc'}", "--fallocate=none"])
        moved = job[workload.operation]
        if moved["io_bytes"] != workload.total_bytes:
            raise ContenderFailed(f"fio moved {moved['io_bytes']} bytes of {workload.total_bytes}")
        return Sample(workload.total_bytes, max(moved["runtime"], 1) / 1000, _cpu_seconds(job), peak_growth=None)

    def rehearse(self, workload: Workload, paths: Sequence[Path], contents: int) -> None:
        self.measure(workload, paths)


@dataclass(frozen=True)
class RandomReads:
    """fio reading blocks at random places of one file, for some time."""

    program: str
    ioengine: str
    path: Path
    queue_depth: int
    jobs: int
    block_bytes: int = 4096

    @property
    def name(self) -> str:
        return f"fio, depth {self.queue_depth}, {self.jobs} job{'s' if self.jobs > 1 else ''}"

    def measure(self, seconds: float) -> dict[str, Any]:
        """Return reads, seconds and CPU seconds, all by fio's own clock. Raises ContenderFailed."""
        command = [self.program, "--name=reads", f"--ioengine={self.ioengine}", "--rw=randread", "--direct=1"]
        command += [f"--bs={self.block_bytes}"]
        # It takes the same random numbers from one run to the next, unless told.
        command += [f"--filename={_escaped(self.path)}", "--randrepeat=0", "--time_based", "--group_reporting"]
        command += [f"--runtime={round(seconds * 1000)}ms", f"--iodepth={self.queue_depth}", f"--numjobs={self.jobs}"]
        job = _only_job(command)
        return {
            "reads": job["read"]["total_ios"],
            "seconds": job["read"]["runtime"] / 1000,
            "cpu_seconds": _cpu_seconds(job),
        }


def _escaped(path: Path) -> str:
    # fio splits file names at colons.
    return str(path).replace(":", "\\:")


def _only_job(command: list[str]) -> dict[str, Any]:
    """Run fio and return what it reports of its job. Raises ContenderFailed."""
    try:
        output = output_of([*command, "--output-format=json"])
        # Notes may come before the document.
        (job,) = json.loads(output[f"\n{output}".index("\n{") :])["jobs"]
    except FioFailed as error:
        raise ContenderFailed(str(error)) from error
    except (ValueError, LookupError) as error:
        raise ContenderFailed(f"fio's report cannot be read: {error!r}") from error
    found: dict[str, Any] = job
    return found


def _cpu_seconds(job: dict[str, Any]) -> float:
    """Of all jobs that are reported as one."""
    seconds: float = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return seconds
