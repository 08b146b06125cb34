"""One process of a measurement: it moves its tensor when it is told to, at the same moment as the others."""

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
    """What a member says of itself when it is ready."""

    memory: str
    backend: str | None


@dataclass(frozen=True)
class Reply:
    """What came of a call in another process: its result or its error, and the warnings that it gave."""

    result: Any
    error: Exception | None
    warned: tuple[Warning | str, ...]


class Member:
    """One process's part of a job: it holds the tensor and the files of one place.

    ``wait`` returns when all members have called it.
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
        """Make the files that reads are to find, through to the drive."""
        if self._job.operation == "write":
            return
        for path in self._files:
            self._transfer.lay_out(path)
            sync(path)

    def loop(self, number: int) -> Sample:
        """One loop. Raises OSError from the transfer, ValueError if validation finds a difference."""
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
        stats = self._transfer.stats()
        return dict(stats["fallbacks"]) if stats else {}


def serve(job: Job, index: int, directory: Path, wait: Callable[[], object], connection: Connection) -> None:
    """The process's main function: describes its member, then answers each (method, arguments), with a Reply. Ends with the
    connection."""
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
    result, failure = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = call(*arguments)
        except Exception as error:
            failure = error
    return Reply(result, failure, tuple(each.message for each in caught))
