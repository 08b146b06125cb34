"""Runs the searches of ds_nvme_tune: for each folder alone, and for all folders together."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepnvme.config import AioConfig
from deepnvme.drives import MEMORY_FILESYSTEMS
from deepnvme.tune.measure.folder import FolderFacts, check_memory, check_space, folder_facts
from deepnvme.tune.measure.job import OPERATIONS, Operation
from deepnvme.tune.search.trial_bench import Shares, TrialBench

from .results import Figures, Result, Search, Striping, Tuning
from .space import default_space
from .successive_halving import Candidate, Outcome, SearchProgress, cpu_seconds_per_gb, partial_progress, search

_STRIPING_PASSES = 5


@dataclass(frozen=True)
class Order:
    """What :func:`tune` is to measure, and for how long."""

    folders: tuple[Path, ...]
    """The folders, on one or several drives."""
    io_size: int
    """Bytes of the file in each folder; no transfer is larger."""
    read: bool = True
    """Whether to measure reads."""
    write: bool = True
    """Whether to measure writes."""
    settings: tuple[AioConfig, ...] | None = None
    """The settings to choose from; None for the usual ones."""
    gpu: bool = False
    """Whether tensors are in GPU memory; they go through a pinned buffer, unless ``gds``."""
    gds: bool = False
    """Whether GPU tensors are moved by GPUDirect Storage."""
    seconds: float = 50.0
    """Approximate duration of each search."""

    @property
    def operations(self) -> list[Operation]:
        """The directions to measure, reads before writes."""
        return [operation for operation in OPERATIONS if (self.read if operation == "read" else self.write)]


def tune(order: Order, progress: SearchProgress = lambda share, step: None) -> Tuning:
    """Find the best settings for folders. Blocks, for about ``order.seconds`` for each search.

    There is one search for each folder and, if there are several, one for all together. An interrupt (KeyboardInterrupt) ends the
    run with the results so far; if there are none, it is raised. No file is left behind.

    Args:
        order: What to measure.
        progress: Called with the share that is done and a description of the current step.

    Raises:
        Unsuitable: Before anything is transferred, if the order cannot be carried out on this machine.
        OSError: If a transfer fails.
    """
    facts = [folder_facts(folder) for folder in order.folders]
    check_space((folder, order.io_size) for folder in order.folders)
    tensors = 0 if order.gds else order.io_size * len(order.folders)
    check_memory(tensors + order.io_size * sum(each.filesystem in MEMORY_FILESYSTEMS for each in facts))
    progress(0.0, "starting (compiles on first use)")
    offered, backend = _offered(order)
    begin = time.monotonic()
    groups = _groups(len(facts))
    bench = TrialBench(order.folders, order.io_size, order.gpu, order.gds, functools.partial(progress, 0.0))
    refused: dict[str, str] = {}
    searches: list[Search] = []
    striping = None
    complete = False
    try:
        with bench:
            settings, refused = bench.usable(offered)
            for number, group in enumerate(groups):
                started = time.monotonic()
                measure = functools.partial(bench.move, _shares(group, searches))
                where = " + ".join(facts[index].path for index in group)
                part = partial_progress(progress, number, len(groups), f"{where}: ")
                outcome = search(settings, order.operations, measure, order.io_size, order.seconds, part)
                searches.append(_search(outcome, [facts[index] for index in group], backend, time.monotonic() - started))
                if not outcome.complete:
                    break
            if len(searches) == len(groups) > 1 and searches[-1].complete:
                striping = measure_striping(bench, order, searches, facts)
            complete = searches[-1].complete
    except KeyboardInterrupt:  # may also come while the bench removes its files, when all has been measured
        if not searches:
            raise
    return Tuning(
        io_size=order.io_size,
        seconds=time.monotonic() - begin,
        complete=complete,
        bytes_written=bench.bytes_written,
        searches=tuple(searches),
        striping=striping,
        refused=refused,
    )


def _offered(order: Order) -> tuple[Sequence[AioConfig], str]:
    """Return the settings to choose from, and the backend that "auto" selects."""
    from deepnvme.tune.measure import transfers  # here, because it takes seconds to import torch

    if order.gds:
        transfers.make_handle(AioConfig(use_gds=True))  # raises the reason if GPUDirect Storage does not work
        return order.settings or default_space(order.io_size, ["auto"], use_gds=True), "gds"
    working = [name for name, obstacle in transfers.op().backends().items() if obstacle is None]
    return order.settings or default_space(order.io_size, working), working[0]


def _groups(folders: int) -> list[tuple[int, ...]]:
    """Return the numbers of the folders of each search: each folder alone, then all together if there are several."""
    alone: list[tuple[int, ...]] = [(index,) for index in range(folders)]
    return alone if folders == 1 else [*alone, tuple(range(folders))]


def _shares(group: tuple[int, ...], searches: Sequence[Search]) -> Shares:
    """Return each folder's share of the bytes, relative to the one that gets most: in proportion to their speeds alone."""

    def rate(index: int, operation: Operation) -> float:
        figures = searches[index].best.figures(operation) if len(group) > 1 else None
        return figures.gb_per_second if figures is not None else 1.0

    def of(operation: Operation) -> dict[int, float]:
        rates = {index: rate(index, operation) for index in group}
        return {index: each / max(rates.values()) for index, each in rates.items()}

    return {"read": of("read"), "write": of("write")}


# Striping.


def measure_striping(bench: TrialBench, order: Order, searches: Sequence[Search], facts: Sequence[FolderFacts]) -> Striping:
    """Measure each folder with its own best setting, and all together with theirs. Blocks.

    They take turns, so that a drive that is slow for a while is slow in all measurements.

    Args:
        bench: Measures; open.
        order: What :func:`tune` was given.
        searches: The search of each folder, in their order, and last the one of all together.
        facts: The folders, in their order.

    Raises:
        OSError: If a transfer fails.
    """
    together = searches[-1]
    groups = _groups(len(facts))
    rates: dict[tuple[int, Operation], list[float]] = {}
    for _, (number, found), operation in itertools.product(range(_STRIPING_PASSES), enumerate(searches), order.operations):
        shares = _shares(groups[number], searches[:-1])
        observed = bench.move(shares, found.best.setting, operation, order.io_size)
        rates.setdefault((number, operation), []).append(observed.gb_per_second)

    def found_by(number: int) -> dict[Operation, float]:
        return {operation: statistics.median(rates[number, operation]) for operation in order.operations}

    devices = {each.device_number for each in facts}
    return Striping(
        alone=tuple((each.path, found_by(number)) for number, each in enumerate(facts)),
        together=found_by(len(facts)),
        shared_device=len(devices) < len(together.folders),
    )


# Results.


def _search(outcome: Outcome, facts: Sequence[FolderFacts], backend: str, seconds: float) -> Search:
    """Return a search's outcome as the result that is reported."""
    results = tuple(_result(candidate, outcome, backend) for candidate in outcome.ranked)
    best = results[outcome.ranked.index(outcome.best)]
    return Search(tuple(facts), best, outcome.reason, outcome.rounds, seconds, outcome.complete, results)


def _result(candidate: Candidate, outcome: Outcome, backend: str) -> Result:
    """Return the values of a candidate in the last round of which it has a complete pass."""
    last = candidate.last_round(outcome.rounds)

    def figures(operation: Operation) -> Figures | None:
        found = candidate.rounds[last].get(operation)
        if not found:
            return None
        # Rounds differ in the size of transfers and in the drive's speed at the time; the best setting took part in all of them.
        scale = _rate(outcome.best, outcome.rounds - 1, operation) / _rate(outcome.best, last, operation)
        return Figures(
            gb_per_second=_rate(candidate, last, operation) * scale,
            cpu_seconds_per_gb=cpu_seconds_per_gb(found),
            latency_p50=statistics.median(each.block_latency_p50 for each in found),
            latency_p99=statistics.median(each.block_latency_p99 for each in found),
        )

    name = candidate.setting.backend
    return Result(candidate.setting, backend if name == "auto" else name, figures("read"), figures("write"), last + 1)


def _rate(candidate: Candidate, number: int, operation: Operation) -> float:
    """Return the median rate of a candidate in a round, in 10^9 bytes per second."""
    return statistics.median(each.gb_per_second for each in candidate.rounds[number][operation])
