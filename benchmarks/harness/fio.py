"""fio as a contender, with its default buffers and with huge pages."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deepnvme._meminfo import meminfo
from harness.workloads import ContenderFailed, Sample, Workload

QUEUE_DEPTH = 32
_NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")


class HugePagesUnavailable(Exception):
    """fio cannot have huge pages here; the message says why and what to type."""


@contextlib.contextmanager
def huge_pages(nbytes: int, may_reserve: bool) -> Iterator[None]:
    """Have ``nbytes`` of huge pages free inside the block; those reserved for it are given back after it.

    ``may_reserve``: whether vm.nr_hugepages may be raised where too few are free. Raises HugePagesUnavailable.
    """
    page = meminfo("Hugepagesize")
    if page == 0:
        raise HugePagesUnavailable("this kernel has no huge pages")
    missing = math.ceil(nbytes / page) - meminfo("HugePages_Free")
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


def find() -> str | None:
    return shutil.which("fio")


def version(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()


def ioengine(program: str, directory: Path) -> str:
    """io_uring where this kernel lets fio have it (a container's seccomp may not), else libaio."""
    probe = directory / "ioengine"
    try:
        _run(program, probe, "write", 1 << 16, 1 << 16, "io_uring", "malloc", "none")
        return "io_uring"
    except ContenderFailed:
        return "libaio"
    finally:
        probe.unlink(missing_ok=True)


@dataclass(frozen=True)
class Fio:
    """One fio job a measurement, on one file of the workload's total size. Its own clock is taken, so that starting the
    process costs it nothing; creating and preallocating a fresh file lies before that clock too, which favours fio."""

    program: str
    ioengine: str
    buffers: Literal["default", "huge pages"]

    @property
    def name(self) -> str:
        return "fio"

    @property
    def memory(self) -> str:
        return self.buffers

    def files(self, workload: Workload, directory: Path) -> list[Path]:
        return [directory / (workload.state if workload.files == 1 else f"{workload.state}.small")]

    def measure(self, workload: Workload, paths: Sequence[Path]) -> Sample:
        iomem = "mmaphuge" if self.buffers == "huge pages" else "malloc"
        fallocate = "native" if workload.state == "absent" else "none"
        job = _run(
            self.program,
            paths[0],
            workload.operation,
            workload.total_bytes,
            workload.block_size,
            self.ioengine,
            iomem,
            fallocate,
        )
        moved = job[workload.operation]
        if moved["io_bytes"] != workload.total_bytes:
            raise ContenderFailed(f"fio moved {moved['io_bytes']} bytes of {workload.total_bytes}")
        # Percentages of the job's milliseconds, from fio's own getrusage.
        cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        # A job too short for fio's clock counts as its one millisecond.
        seconds = max(moved["runtime"], 1) / 1000
        return Sample(workload.total_bytes, seconds, cpu_seconds, peak_growth=None)

    def rehearse(self, workload: Workload, paths: Sequence[Path], contents: int) -> None:
        # What fio moves is not looked at: it reports a short transfer itself.
        self.measure(workload, paths)


def _run(
    program: str, path: Path, operation: str, nbytes: int, block_size: int, engine: str, iomem: str, fallocate: str
) -> dict[str, Any]:
    # fio splits file names at colons.
    filename = str(path).replace(":", "\\:")
    process = subprocess.Popen(
        [
            program,
            "--name=contender",
            f"--filename={filename}",
            f"--rw={operation}",
            f"--size={nbytes}",
            f"--bs={block_size}",
            f"--iodepth={QUEUE_DEPTH}",
            f"--ioengine={engine}",
            f"--iomem={iomem}",
            f"--fallocate={fallocate}",
            "--direct=1",
            "--output-format=json",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Its job is a second process: a session of their own lets an interrupted benchmark end both.
        start_new_session=True,
    )
    try:
        output, errors = process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode != 0:
        said = (errors.strip() or output.strip()).splitlines()
        raise ContenderFailed(f"fio ended with {process.returncode}: {said[0] if said else 'no message'}")
    # fio prints notes before the document.
    report: dict[str, Any] = json.loads(output[output.index("{") :])
    job: dict[str, Any] = report["jobs"][0]
    return job
