"""One process of a measurement: it moves its tensor when it is told to, at the same moment as the others."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from . import transfers
from .folder import drop_pages
from .job import Job, Paths, Sample


class Barrier(Protocol):
    def wait(self) -> object: ...

    def abort(self) -> None: ...


@dataclass(frozen=True)
class Described:
    """What a worker says of itself when it is ready."""

    memory: str
    backend: str | None


@dataclass(frozen=True)
class Reply:
    """What came of a call in another process: its result or its error, and the warnings that it gave."""

    result: Any
    error: Exception | None
    warned: tuple[Warning | str, ...]


class Alone:
    """The barrier of one process."""

    def wait(self) -> None: ...

    def abort(self) -> None: ...


class Worker:
    """Holds the tensor and the files of one place."""

    def __init__(self, job: Job, index: int, directory: Path, barrier: Barrier) -> None:
        self._job = job
        self._barrier = barrier
        self._transfer = transfers.make(job, job.places[index].device)
        names = range(job.total_loops if job.different_files else 1)
        self._files = [directory / f"{job.operation}.{index}.{name}" for name in names]
        stats = self._transfer.stats()
        self.described = Described(self._transfer.memory, stats["backend"] if stats else None)

    def lay_out(self) -> None:
        """Make the files that reads are to find, through to the drive."""
        if self._job.operation == "write":
            return
        for path in self._files:
            self._transfer.lay_out(path)
            _sync(path)

    def loop(self, number: int) -> Sample:
        """One loop. Raises OSError from the transfer, ValueError if validation finds a difference."""
        path = self._files[number % len(self._files)]
        drop_pages([path])
        if self._job.validate:
            self._transfer.renew()
        before = self._transfer.stats()
        self._barrier.wait()
        cpu, start = cpu_seconds(), time.perf_counter()
        try:
            self._transfer.move(path)
            if self._job.fsync and self._job.operation == "write":
                _sync(path)
        except BaseException:
            self._barrier.abort()  # nobody waits for one that has failed
            raise
        moved, cpu = time.perf_counter(), cpu_seconds() - cpu
        self._barrier.wait()
        ended = time.perf_counter()
        if self._job.validate and not self._transfer.holds_what(path):
            raise ValueError(f"validation: tensor and '{path}' differ after loop {number}")
        after = self._transfer.stats()
        paths, latency = None, None
        if before is not None and after is not None:
            paths, latency = paths_between(before, after), latency_between(before, after)
        return Sample(self._job.io_size, moved - start, ended - start, cpu, paths, latency)

    def fallbacks(self) -> Mapping[str, int]:
        stats = self._transfer.stats()
        return dict(stats["fallbacks"]) if stats else {}


def serve(job: Job, index: int, directory: Path, barrier: Barrier, connection: Connection) -> None:
    """The process's main function: describes its worker, then answers each (method, arguments), with a Reply. Ends with the
    connection."""
    worker: Worker | None = None

    def start() -> Described:
        nonlocal worker
        worker = Worker(job, index, directory, barrier)
        return worker.described

    with contextlib.suppress(EOFError, ConnectionError), connection:
        connection.send(_reply(start))
        while worker is not None:
            method, arguments = connection.recv()
            connection.send(_reply(getattr(worker, method), *arguments))


def _reply(call: Callable[..., Any], *arguments: object) -> Reply:
    result, failure = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = call(*arguments)
        except threading.BrokenBarrierError:
            pass  # another has failed, and says so itself
        except Exception as error:
            failure = error
    return Reply(result, failure, tuple(each.message for each in caught))


def paths_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Paths:
    """What an engine moved between two looks at its statistics."""
    zero_copy, staged, buffered = (after[name] - before[name] for name in ("bytes_zero_copy", "bytes_staged", "bytes_buffered"))
    return Paths(zero_copy, staged, buffered, after.get("bytes_gds", 0) - before.get("bytes_gds", 0))


def latency_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[int, int]:
    """The blocks that ended between two looks at an engine's statistics."""
    earlier = before["block_latency"]
    new = {bound: count - earlier.get(bound, 0) for bound, count in after["block_latency"].items()}
    return {bound: count for bound, count in new.items() if count}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cpu_seconds() -> float:
    """Of this process so far."""
    # All threads, the kernel's io_uring workers included: those belong to this process.
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
