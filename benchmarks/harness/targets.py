"""Bounds on what one contender does in terms of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deepnvme.tools.tune.figures import Spread
from harness.figures import Verdict
from harness.interleave import Result, Series
from harness.workloads import Sample


@dataclass(frozen=True)
class Target:
    """A bound on ours / theirs, each a (contender, memory). A rate must reach it, CPU time per GB must not exceed it.

    Theirs with the memory "best": that series of the contender which has the highest median rate.
    """

    what: str
    workload: str
    ours: tuple[str, str]
    theirs: tuple[str, str]
    quantity: Literal["rate", "cpu"]
    bound: float


def judge(target: Target, results: Sequence[Result]) -> Verdict:
    """The ratio round by round. What took no part is no verdict, and the note says why."""
    result = next(result for result in results if result.workload.name == target.workload)
    sense: Literal["at least", "at most"] = "at least" if target.quantity == "rate" else "at most"
    pair: list[Series] = []
    for name, memory in (target.ours, target.theirs):
        series = best_of(result, name) if memory == "best" else result.find(name, memory)
        if series is None or series.failure:
            reason = series.failure if series else f"{name}, {memory}, took no part"
            return Verdict(target.what, None, sense, target.bound, note=reason)
        pair.append(series)
    ratios = [_ratio(target.quantity, ours, theirs) for ours, theirs in zip(pair[0].samples, pair[1].samples, strict=True)]
    return Verdict(target.what, Spread.of(ratios), sense, target.bound)


def best_of(result: Result, name: str) -> Series | None:
    """The fastest of a contender's series; one that failed only if all have."""
    return max(
        (series for series in result.series if series.name == name),
        key=lambda series: 0.0 if series.failure else Spread.of([sample.gb_per_second for sample in series.samples]).median,
        default=None,
    )


def _ratio(quantity: Literal["rate", "cpu"], ours: Sample, theirs: Sample) -> float:
    """Ours over theirs, of the rates or the CPU times per GB."""
    if quantity == "rate":
        return ours.gb_per_second / theirs.gb_per_second
    # The tiny transfers of a trial run may take less time than the kernel charges.
    return ours.cpu_seconds_per_gb / max(theirs.cpu_seconds_per_gb, 1e-6)
