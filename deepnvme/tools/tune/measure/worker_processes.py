"""The processes of a job: each moves its tensor when told to, at the same time as the others."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .figures import latency_between
from .folder import drop_pages, sync
from .job import Job, Paths, Sample, file_name

CallMembers = Callable[..., list[Any]]
"""A function that calls a method of all members of a job at the same time, and returns their results in order. Blocks.

It takes the name of a method of :class:`Member`, and the arguments for each of the calls. It raises what the first member to fail
raised, and ChildProcessError if a process has died.
"""


@contextlib.contextmanager
def worker_processes(job: Job, directories: Sequence[Path]) -> Iterator[CallMembers]:
    """Make a member for each directory, and provide the function that calls them.

    A single member is in this process, several are in a process each. The processes are ended at the end of the ``with`` block.
    """
    if len(directories) == 1:
        member = Member(job, 0, directories[0], lambda: None)
        yield lambda method, *arguments: [getattr(member, method)(*arguments)]
        return
    # Spawned rather than forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(directories))
    processes, connections = [], []
    # The processes inherit that SIGINT is blocked: Ctrl-C only interrupts this process, which ends the others.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        try:
            for index, directory in enumerate(directories):
                ours, theirs = context.Pipe()
                connections.append(ours)
                process = context.Process(target=serve, args=(job, index, directory, barrier.wait, theirs), daemon=True)
                process.start()
                processes.append(process)
                theirs.close()  # so that reading raises EOFError when the process dies
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield SeveralProcesses(connections).call
    finally:
        # Killed, because a process at the barrier may wait forever, and none holds anything that outlives it.
        for process in processes:
            process.kill()
            process.join()
        for connection in connections:
            connection.close()


class SeveralProcesses:
    """Members in other processes, each behind a connection."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self._replies()  # each has made its member

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of all members at once, and return their results in order. Blocks."""
        for connection in self._connections:
            with contextlib.suppress(ConnectionError):  # from a process that has died: _replies() raises the error
                connection.send((method, arguments))
        return self._replies()

    def _replies(self) -> list[Any]:
        """Wait for a reply from every process."""
        replies: dict[Connection, Any] = {}
        # In the order of arrival: a process that waits at the barrier for one that has died never replies.
        while len(replies) < len(self._connections):
            for connection in wait([each for each in self._connections if each not in replies]):
                assert isinstance(connection, Connection)
                try:
                    reply: Reply = connection.recv()
                except (EOFError, ConnectionError):
                    number = self._connections.index(connection)
                    count = len(self._connections)
                    raise ChildProcessError(f"process {number} of {count} died; dmesg may tell why (out of memory?)") from None
                for warning in reply.warned:
                    warnings.warn(warning, stacklevel=2)
                if reply.error is not None:
                    raise reply.error
                replies[connection] = reply.result
        return [replies[connection] for connection in self._connections]


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
        from . import transfers  # here, because it takes seconds to import torch

        self._job = job
        self._wait = wait
        self._mover = transfers.make(job, job.places[index].device)
        loops = range(job.total_loops if job.different_files else 1)
        self._files = [directory / file_name(job.operation, index, loop) for loop in loops]

    def describe(self) -> tuple[str, str | None, dict[str, int]]:
        """Return what the member uses.

        That is the kind of memory that the tensor is in; the handle's backend, None if the engine does not tell; and the reasons
        why transfers so far took a slower path, with the number of times.
        """
        stats = self._mover.stats()
        return self._mover.memory, stats.get("backend"), dict(stats.get("fallbacks", {}))

    def lay_out(self) -> None:
        """Write the files of a job that reads, and flush them to the drive. Blocks."""
        for path in self._files:
            self._mover.write(path)
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
            self._mover.renew()
        before = self._mover.stats()
        self._wait()
        cpu, start = time.process_time(), time.perf_counter()
        self._mover.move(path)
        if self._job.fsync and self._job.operation == "write":
            sync(path)
        moved, cpu = time.perf_counter(), time.process_time() - cpu
        self._wait()
        ended = time.perf_counter()
        if self._job.validate and not self._mover.matches(path):
            raise ValueError(f"validation: tensor and '{path}' differ after loop {number}")
        after = self._mover.stats()
        paths, latency = (Paths.between(before, after), latency_between(before, after)) if after else (None, {})
        return Sample(self._job.io_size, ended - start, cpu, (moved - start,), paths, latency)


def serve(job: Job, index: int, directory: Path, wait: Callable[[], object], connection: Connection) -> None:
    """Run a member in a process of its own: the process's main function.

    Sends a :class:`Reply` when the member has been made; then for each (method, arguments) received, calls that method of the
    member and sends a reply. Returns when the connection is closed, or if the member cannot be made.

    Args:
        job: As for :class:`Member`.
        index: As for :class:`Member`.
        directory: As for :class:`Member`.
        wait: As for :class:`Member`.
        connection: To the process that controls the job.
    """
    with contextlib.suppress(EOFError, ConnectionError), connection:
        made = _reply(Member, job, index, directory, wait)
        connection.send(dataclasses.replace(made, result=None))
        while made.result is not None:
            method, arguments = connection.recv()
            connection.send(_reply(getattr(made.result, method), *arguments))


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
