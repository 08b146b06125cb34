"""`make gpu-check`: both ops are built, tests/gpu run, gpu_io.py and gpu_models.py measured; one table of it all in the end.

The table alone goes to stdout; what the steps say goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness.tables import size_text, spread_text, table

from deepnvme.ops.op_builder import AsyncIOBuilder, GDSBuilder, OpBuilder
from deepnvme.tools.tune.command_line import size
from deepnvme.tools.tune.figures import Spread

REPOSITORY = Path(__file__).resolve().parent.parent
TESTS = REPOSITORY / "tests" / "gpu"
SECONDS = 400
"""No part of gpu_models.py begins later than this, so that all of it takes at most 8 minutes."""

Document = dict[str, Any]
"""What a benchmark writes."""


@dataclass(frozen=True)
class Row:
    """A line of the table. One that ``failed`` fails the check; a target that is missed does not."""

    what: str
    figure: str
    target: str = ""
    result: str = ""
    failed: bool = False

    def cells(self) -> list[str]:
        return [self.what, self.figure, self.target, self.result]


# -- the steps ---------------------------------------------------------------------------------------------------------


def build(builder: OpBuilder) -> Row:
    """Load an op, which compiles it, and say how long that took."""
    what, started = f"{builder.name} op", time.monotonic()
    try:
        builder.load()
    except (OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return Row(what, "-", "built", f"FAILED: {str(error).strip().splitlines()[0]}", failed=True)
    return Row(what, f"{time.monotonic() - started:.1f} s", "built", "met")


def run_tests(tests: Path, directory: Path) -> Row:
    """With their files in ``directory``."""
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as name:
        report = Path(name, "report.xml")
        command = [sys.executable, "-m", "pytest", str(tests), "--io-dir", str(directory), f"--junitxml={report}"]
        done = subprocess.run(command, cwd=REPOSITORY, stdout=sys.stderr)
        if not report.exists():
            return Row("tests/gpu", "-", "no failure", f"FAILED: pytest ended with {done.returncode}", failed=True)
        suites = ElementTree.parse(report).getroot().iter("testsuite")
        counts = [{key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")} for suite in suites]
    total = {key: sum(count[key] for count in counts) for key in ("tests", "failures", "errors", "skipped")}
    failed = total["failures"] + total["errors"]
    passed = total["tests"] - failed - total["skipped"]
    wrong = failed > 0 or passed == 0 or done.returncode != 0
    figure = f"{passed} passed, {failed} failed, {total['skipped']} skipped"
    return Row("tests/gpu", figure, "no failure", "FAILED" if wrong else "met", failed=wrong)


def run_benchmark(name: str, rows_of: Callable[[Document], Iterator[Row]], directory: Path, *options: str) -> list[Row]:
    """Run a benchmark in a process of its own, and turn what it has found, and its verdicts, into rows."""
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as reports:
        report = Path(reports, "report.json")
        program = str(REPOSITORY / "benchmarks" / name)
        command = [sys.executable, program, "--dir", str(directory), "--json", str(report), *options]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        if not report.exists():
            return [Row(name, "-", "", f"FAILED: it ended with {done.returncode}", failed=True)]
        found = json.loads(report.read_text())
        return [*rows_of(found), *verdicts_of(found)]


def transfers_of(document: Document) -> Iterator[Row]:
    """What gpu_io.py has found."""
    nbytes = size_text(document["settings"]["size"])
    for workload in document["workloads"]:
        for series in workload["series"]:
            what = f"{nbytes} {workload['name']}, GB/s: {series['contender']}, {series['memory']}"
            if series["failure"]:
                yield Row(what, "-", "", f"FAILED: {series['failure']}", failed=True)
            else:
                yield Row(what, spread_text(Spread(**series["gb_per_second"])))
    for name, seconds in document["first_request_seconds"].items():
        yield Row(f"first read after start-up, s: {name}", f"{seconds:.3f}")
    if document["gds"]:
        yield Row("bytes that gds moved directly", f"{document['gds']['bytes_gds']} of {document['gds']['bytes_direct']}")


def models_of(document: Document) -> Iterator[Row]:
    """What gpu_models.py has found. A contender that is not installed took no part; ours may not be absent."""
    yield Row("state of the checkpoints", f"{document['state_bytes'] / 1e9:.1f} GB")
    for title, lines in document["rows"].items():
        for contender, seconds, rate, cpu, peak, absent in lines:
            per = " a GB" if rate != "-" else ""
            figures = [f"{seconds} s", f"{rate} GB/s" * bool(per), f"{cpu} CPU s{per}", f"{peak} MiB" * (peak != "-")]
            failed = bool(absent) and contender == "deepnvme"
            figure = "-" if absent else ", ".join(filter(None, figures))
            yield Row(f"{title}: {contender}", figure, "", f"FAILED: {absent}" if failed else absent, failed)
    for note in document["notes"]:
        what, _, why = note.partition(": ")
        yield Row(what, "-", "", why)


def verdicts_of(document: Document) -> Iterator[Row]:
    for target in document["targets"]:
        bound = f"{target['sense']} {target['bound']:g}"
        if target["figure"] is None:
            yield Row(target["what"], "-", bound, f"not measured: {target['note']}")
        else:
            yield Row(target["what"], spread_text(Spread(**target["figure"])), bound, "met" if target["met"] else "MISSED")


# -- the command line --------------------------------------------------------------------------------------------------


def check(directory: Path, nbytes: int) -> list[Row]:
    """Every step, whatever became of the one before."""
    begun = time.monotonic()
    rows = [build(AsyncIOBuilder()), build(GDSBuilder()), run_tests(TESTS, directory)]
    rows += run_benchmark("gpu_io.py", transfers_of, directory, "--size", str(nbytes), "--rounds", "3")
    left = max(1, int(SECONDS - (time.monotonic() - begun)))
    return rows + run_benchmark("gpu_models.py", models_of, directory, "--seconds", str(left))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the drive (default: the current one)")
    parser.add_argument("--size", type=size, default=1 << 30, help="bytes of the benchmark's tensor (default: 1G)")
    given = parser.parse_args(arguments)
    if not given.dir.is_dir():
        parser.error(f"--dir: '{given.dir}' is not a directory")
    if not torch.cuda.is_available():
        print(f"gpu-check: needs a CUDA device, and PyTorch {torch.__version__} sees none", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        rows = check(given.dir.resolve(), given.size)
    except KeyboardInterrupt:
        print("gpu-check: interrupted", file=sys.stderr)
        return 130
    title = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, PyTorch {torch.__version__}"
    print(table(title, ["", "median (quartiles)", "target", ""], [row.cells() for row in rows], left=1))
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
