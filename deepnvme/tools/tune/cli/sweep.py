"""ds_nvme_tune: finds the best settings for a drive. The options are DeepSpeed's (nvme/perf_run_sweep.py), with a few more."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from deepnvme import profiles
from deepnvme.tools.report.ds_report import emit
from deepnvme.tools.tune.render import deepspeed_logs, html_report, profile_text, sweep_text
from deepnvme.tools.tune.search.found_profiles import FoundProfile, profiles_from
from deepnvme.tools.tune.search.results import Tuning
from deepnvme.tools.tune.search.space import read_sweep
from deepnvme.tools.tune.search.successive_halving import SearchProgress
from deepnvme.tools.tune.search.tuner import WRITES, Order, tune
from deepnvme.tools.tune.sizes import size_text

from .arguments import Parser, add_json_option, directory, output_directory, output_file, positive, size
from .console import ask, can_ask, one_line_errors, progress_shown, show_result, write_out

_PROGRAM = "ds_nvme_tune"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``ds_nvme_tune`` command, and print or write what it found.

    At the end it stores drive profiles, or asks on a terminal whether it should.

    Exits with status 2 if the arguments are wrong, 1 if tuning fails or, after printing the results, a file cannot be written,
    and 130 if it was interrupted, after printing the results so far.

    Args:
        arguments: Command line without the program's name; None for that of the process.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if not (options.read or options.write):
        parser.error("--no_read and --no_write leave nothing to measure")
    if options.gds and not options.gpu:
        parser.error("--gds moves GPU memory: give --gpu, too")
    if options.gds and options.save_profile:
        parser.error("--save_profile stores settings of the engine, but --gds measures another op: give one of them")
    with one_line_errors(parser.prog):
        if options.output is not None:
            html_report.require_matplotlib()
        if options.save_profile is not False:
            profiles.profiles_enabled()  # raises ValueError for an unknown value before anything is measured
        settings = tuple(read_sweep(options.sweep_config, options.gds)) if options.sweep_config is not None else None
        given = {name: getattr(options, name) for name in ("io_size", "read", "write", "gpu", "gds", "max_writes")}
        folders = tuple(dict.fromkeys(options.nvme_dir))
        order = Order(folders=folders, settings=settings, seconds=options.seconds * options.loops, **given)
        _say(_writes_announced(order))
        if options.json != "-":
            emit(f"Running DeepNVMe performance tuning on {[str(folder) for folder in order.folders]}")
        with progress_shown(_each_step_once(), with_bar=True) as progress:
            tuning = tune(order, progress)
        # Printed before files are written, because that may fail.
        show_result(sweep_text.render(tuning, verbose=options.verbose), sweep_text.as_document(tuning), options.json)
        if options.log_dir is not None:
            deepspeed_logs.write(tuning, options.log_dir)
        if options.output is not None:
            write_out(html_report.render_html(tuning), options.output)
        if not tuning.complete:
            unsaved = ", no drive profile is stored" if options.save_profile else ""
            _say(f"interrupted; what is above was measured before, its files are removed{unsaved}")
            sys.exit(130)
        if not options.gds and options.save_profile is not False:
            _save_or_offer_profiles(tuning, save=options.save_profile)


def _parser() -> Parser:
    """Return the parser. Some of its results have the names of the fields of Order that they become."""
    written = f"It writes to the drive: at most {size_text(WRITES)} for each search (--max-writes)."
    parser = Parser(_PROGRAM, f"Find the best settings for a drive, in less than a minute for one folder. {written}")
    add = parser.add_argument
    add("--nvme_dir", type=directory, nargs="+", required=True, metavar="DIR", help="directories to measure, alone and together")
    add("--sweep_config", type=Path, metavar="FILE", help="settings to choose from, as JSON (default: the usual ones)")
    add("--no_read", dest="read", action="store_false", help="writes only")
    add("--no_write", dest="write", action="store_false", help="reads only")
    size_help = "of the file in each folder; no transfer is larger; K, M, G count 1024 (default: 400M)"
    add("--io_size", type=size, default=400 << 20, metavar="BYTES", help=size_help)
    add("--gpu", action="store_true", help="tensors in GPU memory, by way of a pinned buffer")
    add("--gds", action="store_true", help="with --gpu: GPUDirect Storage")
    add("--flush_page_cache", action="store_true", help="kept for DeepSpeed's scripts: what is cached is always dropped")
    add("--loops", type=positive, default=1, metavar="N", help="take N times as long, for less noise (default: 1)")
    add("--seconds", type=positive, default=50, help="of each search, approximately and at most (default: 50)")
    writes_help = "the most to write in all; with less, the answer is less sure (default: a file and 28G for each search)"
    add("--max-writes", "--max_writes", type=size, metavar="SIZE", help=writes_help)
    add("--log_dir", type=output_directory, metavar="DIR", help="write a log for each setting there, as DeepSpeed does")
    add("--output", type=output_file, metavar="FILE", help="write a report with pictures there (HTML; needs the extra [plot])")
    profile = parser.add_mutually_exclusive_group().add_argument
    use = "let deepnvme use the best settings for files on the drive from now on, without asking"
    profile("--save_profile", action="store_true", default=None, help=use)
    profile("--no_save_profile", dest="save_profile", action="store_false", help="do not store a profile, and do not ask")
    add_json_option(parser, "write all as JSON: to FILE, or instead of the text to stdout")
    add("--verbose", action="store_true", help="list the settings that were eliminated, too")
    return parser


def _writes_announced(order: Order) -> str:
    """Return what is said before anything is written."""
    where = " and ".join(str(folder) for folder in order.folders)
    amount = f"{order.write_limit / 1e9:.3g} GB"
    if not order.write:
        return f"writes {amount} to {where}, to be read"
    return f"writes up to {amount} to {where}: --max-writes SIZE allows less, --no_write measures only reads"


def _save_or_offer_profiles(tuning: Tuning, save: bool | None) -> None:
    """Store the profiles of the drives, if that is wanted, and say so.

    Args:
        tuning: Complete results.
        save: Whether to store them; None to ask, or where nobody can be asked to say how.

    Raises:
        RuntimeError: If a profile cannot be stored; names the file.
    """
    found = profiles_from(tuning, datetime.now().astimezone())
    if save is None and found.profiles:
        if not can_ask():
            _say(f"note: {profile_text.save_hint(found.profiles)}")
            return
        save = ask(profile_text.save_question(found.profiles))
    if not save:
        return
    for reason in found.skipped:
        _say(f"note: {reason}")
    for each in found.profiles:
        _say(_save_profile(each))


def _save_profile(found: FoundProfile) -> str:
    """Store a profile, and return what that means. Raises RuntimeError if it cannot be stored."""
    try:
        path = found.profile.save()
    except (OSError, RuntimeError) as error:
        raise RuntimeError(f"the drive profile cannot be stored: {error}") from error
    return profile_text.saved_message(found.profile, path, used=profiles.profiles_enabled())


def _say(line: str) -> None:
    """Print a line to stderr, with the program's name before it."""
    print(f"{_PROGRAM}: {line}", file=sys.stderr)


def _each_step_once() -> SearchProgress:
    """Return a function that prints each new step to stderr."""
    printed: set[str] = set()

    def show(share: float, step: str) -> None:
        if step not in printed:
            print(f"  {100 * share:3.0f} % {step}", file=sys.stderr, flush=True)
            printed.add(step)

    return show
