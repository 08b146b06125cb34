"""Runs a ds_io job: creates its files, runs its processes in step, and removes everything.

All processes of a job move their tensors at the same time.
"""

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

from deepnvme.drives.mounts import MEMORY_FILESYSTEMS

from .figures import latency_between
from .folder import check_memory, check_space, drop_pages, folder_facts, settle, sync, workspace
from .job import PATHS, Job, Measurement, Sample, file_name

_INTERPRETER = 200 << 20  # measured: a process with torch has 165 MiB that it shares with no other


def measure(job: Job) -> Measurement:
    """Run a job and return its measurement. Blocks. An interrupt or an error leaves no file and no process behind.

    Files are created in a temporary directory in each folder. Before each loop, outside the measured time, the file's pages in
    the page cache are written back and dropped.

    Args:
        job: What to measure.

    Raises:
        NotMeasurable: Before any transfer, if this machine cannot do the job.
        OSError: If a transfer fails.
        ChildProcessError: If a process dies.
        ValueError: If validation finds a difference.
    """
    facts = {place.folder: folder_facts(place.folder) for place in job.places}
    check_space((place.folder, _file_bytes(job)) for place in job.places)
    in_memory = sum(_file_bytes(job) for place in job.places if facts[place.folder].filesystem in MEMORY_FILESYSTEMS)
    remedy = "give a smaller --io_size" + (" or fewer processes" if len(job.places) > 1 else "")
    check_memory(_memory_bytes(job) * len(job.places) + in_memory, remedy)
    with contextlib.ExitStack() as stack:
        workspaces = {folder: stack.enter_context(workspace(folder, "ds_io-")) for folder in facts}
        directories = [workspaces[place.folder] for place in job.places]
        call = stack.enter_context(workers(job, directories))
        memory, backend, _ = call("describe")[0]
        if job.operation == "read":
            call("lay_out")
        samples: list[Sample] = []
        for number in range(job.total_loops):
            for directory in workspaces.values():
                settle(directory)
            samples.append(_loop(call, number))
        fallbacks = sum((found for _, _, found in call("describe")), Counter[str]())
    first = 0 if job.include_warmup else job.warmup_loops
    return Measurement(
        job=job,
        folders=tuple(facts.values()),
        backend=backend,
        memory=memory,
        samples=tuple(samples[first:]),
        fallbacks=fallbacks,
    )


def _memory_bytes(job: Job) -> int:
    """Return the bytes of host memory that one process needs."""
    loaded = job.by_torch and (job.operation == "read" or job.validate)
    tensors = 0 if job.setting.use_gds else job.io_size * (2 if loaded else 1)
    return tensors + (job.fast_io_size if job.engine == "torch_fastio" else 0) + (_INTERPRETER if len(job.places) > 1 else 0)


def _file_bytes(job: Job) -> int:
    """Return the most bytes of files that one process has at a time. torch's files have a header and an index."""
    files = job.total_loops if job.different_files else 1
    return files * (job.io_size + (1 << 20 if job.by_torch else 0))


def _loop(call: Callable[..., list[tuple[float, Sample]]], number: int) -> Sample:
    """Run one loop on all workers at the same time, and return their combined sample."""
    call("prepare", number)
    found = call("loop", number)
    samples = [sample for _, sample in found]
    counted = [sample.paths for sample in samples if sample.paths is not None]
    return Sample(
        nbytes=sum(sample.nbytes for sample in samples),
        seconds=max(start + sample.seconds for start, sample in found) - min(start for start, _ in found),
        cpu_seconds=sum(sample.cpu_seconds for sample in samples),
        requests=tuple(seconds for sample in samples for seconds in sample.requests),
        paths=sum(counted, Counter[str]()) if counted else None,
        block_latency=sum((sample.block_latency for sample in samples), Counter[float]()),
    )


# The processes of a job.

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
            futures = [pool.submit(function, *each) for pool, each in zip(pools, arguments, strict=True)]
            for future in as_completed(futures):
                future.result()  # raises the first error at once
        except BrokenProcessPool as error:
            raise ChildProcessError(f"one of {len(pools)} processes died; dmesg may tell why (out of memory?)") from error
        return [future.result() for future in futures]

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
    warnings.simplefilter("ignore", RuntimeWarning)  # such as of a drive without direct I/O, which the result tells
    _worker = Worker(job, index, directory)


def _call_worker(method: str, *arguments: object) -> Any:
    return getattr(_worker, method)(*arguments)
