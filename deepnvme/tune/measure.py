"""Carries out a ds_io job: files laid out, processes in step, fio in turn, everything removed."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from deepnvme._directory import IN_MEMORY
from deepnvme._meminfo import meminfo
from deepnvme.ops.op_builder import packages

from . import fio
from .figures import Spread
from .folder import Unsuitable, check_space, drop_pages, examine, settle, workspace
from .job import FioComparison, FioSample, Job, Measurement, Paths, Sample
from .worker import Alone, Described, Reply, Worker, serve

Progress = Callable[[str], None]

_INTERPRETER = 200 << 20  # measured: 165 MiB that a process with torch shares with no other


def measure(job: Job, progress: Progress = lambda step: None) -> Measurement:
    """Carry out ``job``. Blocks; an interrupt or an error leaves no file and no process behind.

    Files are in a directory of their own in each folder. Before each loop, and outside its time, what the page cache holds of
    the file is written back and dropped. Raises Unsuitable before the first byte where the job cannot be done here, OSError from
    the transfers, ChildProcessError if a process dies, ValueError if validation finds a difference, :class:`fio.FioFailed`.
    """
    facts = {place.folder: examine(place.folder) for place in job.places}
    check_space((place.folder, _file_bytes(job)) for place in job.places)
    in_memory = sum(_file_bytes(job) for place in job.places if facts[place.folder].filesystem in IN_MEMORY)
    remedy = "give a smaller --io_size" + (" or fewer processes" if len(job.places) > 1 else "")
    check_memory(_memory_bytes(job) * len(job.places) + in_memory, remedy)
    rival = _Fio(job) if job.compare_fio else None
    with contextlib.ExitStack() as stack:
        progress("starting")
        directories = {folder: stack.enter_context(workspace(folder, "ds_io-")) for folder in facts}
        crew = stack.enter_context(_crew(job, [directories[place.folder] for place in job.places]))
        described = crew.described[0]
        if rival is not None:
            rival.choose(described.backend, [directories[place.folder] for place in job.places])
        if job.operation == "read":
            progress("laying out files")
            crew.call("lay_out")
        samples: list[Sample] = []
        for number in range(job.total_loops):
            progress(f"loop {number + 1} of {job.total_loops}")
            for directory in directories.values():
                settle(directory)
            samples.append(_together(crew.call("loop", number)))
            if rival is not None:
                progress(f"loop {number + 1} of {job.total_loops}: fio")
                for directory in directories.values():
                    settle(directory)
                rival.loop(number)
        fallbacks: dict[str, int] = {}
        for found in crew.call("fallbacks"):
            for reason, count in found.items():
                fallbacks[reason] = fallbacks.get(reason, 0) + count
    first = 0 if job.include_warmup else job.warmup_loops
    return Measurement(
        job=job,
        folders=tuple(facts.values()),
        backend=described.backend,
        memory=described.memory,
        warmup=tuple(samples[:first]),
        samples=tuple(samples[first:]),
        fallbacks=fallbacks,
        fio=rival.comparison(samples, first) if rival is not None else None,
    )


def check_memory(nbytes: int, remedy: str = "give a smaller --io_size") -> None:
    """Raise Unsuitable unless so much memory is available: with less, the kernel would kill somebody."""
    available = meminfo("MemAvailable")
    if nbytes > available:
        raise Unsuitable(f"{nbytes} bytes of memory are needed, {available} are available; {remedy}")


def _memory_bytes(job: Job) -> int:
    """Of one process, on the host."""
    by_torch = job.engine.startswith("torch")
    loaded = by_torch and (job.operation == "read" or job.validate)
    tensors = 0 if job.setting.use_gds else job.io_size * (2 if loaded else 1)
    return tensors + (job.fast_io_size if job.engine == "torch_fastio" else 0) + (_INTERPRETER if len(job.places) > 1 else 0)


def _file_bytes(job: Job) -> int:
    """Of all files of one process at a time, fio's included; torch's have a header and an index."""
    files = job.total_loops if job.different_files else 1
    ours = files * (job.io_size + (1 << 20 if job.engine.startswith("torch") else 0))
    return ours + (job.io_size if job.compare_fio and job.operation == "write" else 0)


def _together(samples: Sequence[Sample]) -> Sample:
    """What the processes did in one loop, as one."""
    paths = [sample.paths for sample in samples if sample.paths is not None]
    latency: dict[int, int] = {}
    for sample in samples:
        for bound, count in (sample.block_latency or {}).items():
            latency[bound] = latency.get(bound, 0) + count
    return Sample(
        nbytes=sum(sample.nbytes for sample in samples),
        task_seconds=max(sample.task_seconds for sample in samples),
        seconds=max(sample.seconds for sample in samples),
        cpu_seconds=sum(sample.cpu_seconds for sample in samples),
        paths=sum(paths, Paths(0, 0, 0)) if paths else None,
        block_latency=dict(sorted(latency.items())) if paths else None,
    )


# -- processes ---------------------------------------------------------------------------------------------------------


class _Crew:
    """The workers of a job: one in this process, or each in its own."""

    described: list[Described]

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Have every worker do it at the same time, and wait for all. Raises what the first to fail raised."""
        raise NotImplementedError


class _One(_Crew):
    def __init__(self, job: Job, directory: Path) -> None:
        self._worker = Worker(job, 0, directory, Alone())
        self.described = [self._worker.described]

    def call(self, method: str, *arguments: object) -> list[Any]:
        return [getattr(self._worker, method)(*arguments)]


class _Several(_Crew):
    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self.described = self._replies()

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
def _crew(job: Job, directories: Sequence[Path]) -> Iterator[_Crew]:
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
            process = context.Process(target=serve, args=(job, index, directory, barrier, theirs), daemon=True)
            with _without_interrupts():
                process.start()
            processes.append(process)
            theirs.close()  # so that its death is seen here
        yield _Several(connections)
    except BaseException:
        # Not by way of the barrier: to abort it is to wait for all that wait there, for one that was killed for ever.
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


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """For the start of a process, which then never sees Ctrl-C: that is for this one, which ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- fio ---------------------------------------------------------------------------------------------------------------


class _Fio:
    """fio with the job's settings, in turn with us."""

    def __init__(self, job: Job) -> None:
        program = fio.find()
        if program is None:
            raise Unsuitable("--compare fio: fio was not found; install your distribution's package of that name")
        if job.engine != "aio_handle" or job.gpu:
            raise Unsuitable("--compare fio: fio moves what aio_handle does in host memory; leave out --engine and --gpu")
        block_size, workers = job.setting.block_size, job.setting.intra_op_parallelism
        if not all(fio.can_move(piece, block_size) for piece in fio.pieces(Path(), job.io_size, block_size, workers)):
            raise Unsuitable("--compare fio: fio moves whole blocks only; give an --io_size that is a multiple of --block_size")
        self._version = fio.version(program)
        self._program = program
        self._job = job
        self._samples: list[FioSample] = []

    def choose(self, backend: str | None, directories: Sequence[Path]) -> None:
        job, setting = self._job, self._job.setting
        # Reads share the file that was laid out; with a file for each loop, the first loop's.
        name = "read.{}.0" if job.operation == "read" else "fio.{}"
        self._paths = [directory / name.format(index) for index, directory in enumerate(directories)]
        self._work = [
            piece
            for path in self._paths
            for piece in fio.pieces(path, job.io_size, setting.block_size, setting.intra_op_parallelism)
        ]
        ioengine = "io_uring" if backend == "io_uring" else "libaio"
        ordinary = fio.FioSettings(self._program, ioengine, setting.block_size, setting.queue_depth, huge_pages=False)
        page = meminfo("Hugepagesize")
        missing = fio.huge_pages_needed(ordinary, len(self._work), page) - meminfo("HugePages_Free") if page else 0
        huge = page > 0 and missing <= 0
        self._settings = dataclasses.replace(ordinary, huge_pages=huge)
        self._buffers = "huge pages, as ours are" if huge else "ordinary memory, which is slower than the huge pages of ours"
        if missing > 0:
            total = meminfo("HugePages_Total") + missing
            self._buffers += f"; to give it some: {packages.as_root(f'sysctl vm.nr_hugepages={total}')}"

    def loop(self, number: int) -> None:
        job = self._job
        if job.operation == "write" and job.different_files:
            for path in self._paths:
                path.unlink(missing_ok=True)
        drop_pages(self._paths)
        fresh = job.operation == "write" and not self._paths[0].exists()
        self._samples.append(
            fio.run(self._settings, job.operation, self._work, fallocate="native" if fresh else "none", fsync=job.fsync)
        )

    def comparison(self, ours: Sequence[Sample], first: int) -> FioComparison:
        pairs = list(zip(ours, self._samples, strict=True))[first:]
        return FioComparison(
            version=self._version,
            ioengine=self._settings.ioengine,
            buffers=self._buffers,
            samples=tuple(theirs for _, theirs in pairs),
            ratio=Spread.of([mine.gb_per_second / theirs.gb_per_second for mine, theirs in pairs]),
        )
