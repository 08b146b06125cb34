"""The same transfer as fio does it."""

from __future__ import annotations

import contextlib
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

from .job import FioSample, Operation


class FioFailed(Exception):
    """fio could not do what was asked; the message is what it said."""


@dataclass(frozen=True)
class FioRange:
    """What one job of fio moves: a range of a file."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class FioSettings:
    program: str
    ioengine: str
    block_size: int
    queue_depth: int
    """Of each piece."""
    huge_pages: bool
    """Buffers in huge pages that are reserved (vm.nr_hugepages), instead of ordinary memory."""


def find() -> str | None:
    """The program, if it is installed."""
    return shutil.which("fio")


def version(program: str) -> str:
    """Raises FioFailed."""
    return _output([program, "--version"]).strip()


def huge_pages_needed(settings: FioSettings, pieces: int, page: int) -> int:
    """How many of ``page`` bytes its buffers take: fio aligns each piece's to a huge page, and wants one more."""
    return pieces * (math.ceil(settings.queue_depth * settings.block_size / page) + 1)


def pieces(path: Path, nbytes: int, block_size: int, count: int) -> list[FioRange]:
    """A file dealt to ``count`` jobs in whole blocks, as workers share a tensor."""
    blocks = math.ceil(nbytes / block_size)
    bounds = [min(nbytes, blocks * each // count * block_size) for each in range(count + 1)]
    return [FioRange(path, begin, end - begin) for begin, end in itertools.pairwise(bounds) if end > begin]


def can_move(piece: FioRange, block_size: int) -> bool:
    """fio leaves out what does not fill a block; by O_DIRECT, blocks are of whole sectors."""
    block = min(block_size, piece.nbytes)
    return piece.nbytes % block == 0 and block % 512 == 0


def run(
    settings: FioSettings,
    operation: Operation,
    work: Sequence[FioRange],
    *,
    fallocate: Literal["native", "none"],
    fsync: bool = False,
) -> FioSample:
    """Move every piece, all at the same time, by O_DIRECT. Blocks; fio's processes end with an interrupt of this one.

    ``fallocate``: "native" reserves a new file's space before fio's clock starts. Rates and times are fio's own, so that
    starting it costs it nothing. Raises FioFailed.
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
    output = _output(command)
    try:
        # fio prints notes before the document.
        document = output[f"\n{output}".index("\n{") :]
        return _sample(json.loads(document), operation, sum(piece.nbytes for piece in work))
    except (ValueError, LookupError, TypeError) as error:
        raise FioFailed(f"the report of {settings.program} cannot be read: {error!r}") from error


def _output(command: Sequence[str]) -> str:
    # Its jobs are processes of their own: a session of theirs lets an interrupt end all of them.
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


def _sample(report: dict[str, Any], operation: Operation, nbytes: int) -> FioSample:
    (job,) = report["jobs"]  # --group_reporting makes one of all
    moved = job[operation]
    if moved["io_bytes"] != nbytes:
        raise FioFailed(f"fio moved {moved['io_bytes']} bytes of {nbytes}")
    percentiles = moved["clat_ns"].get("percentile", {})
    return FioSample(
        nbytes,
        # A job too short for fio's clock counts as its one millisecond.
        max(moved["runtime"], 1) / 1000,
        # Percentages of the jobs' milliseconds, from fio's own getrusage.
        (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000,
        percentiles.get("50.000000", 0) / 1e9,
        percentiles.get("99.000000", 0) / 1e9,
    )
