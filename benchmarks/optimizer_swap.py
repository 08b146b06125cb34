"""Optimizers with their states on the drive: against the same in memory, the drive's own limits, and DeepSpeed's.

    python benchmarks/optimizer_swap.py --dir /mnt/nvme --json optimizer_swap.json --deepspeed-python ~/deepspeed/bin/python

Each contender has a process of its own and steps in its turn: a ratio is taken round by round, between neighbours in time.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness import drive, identity, small_tensors
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.comparison import Comparison, Comparisons, Counts, judge, measure_interleaved, over_limit, times_as_fast
from harness.documents import all_comparisons, document
from harness.figures import Verdict
from harness.optimizer_steps import STATE_BYTES, Library, Model, drive_limits, start_deepspeed, start_optimizer, stepper
from harness.tables import comparison_table, verdict_table
from harness.worker_process import WorkerProcess
from harness.workloads import ContenderFailed

from deepnvme.tools.tune.command_line import positive
from deepnvme.tools.tune.figures import Spread
from deepnvme.tools.tune.folder import check_memory

MIB = 1 << 20
RING = 3
BUFFERS, BUFFERS_IN_TURN = 16, 5
PARTS = ("identity", "limits", "plain", "deepspeed", "classes", "memory", "small")
ABSENT = "give --deepspeed-python"


@dataclass(frozen=True)
class Settings:
    """The model, and how much to measure."""

    directory: Path
    deepspeed_python: str | None
    rounds: int
    model: Model
    sub_group: int
    """Matrices, where DeepSpeed is compared with and memory is measured."""
    steps: int
    small_tensors: int
    only: tuple[str, ...]

    @property
    def sub_group_elements(self) -> int:
        return self.sub_group * self.model.width**2

    @property
    def ring_bytes(self) -> int:
        return RING * self.sub_group_elements * STATE_BYTES

    @property
    def buffer_bytes(self) -> int:
        """Of DeepSpeed's: each holds one tensor of a sub-group in float32."""
        return BUFFERS * self.sub_group_elements * 4


@dataclass
class Measurements(Comparisons):
    """Everything one run found out."""

    described: dict[str, Any] = field(default_factory=dict)


Starts = Mapping[str, Callable[[], WorkerProcess]]


def measure(settings: Settings, progress: Progress) -> Measurements:
    """Run everything in a directory of its own below ``settings.directory``, which is empty again afterwards."""
    # At most four optimizers at a time. Their files are two copies of the states, or one and gradients; their memory is less.
    check_memory(4 * 2 * settings.model.state_bytes, "give fewer --layers")
    drive.check(settings.directory, 4 * 2 * settings.model.state_bytes)
    measurements = Measurements()
    parts = {
        "identity": compare_bits,
        "limits": compare_with_limits,
        "plain": compare_without_masters,
        "deepspeed": compare_with_deepspeed,
        "classes": compare_classes,
        "memory": compare_memory,
        "small": compare_small_tensors,
    }
    for name in settings.only:
        with tempfile.TemporaryDirectory(prefix="optimizer_swap-", dir=settings.directory) as directory:
            parts[name](settings, Path(directory), measurements, progress)
    return measurements


def compare_bits(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """Whether offloaded optimizers train to the same bits as those in memory."""
    measurements.verdicts += identity.compare(directory, settings.steps, progress)


def compare_with_limits(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """With sub-groups as the optimizer makes them by default."""
    model = settings.model
    default = min(1 << 22, model.elements // 8)
    with contextlib.ExitStack() as stack:
        progress("starting optimizers")
        limits = stack.enter_context(drive_limits(directory / "limits", min(model.state_bytes, 1 << 30), settings.rounds))
        memory = stack.enter_context(start_optimizer(directory / "memory", model, 0))
        offloaded = stack.enter_context(start_optimizer(directory / "offloaded", model, default))
        half = stack.enter_context(start_optimizer(directory / "half", model, default, model.state_bytes // 2))
        # The drive's limits next to the step that is compared with them, whichever way round.
        contenders = {
            "in memory": stepper(memory, directory),
            "limits": limits,
            "offloaded": stepper(offloaded, directory),
            "offloaded, half in memory": stepper(half, directory),
        }
        comparison = measurements.comparisons["limits"] = measure_interleaved("limits", contenders, settings.rounds, progress)
    measurements.verdicts += [
        judge(
            comparison,
            f"step of {model.elements / 1e6:.0f} M parameters: time / that of the drive's limits, or in memory",
            ("offloaded", "limits", "in memory"),
            over_limit,
            "at most",
            1.15,
        ),
        judge(
            comparison,
            "the same, memory_budget of half the states: times as fast as with none",
            ("offloaded, half in memory", "offloaded"),
            times_as_fast,
            "at least",
            1.6,
        ),
    ]


def compare_without_masters(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """In float32 without masters, where a step has to copy the parameters before it changes them."""
    model = replace(settings.model, masters=False)
    with contextlib.ExitStack() as stack:
        progress("starting optimizers")
        limits = stack.enter_context(drive_limits(directory / "limits", min(model.state_bytes, 1 << 30), settings.rounds))
        memory = stack.enter_context(start_optimizer(directory / "memory", model, 0))
        offloaded = stack.enter_context(start_optimizer(directory / "offloaded", model, min(1 << 22, model.elements // 8)))
        contenders = {
            "in memory": stepper(memory, directory),
            "limits": limits,
            "offloaded": stepper(offloaded, directory),
        }
        comparison = measurements.comparisons["plain"] = measure_interleaved("plain", contenders, settings.rounds, progress)
    measurements.verdicts += [
        judge(
            comparison,
            f"step of {model.elements / 1e6:.0f} M float32 parameters, no masters: time / that of reading and writing the states"
            " once at the drive's limits, or in memory",
            ("offloaded", "limits", "in memory"),
            partial(over_limit, state_bytes=model.state_bytes),
            "at most",
            1.15,
        ),
        judge(
            comparison,
            "the same: bytes written for each parameter",
            ("offloaded", "in memory"),
            lambda offloaded, _: offloaded["bytes_written"] / model.elements,
            "at most",
            8.1,
        ),
    ]


def compare_with_deepspeed(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """With DeepSpeed's classes and its op."""
    model, sub_group = settings.model, settings.sub_group_elements
    as_much = max(0, settings.buffer_bytes - settings.ring_bytes)
    comparison: Comparison[str, Counts] = Comparison()
    if settings.deepspeed_python is not None:
        deepspeed = partial(start_deepspeed, settings.deepspeed_python)
        starts: Starts = {
            "ring": lambda: start_optimizer(directory / "ring", model, sub_group),
            "as much memory": lambda: start_optimizer(directory / "as_much", model, sub_group, as_much),
            "pipelined": lambda: deepspeed(directory / "pipelined", model, sub_group, BUFFERS, True),
            "in turn": lambda: deepspeed(directory / "in_turn", model, sub_group, BUFFERS_IN_TURN, False),
        }
        comparison = step_interleaved("deepspeed", starts, settings, directory, measurements, progress)
        measurements.comparisons["deepspeed"] = comparison
    rows: tuple[tuple[str, tuple[str, str], float], ...] = (
        (f"memory of the ring / DeepSpeed's, pipelined, {BUFFERS} buffers", ("ring", "pipelined"), 1.4),
        (f"memory of the ring / DeepSpeed's, not pipelined, {BUFFERS_IN_TURN} buffers", ("ring", "in turn"), 1.8),
        (f"memory of {BUFFERS} buffers / DeepSpeed's, pipelined", ("as much memory", "pipelined"), 3),
    )
    for what, pair, bound in rows:
        verdict = judge(comparison, f"step, times as fast: {what}", pair, times_as_fast, "at least", bound, ABSENT)
        measurements.verdicts.append(verdict)


def compare_classes(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """DeepSpeed's stage 3 with our swappers and with its own, on our op."""
    libraries: tuple[Library, ...] = ("deepnvme", "deepspeed")
    for way, buffers, pipelined in (("pipelined", BUFFERS, True), ("not pipelined", BUFFERS_IN_TURN, False)):
        comparison: Comparison[str, Counts] = Comparison()
        if settings.deepspeed_python is not None:
            start = partial(start_deepspeed, settings.deepspeed_python, op="deepnvme", model=settings.model)
            starts: Starts = {
                f"{library}'s classes, {way}": partial(
                    start,
                    directory / f"{library}, {way}",
                    sub_group=settings.sub_group_elements,
                    buffers=buffers,
                    pipelined=pipelined,
                    classes=library,
                )
                for library in libraries
            }
            comparison = step_interleaved(f"classes, {way}", starts, settings, directory, measurements, progress)
            measurements.comparisons[f"classes, {way}"] = comparison
        pair = (f"deepnvme's classes, {way}", f"deepspeed's classes, {way}")
        what = f"in DeepSpeed's stage 3, our op, {way}, {buffers} buffers: our classes / DeepSpeed's"
        measurements.verdicts += [
            judge(comparison, f"{what}, times as fast", pair, times_as_fast, "at least", 1.5, ABSENT),
            judge(comparison, f"{what}, losses that differ", pair, losses_that_differ, "at most", 0, ABSENT, summed=True),
        ]


def step_interleaved(
    title: str, starts: Starts, settings: Settings, directory: Path, measurements: Measurements, progress: Progress
) -> Comparison[str, Counts]:
    """Optimizers each in a process. One that cannot start takes no part."""
    contenders, absent = {}, {}
    with contextlib.ExitStack() as stack:
        progress("starting optimizers (DeepSpeed compiles its ops on first use: minutes)")
        for name, start in starts.items():
            try:
                process = stack.enter_context(start())
            except ContenderFailed as error:
                absent[name] = str(error)
                continue
            measurements.described[name] = process.described
            contenders[name] = stepper(process, directory)
        comparison = measure_interleaved(title, contenders, settings.rounds, progress)
    comparison.absent |= absent
    return comparison


def losses_that_differ(ours: Counts, theirs: Counts) -> float:
    """A figure for verdicts: 1 if the losses differ, else 0."""
    return float(ours["loss"] != theirs["loss"])


def compare_memory(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """Peak memory beyond parameters and gradients, in fresh processes."""
    for name, budget in (("no memory_budget", 0), ("memory_budget of half the states", settings.model.state_bytes // 2)):
        progress(f"peak memory, {name}")
        allowed = budget + settings.ring_bytes + 64 * MIB
        what = f"peak memory beyond parameters and gradients, {name}"
        with start_optimizer(directory / str(budget), settings.model, settings.sub_group_elements, budget, peak=True) as process:
            growth = process.call("peak", steps=4)["growth"]
        note = "" if growth is not None else "the kernel does not let peak memory be reset (/proc/self/clear_refs)"
        figure = None if growth is None else Spread.of([growth / MIB])
        measurements.verdicts.append(Verdict(what, figure, "at most", round(allowed / MIB, 1), "MiB", note))


def compare_small_tensors(settings: Settings, directory: Path, measurements: Measurements, progress: Progress) -> None:
    """Many small tensors in a store, against few large ones."""
    verdicts, comparison = small_tensors.measure(directory, settings.small_tensors, settings.rounds, progress)
    measurements.comparisons["small"] = comparison
    measurements.verdicts += verdicts


# -- the command line --------------------------------------------------------------------------------------------------


def as_json(settings: Settings, measurements: Measurements, started: str) -> dict[str, Any]:
    figures = {"contenders": measurements.described, "comparisons": all_comparisons(measurements.comparisons)}
    return document("optimizer_swap", started, settings, measurements.verdicts, **figures)


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = Parser(__doc__)
    parser.add_deepspeed_python()
    parser.add_argument("--only", choices=PARTS, action="append", help="a part of it; can be given more than once")
    parser.add_argument("--rounds", type=positive, help="steps of each contender (default: 15)")
    parser.add_argument("--width", type=positive, help="of the model's square matrices (default: 2048)")
    parser.add_argument("--layers", type=positive, help="how many matrices (default: 32, with 134 M parameters)")
    parser.add_argument(
        "--sub-group", type=positive, metavar="N", help="matrices in a sub-group of ours and of DeepSpeed's (default: 4)"
    )
    parser.add_argument("--quick", action="store_true", help="a trial of the benchmark itself: tiny")
    given = parser.parse(arguments)
    settings = Settings(
        directory=given.dir,
        deepspeed_python=given.deepspeed_python,
        rounds=given.rounds or (2 if given.quick else 15),
        model=Model(given.width or (512 if given.quick else 2048), given.layers or (8 if given.quick else 32)),
        sub_group=given.sub_group or (1 if given.quick else 4),
        steps=5 if given.quick else 50,
        small_tensors=200 if given.quick else 10000,
        only=tuple(given.only or PARTS),
    )
    if settings.model.layers < 2 * settings.sub_group:
        parser.error(f"--sub-group: {settings.sub_group} of {settings.model.layers} matrices leave nothing to alternate with")
    return settings, given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, json_path = parse_arguments(arguments)
    with measuring("optimizer_swap") as started:
        measurements = measure(settings, print_step)
    for title, comparison in measurements.comparisons.items():
        print(comparison_table(title, comparison))
    print(verdict_table(measurements.verdicts))
    write_json(json_path, as_json(settings, measurements, started))
    return 1 if any(comparison.absent for comparison in measurements.comparisons.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
