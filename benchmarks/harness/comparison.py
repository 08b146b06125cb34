"""Contenders that do one thing in turns, A B C, C B A, A B C: neighbours in time meet the same drive and the same machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from deepnvme.tools.tune.figures import Spread
from harness.command_line import Progress
from harness.figures import Verdict
from harness.workloads import ContenderFailed

Who = TypeVar("Who")
Taken = TypeVar("Taken")
Counts = dict[str, Any]
"""What one turn took: ``seconds``, and whatever else its contender counts."""


@dataclass
class Comparison(Generic[Who, Taken]):
    """Samples of contenders measured in turns, round by round; of those who took no part or fell out, why in ``absent``."""

    samples: dict[Who, list[Taken]] = field(default_factory=dict)
    absent: dict[Who, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"samples": self.samples, "absent": self.absent}


@dataclass
class Comparisons:
    """What the comparisons of one run of a benchmark found out."""

    verdicts: list[Verdict] = field(default_factory=list)
    comparisons: dict[str, Comparison[str, Counts]] = field(default_factory=dict)
    """By name."""


def measure_interleaved(
    title: str, contenders: Mapping[Who, Callable[[], Taken]], rounds: int, progress: Progress
) -> Comparison[Who, Taken]:
    """Have each do its thing ``rounds`` times. One that raises ContenderFailed is left out from there on."""
    comparison: Comparison[Who, Taken] = Comparison({who: [] for who in contenders})
    order = list(contenders)
    for number in range(rounds):
        progress(f"{title}: round {number + 1} of {rounds}")
        # Back and forth, so that nobody always follows the same predecessor and a steady drift cancels.
        for who in order if number % 2 == 0 else reversed(order):
            if who in comparison.absent:
                continue
            try:
                comparison.samples[who].append(contenders[who]())
            except ContenderFailed as error:
                comparison.absent[who] = str(error)
    return comparison


def judge(
    comparison: Comparison[str, Taken],
    what: str,
    who: tuple[str, ...],
    figure: Callable[..., float],
    sense: Literal["at least", "at most"],
    bound: float,
    absence: str = "took no part",
    summed: bool = False,
) -> Verdict:
    """``figure`` of the samples of ``who``, round by round, or the sum over all rounds: of what must never happen, since a median
    forgives it half of the time. Where one of them is missing the verdict says why; it is for
    ``absence`` if no turn was ever to be taken."""
    for name in who:
        if name in comparison.absent or not comparison.samples.get(name):
            return Verdict(what, None, sense, bound, note=f"{name}: {comparison.absent.get(name, absence)}")
    figures = [figure(*samples) for samples in zip(*(comparison.samples[name] for name in who), strict=True)]
    return Verdict(what, Spread.of([sum(figures)] if summed else figures), sense, bound)


def over_limit(offloaded: Counts, limits: Counts, in_memory: Counts, state_bytes: int | None = None) -> float:
    """Time over what it cannot undercut: the transfers at the speed of the drive, or the step in memory.

    ``state_bytes``: at most so many are to be written; what is written beyond that is no excuse. None: all that is written.
    """
    written = offloaded["bytes_written"] if state_bytes is None else min(offloaded["bytes_written"], state_bytes)
    drives = offloaded["bytes_read"] / limits["read"] + written / limits["write"]
    ratio: float = offloaded["seconds"] / max(drives, in_memory["seconds"])
    return ratio


def times_as_fast(ours: Counts, theirs: Counts) -> float:
    """A figure for verdicts: how many times as fast ours is."""
    seconds: float = theirs["seconds"] / ours["seconds"]
    return seconds
