"""The processes of a job: how they are started, told what to do, listened to and ended."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from .job import Job
from .process import Described, Member, Reply, serve


class WorkerProcesses(Protocol):
    """All members of a job."""

    described: list[Described]

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Have every member do it at the same time, and wait for all. Raises what the first to fail raised, ChildProcessError if
        a process has died."""


@contextlib.contextmanager
def worker_processes(job: Job, directories: Sequence[Path]) -> Iterator[WorkerProcesses]:
    """A member for each directory: one in this process, several each in its own. None outlives the ``with``."""
    if len(directories) == 1:
        yield _One(job, directories[0])
        return
    # Not forked: torch's threads do not survive that.
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(directories))
    processes, connections = [], []
    try:
        for index, directory in enumerate(directories):
            ours, theirs = context.Pipe()
            connections.append(ours)
            process = context.Process(target=serve, args=(job, index, directory, barrier.wait, theirs), daemon=True)
            with _without_interrupts():
                process.start()
            processes.append(process)
            theirs.close()  # so that its death is seen here
        yield _Several(connections)
    except BaseException:
        # All at once, also those at the barrier: nobody comes there any more.
        for process in processes:
            process.kill()
        raise
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


class _One:
    def __init__(self, job: Job, directory: Path) -> None:
        self._member = Member(job, 0, directory, lambda: None)
        self.described = [self._member.described]

    def call(self, method: str, *arguments: object) -> list[Any]:
        return [getattr(self._member, method)(*arguments)]


class _Several:
    """Members in other processes, each of which serves at the end of a connection."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self.described: list[Described] = self._replies()

    def call(self, method: str, *arguments: object) -> list[Any]:
        for connection in self._connections:
            with contextlib.suppress(ConnectionError):  # of one that died, which is told where its reply is awaited
                connection.send((method, arguments))
        return self._replies()

    def _replies(self) -> list[Any]:
        replies: dict[Connection, Any] = {}
        # As they come, because one that waits for another's sake says nothing when that other has died.
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


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """For the start of a process, which then never sees Ctrl-C: that is for this one, which ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
