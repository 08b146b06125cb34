"""One process of a job: moves its tensor when told to, at the same time as the other processes."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from . import transfers
from .counters import cpu_seconds, latency_between, paths_between
from .folder import drop_pages, sync
from .job import Job, Sample, file_name


@dataclass(frozen=True)
class Described:
    """What a :class:`Member` reports when it is ready."""

    memory: str
    """Kind of memory that its tensor is in."""
    backend: str | None
    """The backend that its handle uses; None if the engine does not tell."""


@dataclass(frozen=True)
class Reply:
    """The outcome of a call in another process."""

    result: Any
    """What the call returned; None after an error."""
    error: Exception | None
    """What the call raised; None if it succeeded."""
    warned: tuple[Warning | str, ...]
    """The warnings that the call gave."""


class Member:
    """One process's part of a job: the tensor and the files of one place.

    Args:
        job: The job.
        index: Number of the place.
        directory: For its files.
        wait: A barrier: returns when all members have called it.

    Raises:
        Unsuitable: If this machine lacks what the job needs.
        MemoryError: If there is not enough memory for the tensor.
    """

    def __init__(self, job: Job, index: int, directory: Path, wait: Callable[[], object]) -> None:
        self._job = job
        self._wait = wait
        self._transfer = transfers.make(job, job.places[index].device)
        loops = range(job.total_loops if job.different_files else 1)
        self._files = [directory / file_name(job.operation, index, loop) for loop in loops]
        stats = self._transfer.stats()
        self.described = Described(self._transfer.memory, stats["backend"] if stats else None)

    def lay_out(self) -> None:
        """Write the files that are to be read, and flush them to the drive. Does nothing for a job that writes. Blocks."""
        if self._job.operation == "write":
            return
        for path in self._files:
            self._transfer.lay_out(path)
            sync(path)

    def loop(self, number: int) -> Sample:
        """Make and measure one transfer, starting and ending together with the other members. Blocks.

        Args:
            number: Number of the loop.

        Raises:
            OSError: If the transfer fails.
            ValueError: If validation finds a difference.
        """
        path = self._files[number % len(self._files)]
        drop_pages([path])
        if self._job.validate:
            self._transfer.renew()
        before = self._transfer.stats()
        self._wait()
        cpu, start = cpu_seconds(), time.perf_counter()
        self._transfer.move(path)
        if self._job.fsync and self._job.operation == "write":
            sync(path)
        moved, cpu = time.perf_counter(), cpu_seconds() - cpu
        self._wait()
        ended = time.perf_counter()
        if self._job.validate and not self._transfer.matches(path):
            raise ValueError(f"validation: tensor and '{path}' differ after loop {number}")
        after = self._transfer.stats()
        paths, latency = None, None
        if before is not None and after is not None:
            paths, latency = paths_between(before, after), latency_between(before, after)
        return Sample(self._job.io_size, (moved - start,), ended - start, cpu, paths, latency)

    def fallbacks(self) -> Mapping[str, int]:
        """Return why transfers took a slower path, with the number of times."""
        stats = self._transfer.stats()
        return dict(stats["fallbacks"]) if stats else {}


def serve(job: Job, index: int, directory: Path, wait: Callable[[], object], connection: Connection) -> None:
    """Run a member in a process of its own: the process's main function.

    Sends a :class:`Reply` with its :class:`Described`; then for each (method, arguments) received, calls that method of the
    member and sends a reply. Returns when the connection is closed, or if the member cannot be made.

    Args:
        job: As for :class:`Member`.
        index: As for :class:`Member`.
        directory: As for :class:`Member`.
        wait: As for :class:`Member`.
        connection: To the process that controls the job.
    """
    member: Member | None = None

    def start() -> Described:
        nonlocal member
        member = Member(job, index, directory, wait)
        return member.described

    with contextlib.suppress(EOFError, ConnectionError), connection:
        connection.send(_reply(start))
        while member is not None:
            method, arguments = connection.recv()
            connection.send(_reply(getattr(member, method), *arguments))


def _reply(call: Callable[..., Any], *arguments: object) -> Reply:
    """Call a function, and return its result or error, and its warnings."""
    result, failure = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = call(*arguments)
        except Exception as error:
            failure = error
    return Reply(result, failure, tuple(each.message for each in caught))
