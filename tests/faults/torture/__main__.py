"""All parts, or those named, for some hours or a number of tries; then a table of tries and failures.

``python -m tests.faults.torture --hours 1 --seed 7 --dir /mnt/nvme`` or ``--part kills --tries 100``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .running import FAILURES, Outcome, all_parts, run_part


def table(outcomes: list[Outcome]) -> str:
    """A line for each part."""
    columns = ("tries", *FAILURES, "seconds")
    width = max(len(outcome.part) for outcome in outcomes)
    lines = [f"{'part':{width}} " + " ".join(f"{column:>8}" for column in columns)]
    for outcome in outcomes:
        figures = [outcome.tries, *(outcome.failures[kind] for kind in FAILURES), round(outcome.seconds)]
        what = f"skipped: {outcome.skipped}" if outcome.skipped else " ".join(f"{figure:8}" for figure in figures)
        lines.append(f"{outcome.part:{width}} {what}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", help=f"only this one, of {', '.join(all_parts())}; may be given several times")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers: the same tries again (default: %(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--hours", type=float, help="for all parts together (default: 1)")
    length.add_argument("--tries", type=int, help="of each part")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parts at a time (default: %(default)s)")
    parser.add_argument("--dir", type=Path, default=Path("."), help="a directory on a drive (default: the current one)")
    arguments = parser.parse_args()
    names = arguments.part or all_parts()
    jobs = min(arguments.jobs, len(names))
    hours = 1.0 if arguments.hours is None and arguments.tries is None else arguments.hours
    seconds = None if hours is None else hours * 3600 * jobs / len(names)

    def run(name: str) -> Outcome:
        with tempfile.TemporaryDirectory(prefix=".deepnvme-torture-", dir=arguments.dir, ignore_cleanup_errors=True) as own:
            outcome = run_part(name, Path(own), arguments.seed, arguments.tries, seconds)
        print("\n".join([table([outcome]), *outcome.reports]), flush=True)
        return outcome

    with ThreadPoolExecutor(jobs) as threads:
        outcomes = list(threads.map(run, names))
    print("\n" + table(outcomes))
    return int(any(outcome.failures for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
