"""The processes of a job. All of them move their tensors at the same time."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from .figures import latency_between
from .folder import drop_pages, sync
from .job import PATHS, Job, Sample, file_name

CallWorkers = Callable[..., list[Any]]
"""Function that calls a method of all workers of a job at the same time, and returns their results in order. Blocks.

Its arguments are the name of a method of :class:`Worker` and that method's arguments. It raises the error of the first worker
that fails, or ChildProcessError if a process has died.
"""


class Worker:
    """One process's part of a job: the tensor and the files of one place.

    Args:
        job: The job.
        index: Index of the place in ``job.places``.
        directory: Directory for the files.

    Raises:
        NotMeasurable: If this machine lacks what the job needs.
        MemoryError: If there is not enough memory for the tensor.
    """

    def __init__(self, job: Job, index: int, directory: Path) -> None:
        from . import transfers  # here, because it takes seconds to import torch

        self._job = job
        self._mover = transfers.TensorMover(job, job.places[index].device)
        loops = range(job.total_loops if job.different_files else 1)
        self._files = [directory / file_name(job.operation, index, loop) for loop in loops]

    def describe(self) -> tuple[str, str | None, Counter[str]]:
        """Return the tensor's kind of memory, the handle's backend, and the reasons for slower paths so far.

        Returns:
            The kind of memory as text; the backend, None if the engine does not report one; and the number of transfers for
            each reason.
        """
        stats = self._mover.stats()
        return self._mover.memory, stats.get("backend"), Counter(stats.get("fallbacks", {}))

    def lay_out(self) -> None:
        """Write the files of a job that reads, and flush them to the drive. Blocks."""
        for path in self._files:
            self._mover.write(path)
            sync(path)

    def prepare(self, number: int) -> None:
        """Drop the pages of a loop's file from the page cache.

        If the job validates, also change the bytes that the transfer will replace, so that a transfer that does nothing is
        noticed.
        """
        drop_pages([self._file(number)])
        if self._job.validate:
            self._mover.renew()

    def loop(self, number: int) -> tuple[float, Sample]:
        """Make and measure one transfer. Blocks.

        Args:
            number: Number of the loop.

        Returns:
            The start of the transfer in seconds, by a clock that all processes share, and the transfer's sample.

        Raises:
            OSError: If the transfer fails.
            ValueError: If validation finds a difference.
        """
        job, mover, path = self._job, self._mover, self._file(number)
        before = mover.stats()
        cpu, start = time.process_time(), time.monotonic()
        mover.move(path)
        if job.fsync and job.operation == "write":
            sync(path)
        seconds, cpu = time.monotonic() - start, time.process_time() - cpu
        after = mover.stats()
        if job.validate and not mover.matches(path):
            raise ValueError(f"validation: tensor and '{path}' differ after loop {number}")
        paths, latency = None, Counter[float]()
        if after:
            paths = Counter({name: after.get(f"bytes_{name}", 0) - before.get(f"bytes_{name}", 0) for name in PATHS})
            latency = latency_between(before, after)
        return start, Sample(job.io_size, seconds, cpu, (seconds,), paths, latency)

    def _file(self, number: int) -> Path:
        return self._files[number % len(self._files)]


@contextlib.contextmanager
def workers(job: Job, directories: Sequence[Path]) -> Iterator[CallWorkers]:
    """Start a worker for each directory, and yield the function that calls all of them.

    A single worker runs in this process, several in one process each. The processes are killed at the end of the ``with``
    block.
    """
    if len(directories) == 1:
        worker = Worker(job, 0, directories[0])
        yield lambda method, *arguments: [getattr(worker, method)(*arguments)]
        return
    # Spawned rather than forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pools = [ProcessPoolExecutor(1, context) for _ in directories]
    others = multiprocessing.active_children()

    def call(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        try:
            futures = [pool.submit(_with_warnings, function, *each) for pool, each in zip(pools, arguments, strict=True)]
            for future in as_completed(futures):
                for warning in future.result()[1]:
                    warnings.warn(warning, stacklevel=2)
        except BrokenProcessPool as error:
            raise ChildProcessError(f"one of {len(pools)} processes died; dmesg may tell why (out of memory?)") from error
        return [future.result()[0] for future in futures]

    try:
        # The processes inherit that SIGINT is blocked: Ctrl-C only interrupts this process, which ends the others.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for pool in pools:
                pool.submit(int)  # starts its process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        call(_make_worker, [(job, index, directory) for index, directory in enumerate(directories)])
        yield lambda method, *arguments: call(_call_worker, [(method, *arguments)] * len(pools))
    finally:
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()  # it may be at a long transfer, and holds nothing that outlives it
        for pool in pools:
            pool.shutdown()


# What runs in the other processes.

_worker: Worker


def _make_worker(job: Job, index: int, directory: Path) -> None:
    global _worker
    _worker = Worker(job, index, directory)


def _call_worker(method: str, *arguments: object) -> Any:
    return getattr(_worker, method)(*arguments)


def _with_warnings(function: Callable[..., Any], *arguments: object) -> tuple[Any, list[Warning | str]]:
    """Call a function, and return its result and the warnings that it raised."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return function(*arguments), [each.message for each in caught]
