"""The engine's own ceiling: what it would do for drives that this machine does not have.

    python benchmarks/engine_ceiling.py --plot ceiling.png --json ceiling.json

- completing: blocks per second with a backend that completes at once and moves nothing;
- drives: one to eight simulated drives, blocks of 4 KiB to 4 MiB, on one core and more. The engine's share of what the drives can
  do, and of what the same cores do with these drives without it;
- neighbours: what seven drives lose beside an eighth that is slow, fails or hangs.

docs/benchmarks.md explains the figures.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness import completing, simulation, simulation_plot
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.documents import document
from harness.figures import Verdict
from harness.tables import verdict_table

from deepnvme.tools.tune.command_line import positive
from tests.native import EngineTestingBuilder

PARTS = ("completing", "drives", "neighbours")


@dataclass(frozen=True)
class Settings:
    """What to measure, and how often."""

    directory: Path
    only: tuple[str, ...]
    cores: tuple[int, ...]
    rounds: int
    coalesced: int
    quick: bool


@dataclass
class Measurements:
    """Everything one run found out. What was not asked for is None."""

    figures: list[completing.Figure] | None = None
    points: list[simulation.Point] | None = None
    neighbours: simulation.Neighbours | None = None

    def verdicts(self) -> list[Verdict]:
        found = completing.verdicts(self.figures) if self.figures else []
        if self.points:
            found.append(simulation.point_verdict(self.points))
        if self.neighbours:
            found += simulation.neighbour_verdicts(self.neighbours)
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "completing": completing.as_json(self.figures) if self.figures else None,
            "drives": simulation.points_as_json(self.points) if self.points else None,
            "neighbours": vars(self.neighbours) if self.neighbours else None,
        }


def measure(settings: Settings, progress: Progress) -> Measurements:
    """Run what was asked for in a directory of its own below ``settings.directory``, which is empty again afterwards."""
    progress("compiling the engine with simulated drives (on first use)")
    op = EngineTestingBuilder().load()
    scale = simulation.Scale.of(settings.rounds, settings.coalesced, settings.quick)
    measurements = Measurements()
    with tempfile.TemporaryDirectory(prefix="engine_ceiling-", dir=settings.directory) as name:
        directory = Path(name)
        if "completing" in settings.only:
            measurements.figures = completing.measure(op, directory, settings.rounds, settings.quick, progress)
        if "drives" in settings.only:
            measurements.points = simulation.measure_points(op, directory, settings.cores, scale, progress)
        if "neighbours" in settings.only:
            measurements.neighbours = simulation.measure_neighbours(op, directory, scale, progress)
    return measurements


def numbers_of_cores(text: str) -> tuple[int, ...]:
    """Parse the option --cores."""
    available = len(os.sched_getaffinity(0))
    numbers = tuple(positive(part) for part in text.split(","))
    if max(numbers) > available:
        raise argparse.ArgumentTypeError(f"this process may use {available} cores, got {text!r}")
    return numbers


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path | None, Path | None]:
    parser = Parser(__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part of it; can be given more than once")
    parser.add_argument("--rounds", type=positive, help="measurements of each case (default: 5)")
    parser.add_argument("--cores", type=numbers_of_cores, help="numbers of cores for the drives, such as 1,2 (default: 1 and 2)")
    parser.add_argument(
        "--coalesce", type=positive, default=1, help="completions that wake a worker of a simulated drive (default: 1)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the shares of the drives there; needs matplotlib")
    parser.add_argument("--quick", action="store_true", help="a trial of the benchmark itself")
    given = parser.parse(arguments)
    if given.plot and not given.plot.resolve().parent.is_dir():
        parser.error(f"--plot: '{given.plot.parent}' is not a directory")
    if given.plot and given.only and "drives" not in given.only:
        parser.error("--plot draws the drives, which --only leaves out")
    if given.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib")
    settings = Settings(
        directory=given.dir,
        only=tuple(given.only or PARTS),
        cores=given.cores or tuple(number for number in (1, 2) if number <= len(os.sched_getaffinity(0))),
        rounds=given.rounds or (1 if given.quick else 5),
        coalesced=given.coalesce,
        quick=given.quick,
    )
    return settings, given.plot, given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, plot_path, json_path = parse_arguments(arguments)
    with measuring("engine_ceiling") as started:
        measurements = measure(settings, print_step)

    if measurements.figures:
        print(completing.figure_table(measurements.figures))
    if measurements.points:
        print(simulation.point_table(measurements.points))
    verdicts = measurements.verdicts()
    print(verdict_table(verdicts))
    if plot_path and measurements.points:
        simulation_plot.draw(measurements.points, plot_path)
    write_json(json_path, document("engine_ceiling", started, settings, verdicts, **measurements.as_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
