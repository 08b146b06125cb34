"""ds_nvme_tune: finds the best settings for a drive. The options are DeepSpeed's (nvme/perf_run_sweep.py), with a few more."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepnvme.drives.aio_config import AioConfig
from deepnvme.drives.mounts import Drive, drive_of
from deepnvme.drives.profiles import profile_path, store_profile
from deepnvme.telemetry.descriptions import printable, size_for_people
from deepnvme.tools.report import emit
from deepnvme.version import __version__

from .command_line import (
    GIB,
    Parser,
    add_json_option,
    directory,
    one_line_errors,
    output_file,
    positive,
    show_result,
    size,
    size_text,
    write_out,
)  # fmt: skip
from .job import Operation
from .rendering import tuning_page, tuning_text
from .results import Result, Tuning
from .settings import read_sweep
from .tuner import WRITES, Order, tune

_PROGRAM = "ds_nvme_tune"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``ds_nvme_tune`` command: find the best settings, and print or write the results.

    At the end it stores drive profiles if asked to.

    Exits with status 2 if the arguments are wrong, 1 if tuning fails or, after printing the results, a file cannot be written,
    and 130 if it was interrupted.

    Args:
        arguments: Command line without the program's name; None for ``sys.argv[1:]``.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if not (options.read or options.write):
        parser.error("--no_read and --no_write leave nothing to measure")
    if options.gds and not options.gpu:
        parser.error("--gds moves GPU memory: give --gpu, too")
    if options.gds and options.save_profile:
        parser.error("--save_profile stores settings of the engine, but --gds measures another op: give one of them")
    if options.output == "-":
        parser.error("--output: must be a file, got '-'")
    if options.log_dir is not None and options.log_dir.exists() and not options.log_dir.is_dir():
        parser.error(f"--log_dir: '{options.log_dir}' is not a directory")
    with one_line_errors(_PROGRAM):
        order = _order(options)
        _say(_writes_announced(order))
        if options.json != "-":
            emit(f"Running DeepNVMe performance tuning on {[str(folder) for folder in order.folders]}")
        tuning = tune(order, _print_step)
        # Printed before files are written, because that may fail.
        show_result(tuning_text(tuning, options.verbose), as_document(tuning), options.json)
        if options.log_dir is not None:
            write_logs(tuning, options.log_dir)
        if options.output is not None:
            write_out(tuning_page(tuning), options.output)
        if not options.gds:
            _save_profiles(tuning, options.save_profile)


def _parser() -> Parser:
    """Return the argument parser. Options that set a field of Order have the field's name."""
    written = f"It writes to the drive: at most {size_text(WRITES)} for each search (--max-writes)."
    parser = Parser(_PROGRAM, f"Find the best settings for a drive, in less than a minute for one folder. {written}")
    add = parser.add_argument
    add("--nvme_dir", type=directory, nargs="+", required=True, metavar="DIR", help="directories to measure, alone and together")
    add("--sweep_config", type=Path, metavar="FILE", help="settings to choose from, as JSON (default: the usual ones)")
    add("--no_read", dest="read", action="store_false", help="writes only")
    add("--no_write", dest="write", action="store_false", help="reads only")
    size_help = "of the file in each folder; no transfer is larger (default: 400M)"
    add("--io_size", type=size, default=400 << 20, metavar="BYTES", help=size_help)
    add("--gpu", action="store_true", help="tensors in GPU memory, by way of a pinned buffer")
    add("--gds", action="store_true", help="with --gpu: GPUDirect Storage")
    add("--flush_page_cache", action="store_true", help="kept for DeepSpeed's scripts: what is cached is always dropped")
    add("--loops", type=positive, default=1, metavar="N", help="take N times as long, for less noise (default: 1)")
    add("--seconds", type=positive, default=50, help="of each search, approximately and at most (default: 50)")
    writes_help = "the most to write in all; with less, the answer is less sure (default: a file and 28G for each search)"
    add("--max-writes", "--max_writes", type=size, metavar="SIZE", help=writes_help)
    add("--log_dir", type=directory, metavar="DIR", help="write a log for each setting there, as DeepSpeed does")
    add("--output", type=output_file, metavar="FILE", help="write a report with pictures there (HTML)")
    use = "let deepnvme use the best settings for files on the drive from now on"
    add("--save_profile", action="store_true", help=use)
    add_json_option(parser)
    add("--verbose", action="store_true", help="list the settings that were eliminated, too")
    return parser


def _order(options: argparse.Namespace) -> Order:
    """Return the tuning order that the options describe."""
    settings = tuple(read_sweep(options.sweep_config, options.gds)) if options.sweep_config is not None else None
    given = {name: getattr(options, name) for name in ("io_size", "read", "write", "gpu", "gds", "max_writes")}
    folders = tuple(dict.fromkeys(options.nvme_dir))
    return Order(folders=folders, settings=settings, seconds=options.seconds * options.loops, **given)


def _writes_announced(order: Order) -> str:
    """Return the line that announces, before tuning, how much is written and where."""
    where = " and ".join(str(folder) for folder in order.folders)
    amount = size_for_people(order.write_limit)
    if not order.write:
        return f"writes {amount} to {where}, to be read"
    return f"writes up to {amount} to {where}: --max-writes SIZE allows less, --no_write measures only reads"


def _say(line: str) -> None:
    """Print a line to stderr that begins with the program's name."""
    print(f"{_PROGRAM}: {printable(line)}", file=sys.stderr)


def _print_step(share: float, step: str) -> None:
    """Print a step to stderr when it begins."""
    # In one piece: an interrupt between text and line feed would put its own message on this line.
    print(f"  {100 * share:3.0f} % {printable(step)}\n", end="", file=sys.stderr, flush=True)


def as_document(tuning: Tuning) -> dict[str, Any]:
    """Return the results of a run as a JSON document. Sizes are in bytes, times in seconds, and a GB is 10^9 bytes.

    "aio" is the block for a DeepSpeed configuration.
    """

    def flat(result: Result) -> dict[str, Any]:
        """Return a result as one flat dict: its own fields, and the fields of its setting."""
        own = {name: value for name, value in vars(result).items() if name != "setting"}
        return {**result.setting.model_dump(), **own, "in_flight_bytes": result.setting.in_flight_bytes}

    searches = [{**vars(each), "best": flat(each.best), "results": list(map(flat, each.results))} for each in tuning.searches]
    block = tuning.chosen.best.setting.to_deepspeed()
    return {"tool": _PROGRAM, "version": __version__, **block, **vars(tuning), "searches": searches}


# Drive profiles.


def _save_profiles(tuning: Tuning, save: bool) -> None:
    """Store the drive profiles and print which settings are used from now on; without ``save``, print how to store them.

    Raises:
        RuntimeError: If a profile cannot be stored. The error names the file.
    """
    found, skipped = profiles_from(tuning)
    mounts = " and ".join(drive.mount.point for drive, _ in found if drive.mount)
    if not save:
        if found:
            _say(f"note: with --save_profile, deepnvme would use the best settings for files on {mounts} from then on")
        return
    for reason in skipped:
        _say(f"note: {reason}")
    for drive, settings in found:
        try:
            path = store_profile(drive, settings)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(f"the drive profile cannot be stored: {error}") from error
        where = f"files on {drive.mount.point}" if drive.mount else ""
        _say(f"stored in '{path}': from now on, deepnvme uses these settings for {where}: {settings}")


def profiles_from(tuning: Tuning) -> tuple[list[tuple[Drive, AioConfig]], list[str]]:
    """Return the tuned folders' drives with their settings, and a one-line reason for each folder without.

    Each drive has the best settings of a folder measured alone. If several folders are on one drive, the first folder's settings
    are used.

    Args:
        tuning: The results. Not from GPUDirect Storage, whose settings belong to another op.

    Raises:
        OSError: If a folder cannot be reached any more.
    """
    found: dict[Path, tuple[Drive, AioConfig]] = {}
    skipped = []
    for search in tuning.searches:
        if len(search.folders) > 1:
            continue
        drive = drive_of(Path(search.folders[0].path))
        try:
            if drive.kind == "memory":
                raise ValueError("its files are in memory, not on a drive")
            found.setdefault(profile_path(drive), (drive, search.best.setting))
        except ValueError as error:
            skipped.append(f"no drive profile for '{search.folders[0].path}': {error}")
    return list(found.values()), skipped


# Logs like those of DeepSpeed's sweep. Compatible with DeepSpeed 0.19: ``nvme/perf_run_sweep.py`` (file names),
# ``nvme/parse_nvme_stats.py`` (lines that are parsed).


def write_logs(tuning: Tuning, directory: Path) -> None:
    """Write logs in the format of DeepSpeed's sweep: one for each setting and direction of the recommended search.

    DeepSpeed's file names do not contain the backend: of several settings with one name, the fastest is written. Scripts that
    read the logs choose the highest rate. The rate of an eliminated setting comes from few short transfers, so it is capped at
    the rate of the recommended setting.

    Args:
        tuning: The results.
        directory: Directory for the logs, created if missing.

    Raises:
        OSError: If a file cannot be written.
    """
    search = tuning.chosen
    for operation, best in search.best.measured.items():
        logs: dict[str, float] = {}
        for result in search.results:
            highest = math.inf if result in search.finalists else best.gb_per_second
            name = _log_name(operation, len(search.folders), result)
            logs[name] = max(logs.get(name, 0.0), min(result.measured[operation].gb_per_second, highest))
        folder = directory / f"_aio_bench_{operation}_logs"
        folder.mkdir(parents=True, exist_ok=True)
        for name, rate in logs.items():
            what, seconds, speed = operation.capitalize(), tuning.io_size / (rate * 1e9), rate * 1e9 / GIB
            lines = [f"{who} {what} Latency = {seconds} sec\n{who} {what} Speed = {speed} GB/sec\n" for who in ("Task", "E2E")]
            (folder / name).write_text("".join(lines))


def _log_name(operation: Operation, folders: int, result: Result) -> str:
    """Return DeepSpeed's file name for the log of a setting."""
    setting = result.setting
    submission = "single" if setting.single_submit else "block"
    order = "overlap" if setting.overlap_events else "sequential"
    # DeepSpeed's parser knows only K and M.
    block_size = f"{setting.block_size >> 20}M" if setting.block_size % GIB == 0 else size_text(setting.block_size)
    size = f"d{setting.queue_depth}_bs{block_size}_p{setting.intra_op_parallelism}"
    return f"{operation}_{submission}_{order}_ftd{folders}_{size}.txt"
