"""Starts the processes of a job, calls methods of their members, collects the replies, and ends the processes."""

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
    """All members of a job, in this process or in others."""

    described: list[Described]
    """What each member reported when it was ready."""

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of all members at the same time. Blocks.

        Args:
            method: Name of a method of :class:`Member`.
            arguments: For each of the calls.

        Returns:
            The results, in the order of the members.

        Raises:
            Exception: What the first member to fail raised.
            ChildProcessError: If a process has died.
        """


@contextlib.contextmanager
def worker_processes(job: Job, directories: Sequence[Path]) -> Iterator[WorkerProcesses]:
    """Make a member for each directory: a single one in this process, several in a process each.

    The processes are ended at the end of the ``with`` block.
    """
    if len(directories) == 1:
        yield _One(job, directories[0])
        return
    # Spawned rather than forked: torch's threads do not survive a fork.
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
            theirs.close()  # so that reading raises EOFError when the process dies
        yield _Several(connections)
    except BaseException:
        # Kill all, because those at the barrier would wait forever.
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
    """A single member, in this process."""

    def __init__(self, job: Job, directory: Path) -> None:
        self._member = Member(job, 0, directory, lambda: None)
        self.described = [self._member.described]

    def call(self, method: str, *arguments: object) -> list[Any]:
        return [getattr(self._member, method)(*arguments)]


class _Several:
    """Members in other processes, each behind a connection."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self.described: list[Described] = self._replies()

    def call(self, method: str, *arguments: object) -> list[Any]:
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


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT while a process is started, which inherits that: Ctrl-C only interrupts this process, which ends the other."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
