"""ds_io: measures how fast a tensor is read from or written to a drive.

The options are DeepSpeed's (deepspeed/nvme/ds_aio_args.py), with a few more.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from deepnvme.drives.aio_config import AioConfig
from deepnvme.engine import Backend
from deepnvme.version import __version__

from .command_line import (
    Parser,
    add_json_option,
    directory,
    natural,
    one_line_errors,
    positive,
    show_result,
    size,
)
from .job import PATHS, EngineName, Job, Measurement, Place, Sample
from .measuring import measure
from .rendering import measurement_text
from .settings import bad_setting


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``ds_io`` command. Exits with status 2 if the arguments are wrong, 1 if the job fails, 130 if interrupted.

    Args:
        arguments: Command line without the program's name; None for ``sys.argv[1:]``.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    job = _job(parser, options)
    with one_line_errors(parser.prog):
        measurement = measure(job)
        show_result(measurement_text(measurement), as_document(measurement), options.json)


def _parser() -> Parser:
    """Return the argument parser. Its options are named after the fields of Job and AioConfig that they set."""
    parser = Parser("ds_io", "Measure what a drive gives a tensor.")
    where = parser.add_argument_group("where").add_argument
    where("--folder", type=directory, metavar="DIR", help="a directory on the drive, for every process")
    mapping = "a process for each: its directory, and the GPU that holds its tensor (which counts with --gpu only)"
    where("--folder_to_device_mapping", nargs="+", action="extend", default=[], metavar="DIR:GPU", help=mapping)
    what = parser.add_argument_group("what").add_argument
    what("--io_size", type=size, required=True, metavar="BYTES", help="of each process's tensor")
    what("--read", dest="operation", action="store_const", const="read", default="write", help="read; else write")
    what("--multi_process", type=positive, default=1, metavar="N", help="processes, with --folder (default: 1)")
    engines = "one handle; one for each call; torch.save and torch.load; torch.save through a handle (default: aio_handle)"
    what("--engine", choices=get_args(EngineName), default="aio_handle", help=engines)
    what("--loops", type=positive, default=3, help="measured repetitions (default: 3)")
    what("--warmup_loops", type=natural, default=1, help="repetitions before those (default: 1)")
    what("--include_warmup_time", dest="include_warmup", action="store_true", help="count the warm-up loops as well")
    what("--different_file_each_iteration", dest="different_files", action="store_true", help="a new file for each loop")
    what("--fsync", action="store_true", help="time writes until they are on stable storage")
    what("--validate", action="store_true", help="compare tensor and file after each loop, outside its time")
    how = parser.add_argument_group("how").add_argument
    how("--block_size", type=size, default=1 << 20, metavar="BYTES", help="of one transfer (default: 1M)")
    how("--queue_depth", type=positive, default=32, help="blocks under way at a time for each worker (default: 32)")
    workers = "workers, each with its own queue (default: 1)"
    how("--io_parallel", dest="intra_op_parallelism", type=positive, default=1, metavar="N", help=workers)
    how("--single_submit", action="store_true", help="one system call for each block")
    sequential = "passed on as overlap_events=False; this engine always overlaps"
    how("--sequential_requests", dest="overlap_events", action="store_false", help=sequential)
    how("--backend", choices=get_args(Backend), default="auto", help="insist on one (default: the fastest that works)")
    how("--fast_io_size", type=size, default=64 << 20, metavar="BYTES", help="torch_fastio's buffer (default: 64M)")
    how("--torch_legacy_save", action="store_true", help="torch's file format of before 1.6")
    memory = parser.add_argument_group("memory").add_argument
    memory("--gpu", action="store_true", help="tensors in GPU memory, by way of a pinned buffer")
    memory("--use_gds", action="store_true", help="with --gpu: GPUDirect Storage")
    memory("--slow_bounce_buffer", action="store_true", help="with --gpu: hand the GPU tensor to the handle itself")
    pinned = "memory pinned by PyTorch instead of the handle's locked memory"
    memory("--use_accelerator_pin_memory", dest="accelerator_pin_memory", action="store_true", help=pinned)
    add_json_option(parser.add_argument_group("output"))
    return parser


def _job(parser: Parser, options: argparse.Namespace) -> Job:
    """Return the job that the options describe. Exits with status 2 if options contradict each other."""
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
    given = vars(options)
    try:
        setting = AioConfig(**{name: given[name] for name in AioConfig.model_fields})
    except ValueError as error:
        parser.error(bad_setting(error))
    more = {field.name: given[field.name] for field in dataclasses.fields(Job) if field.name in given}
    return Job(places=places, setting=setting, **more)


def _place(parser: Parser, mapping: str) -> Place:
    """Parse an argument of the form ``DIR:GPU``. Exits with status 2 and a message if it has another form."""
    folder, colon, device = mapping.rpartition(":")
    if not colon or not folder or not (device.isascii() and device.isdecimal()):
        parser.error(f"--folder_to_device_mapping: must be DIR:GPU, such as {os.path.join('/mnt', 'nvme0')}:0, got {mapping!r}")
    return Place(Path(folder), int(device))


def as_document(measurement: Measurement) -> dict[str, Any]:
    """Return a measurement as a JSON document.

    Sizes are in bytes, times in seconds, and a GB is 10^9 bytes.
    """
    paths = measurement.paths
    if paths is not None:
        by_path = {"direct": paths["zero_copy"] + paths["staged"], **{name: paths[name] for name in PATHS}}
    return {
        "tool": "ds_io",
        "version": __version__,
        **{name: value for name, value in vars(measurement).items() if name != "samples"},
        "seconds": measurement.seconds,
        "task_seconds": measurement.task_seconds,
        "gb_per_second": measurement.gb_per_second,
        "cpu_seconds_per_gb": measurement.cpu_seconds_per_gb,
        "request_latency": measurement.request_latency,
        "block_latency": measurement.block_latency,
        "bytes": None if paths is None else by_path,
        "loops": [_loop(sample) for sample in measurement.samples],
    }


def _loop(sample: Sample) -> dict[str, Any]:
    """Return one loop for JSON, without I/O block latencies: the document has the latencies of all loops together."""
    found = {**vars(sample), "task_seconds": sample.task_seconds, "gb_per_second": sample.gb_per_second}
    del found["block_latency"]
    return found
