"""Runs a ds_io job: creates its files, runs its processes in step, alternates them with fio, and removes everything."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable

from deepnvme.drives.mounts import MEMORY_FILESYSTEMS

from .fio import FioContender, find_suitable
from .folder import check_memory, check_space, folder_facts, settle
from .job import Job, Measurement, Sample
from .workers import workers
from .workspace import workspace

_INTERPRETER = 200 << 20  # measured: a process with torch has 165 MiB that it shares with no other


def measure(job: Job, progress: Callable[[int, int], None] | None = None) -> Measurement:
    """Run a job and return its measurement. Blocks. An interrupt or an error leaves no file and no process behind.

    Files are created in a temporary directory in each folder. Before each loop, outside the measured time, the file's pages in
    the page cache are written back and dropped.

    Args:
        job: What to measure.
        progress: Called after each loop with the number of finished loops and the number of all loops.

    Raises:
        NotMeasurable: Before any transfer, if this machine cannot do the job.
        OSError: If a transfer fails.
        ChildProcessError: If a process dies.
        ValueError: If validation finds a difference.
        FioFailed: If fio fails.
    """
    facts = {place.folder: folder_facts(place.folder) for place in job.places}
    check_space((place.folder, _file_bytes(job)) for place in job.places)
    in_memory = sum(_file_bytes(job) for place in job.places if facts[place.folder].filesystem in MEMORY_FILESYSTEMS)
    remedy = "give a smaller --io_size" + (" or fewer processes" if len(job.places) > 1 else "")
    check_memory(_memory_bytes(job) * len(job.places) + in_memory, remedy)
    program = find_suitable(job) if job.compare_fio else None
    with contextlib.ExitStack() as stack:
        workspaces = {folder: stack.enter_context(workspace(folder, "ds_io-")) for folder in facts}
        directories = [workspaces[place.folder] for place in job.places]
        call = stack.enter_context(workers(job, directories))
        memory, backend, _ = call("describe")[0]
        fio = FioContender(job, program, backend, directories) if program is not None else None
        if job.operation == "read":
            call("lay_out")
        samples: list[Sample] = []
        contenders = [lambda number: samples.append(_loop(call, number)), *([] if fio is None else [fio.loop])]
        for number in range(job.total_loops):
            for loop in contenders:
                for directory in workspaces.values():
                    settle(directory)
                loop(number)
            if progress is not None:
                progress(number + 1, job.total_loops)
        fallbacks = sum((found for _, _, found in call("describe")), Counter[str]())
    first = 0 if job.include_warmup else job.warmup_loops
    return Measurement(
        job=job,
        folders=tuple(facts.values()),
        backend=backend,
        memory=memory,
        warmup=tuple(samples[:first]),
        samples=tuple(samples[first:]),
        fallbacks=fallbacks,
        fio=fio.comparison(samples, first) if fio is not None else None,
    )


def _memory_bytes(job: Job) -> int:
    """Return the bytes of host memory that one process needs."""
    loaded = job.by_torch and (job.operation == "read" or job.validate)
    tensors = 0 if job.setting.use_gds else job.io_size * (2 if loaded else 1)
    return tensors + (job.fast_io_size if job.engine == "torch_fastio" else 0) + (_INTERPRETER if len(job.places) > 1 else 0)


def _file_bytes(job: Job) -> int:
    """Return the most bytes of files that one process has at a time, fio's included. torch's files have a header and an index."""
    files = job.total_loops if job.different_files else 1
    ours = files * (job.io_size + (1 << 20 if job.by_torch else 0))
    return ours + (job.io_size if job.compare_fio and job.operation == "write" else 0)


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
