"""ds_io: measures how fast a tensor is read from or written to a drive.

The options are DeepSpeed's (deepspeed/nvme/ds_aio_args.py), with a few more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from deepnvme.config import AioConfig
from deepnvme.engine import Backend
from deepnvme.tune.measure.job import EngineName, Job, Place
from deepnvme.tune.measure.measuring import Progress, measure
from deepnvme.tune.render import io_text
from deepnvme.tune.search.space import bad_setting

from .arguments import Parser, directory, natural, output_file_or_stdout, positive, size
from .console import emit, one_line_errors, write_out


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``ds_io`` command. Exits with status 2 if the arguments are wrong, 1 if the job fails, 130 if interrupted.

    Args:
        arguments: Command line without the program's name; None for that of the process.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    job = _job(parser, options)
    with one_line_errors(parser.prog):
        with _status_line() as progress:
            measurement = measure(job, progress)
        if options.json != "-":
            emit(io_text.render(measurement))
        if options.json is not None:
            write_out(json.dumps(io_text.as_document(measurement), indent=2), options.json)


def _parser() -> Parser:
    parser = Parser("ds_io", "Measure what a drive gives a tensor.")
    where = parser.add_argument_group("where")
    where.add_argument("--folder", type=directory, metavar="DIR", help="a directory on the drive, for every process")
    where.add_argument(
        "--folder_to_device_mapping",
        nargs="+",
        action="extend",
        default=[],
        metavar="DIR:GPU",
        help="a process for each: its directory, and the GPU that holds its tensor (which counts with --gpu only)",
    )
    what = parser.add_argument_group("what")
    what.add_argument(
        "--io_size", type=size, required=True, metavar="BYTES", help="of each process's tensor; K, M, G are powers of 1024"
    )
    what.add_argument("--read", action="store_true", help="read; else write")
    what.add_argument("--multi_process", type=positive, default=1, metavar="N", help="processes, with --folder (default: 1)")
    what.add_argument(
        "--engine",
        choices=get_args(EngineName),
        default="aio_handle",
        help="one handle; one for each call; torch.save and torch.load; torch.save through a handle (default: aio_handle)",
    )
    what.add_argument("--loops", type=positive, default=3, help="measured repetitions (default: 3)")
    what.add_argument("--warmup_loops", type=natural, default=1, help="repetitions before those (default: 1)")
    what.add_argument("--include_warmup_time", action="store_true", help="count the warm-up loops as well")
    what.add_argument("--different_file_each_iteration", action="store_true", help="a new file for each loop")
    what.add_argument("--fsync", action="store_true", help="time writes until they are on stable storage")
    what.add_argument("--validate", action="store_true", help="compare tensor and file after each loop, outside its time")
    how = parser.add_argument_group("how")
    how.add_argument("--block_size", type=size, default=1 << 20, metavar="BYTES", help="of one transfer (default: 1M)")
    how.add_argument("--queue_depth", type=positive, default=32, help="blocks under way at a time for each worker (default: 32)")
    how.add_argument("--io_parallel", type=positive, default=1, metavar="N", help="workers, each with its own queue (default: 1)")
    how.add_argument("--single_submit", action="store_true", help="one system call for each block")
    how.add_argument(
        "--sequential_requests", action="store_true", help="passed on as overlap_events=False; this engine always overlaps"
    )
    how.add_argument(
        "--backend", choices=get_args(Backend), default="auto", help="insist on one (default: the fastest that works)"
    )
    how.add_argument("--fast_io_size", type=size, default=64 << 20, metavar="BYTES", help="torch_fastio's buffer (default: 64M)")
    how.add_argument("--torch_legacy_save", action="store_true", help="torch's file format of before 1.6")
    memory = parser.add_argument_group("memory")
    memory.add_argument("--gpu", action="store_true", help="tensors in GPU memory, by way of a pinned buffer")
    memory.add_argument("--use_gds", action="store_true", help="with --gpu: GPUDirect Storage")
    memory.add_argument("--slow_bounce_buffer", action="store_true", help="with --gpu: hand the GPU tensor to the handle itself")
    memory.add_argument(
        "--use_accelerator_pin_memory", action="store_true", help="memory pinned by PyTorch instead of the handle's locked memory"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--compare", choices=("fio",), help="let fio do the same transfer, in turn")
    output.add_argument(
        "--json",
        type=output_file_or_stdout,
        nargs="?",
        const="-",
        metavar="FILE",
        help="write everything as JSON: to FILE, or instead of the text to stdout",
    )
    return parser


def _job(parser: Parser, options: argparse.Namespace) -> Job:
    """Return the job that the options describe; exit if they do not fit together."""
    if (options.folder is None) == (not options.folder_to_device_mapping):
        parser.error("give either --folder or --folder_to_device_mapping")
    if options.use_gds and not options.gpu:
        parser.error("--use_gds moves GPU memory: give --gpu, too")
    if options.multi_process > 1 and options.folder is None:
        parser.error("--multi_process goes with --folder; --folder_to_device_mapping has a process for each mapping")
    if options.folder is not None:
        places = tuple(Place(options.folder, device) for device in range(options.multi_process))
    else:
        places = tuple(_place(parser, mapping) for mapping in options.folder_to_device_mapping)
    try:
        setting = AioConfig(
            block_size=options.block_size,
            queue_depth=options.queue_depth,
            intra_op_parallelism=options.io_parallel,
            single_submit=options.single_submit,
            overlap_events=not options.sequential_requests,
            use_gds=options.use_gds,
            backend=options.backend,
        )
    except ValueError as error:
        parser.error(bad_setting(error, {"intra_op_parallelism": "io_parallel"}))
    return Job(
        places=places,
        operation="read" if options.read else "write",
        io_size=options.io_size,
        setting=setting,
        engine=options.engine,
        loops=options.loops,
        warmup_loops=options.warmup_loops,
        include_warmup=options.include_warmup_time,
        different_files=options.different_file_each_iteration,
        fsync=options.fsync,
        validate=options.validate,
        gpu=options.gpu,
        slow_bounce_buffer=options.slow_bounce_buffer,
        accelerator_pin_memory=options.use_accelerator_pin_memory,
        fast_io_size=options.fast_io_size,
        torch_legacy_save=options.torch_legacy_save,
        compare_fio=options.compare == "fio",
    )


def _place(parser: Parser, mapping: str) -> Place:
    """Parse DIR:GPU."""
    folder, colon, device = mapping.rpartition(":")
    if not colon or not folder or not (device.isascii() and device.isdecimal()):
        parser.error(f"--folder_to_device_mapping: must be DIR:GPU, such as {os.path.join('/mnt', 'nvme0')}:0, got {mapping!r}")
    return Place(Path(folder), int(device))


@contextlib.contextmanager
def _status_line() -> Iterator[Progress]:
    """Show the current step on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    # Drawn only between loops: the CPU time of a thread that draws during one would be counted.
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as line:
        yield lambda step: line.update(Text(step), refresh=True)
