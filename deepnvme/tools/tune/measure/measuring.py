"""Runs a ds_io job: makes the files, runs the processes in step and fio in turn with them, and removes everything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from deepnvme.drives import MEMORY_FILESYSTEMS

from .figures import merged
from .fio import FioComparisonRun, find_suitable
from .folder import check_memory, check_space, folder_facts, settle
from .job import Job, Measurement, Paths, Sample
from .worker_processes import worker_processes
from .workspace import workspace

_INTERPRETER = 200 << 20  # measured: a process with torch has 165 MiB that it shares with no other


def measure(job: Job, progress: Callable[[str], None] = lambda step: None) -> Measurement:
    """Run a job and return its measurement. Blocks. An interrupt or an error leaves no file and no process behind.

    Files are made in a temporary directory in each folder. Before each loop, outside the measured time, the file's pages in the
    page cache are written back and dropped.

    Args:
        job: What to measure.
        progress: Called with a description of each step as it begins.

    Raises:
        Unsuitable: Before anything is transferred, if the job cannot be done on this machine.
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
        progress("starting")
        workspaces = {folder: stack.enter_context(workspace(folder, "ds_io-")) for folder in facts}
        directories = [workspaces[place.folder] for place in job.places]
        call = stack.enter_context(worker_processes(job, directories))
        memory, backend, _ = call("describe")[0]
        fio_run = FioComparisonRun(job, program, backend, directories) if program is not None else None
        if job.operation == "read":
            progress("laying out files")
            call("lay_out")
        samples: list[Sample] = []
        for number in range(job.total_loops):
            progress(f"loop {number + 1} of {job.total_loops}")
            for directory in workspaces.values():
                settle(directory)
            samples.append(_together(call("loop", number)))
            if fio_run is not None:
                progress(f"loop {number + 1} of {job.total_loops}: fio")
                for directory in workspaces.values():
                    settle(directory)
                fio_run.loop()
        fallbacks = merged(found for _, _, found in call("describe"))
    first = 0 if job.include_warmup else job.warmup_loops
    return Measurement(
        job=job,
        folders=tuple(facts.values()),
        backend=backend,
        memory=memory,
        warmup=tuple(samples[:first]),
        samples=tuple(samples[first:]),
        fallbacks=fallbacks,
        fio=fio_run.comparison(samples, first) if fio_run is not None else None,
    )


def _memory_bytes(job: Job) -> int:
    """Return the bytes of host memory that one process needs."""
    by_torch = job.engine.startswith("torch")
    loaded = by_torch and (job.operation == "read" or job.validate)
    tensors = 0 if job.setting.use_gds else job.io_size * (2 if loaded else 1)
    return tensors + (job.fast_io_size if job.engine == "torch_fastio" else 0) + (_INTERPRETER if len(job.places) > 1 else 0)


def _file_bytes(job: Job) -> int:
    """Return the bytes of all files that one process has at a time, fio's included. torch's files have a header and an index."""
    files = job.total_loops if job.different_files else 1
    ours = files * (job.io_size + (1 << 20 if job.engine.startswith("torch") else 0))
    return ours + (job.io_size if job.compare_fio and job.operation == "write" else 0)


def _together(samples: Sequence[Sample]) -> Sample:
    """Combine the samples of all processes for one loop."""
    return Sample(
        nbytes=sum(sample.nbytes for sample in samples),
        requests=tuple(seconds for sample in samples for seconds in sample.requests),
        seconds=max(sample.seconds for sample in samples),
        cpu_seconds=sum(sample.cpu_seconds for sample in samples),
        paths=Paths.total(sample.paths for sample in samples),
        block_latency=merged(sample.block_latency for sample in samples),
    )
