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
from deepnvme.tools.tune.measure.folder import FolderFacts, check_memory, check_space, folder_facts
from deepnvme.tools.tune.measure.job import OPERATIONS, Operation
from deepnvme.tools.tune.measure.unsuitable import Unsuitable
from deepnvme.tools.tune.search.trial_bench import Shares, TrialBench
from deepnvme.tools.tune.sizes import check_number

from .plan import least_written
from .results import Figures, Reference, Result, RoundFacts, Search, Striping, Tuning
from .round_data import cpu_seconds_per_gb
from .space import default_space
from .successive_halving import Outcome, SearchProgress, partial_progress, search

WRITES = 28 << 30
"""Bytes that a search writes at most if nothing else is said. Twice as many, what a fast drive takes in the usual time, hardly
make the answer better (on simulated drives: tests/tools/tune/test_successive_halving.py)."""
_STRIPING_PASSES, _LEAST_STRIPING_BYTES = 5, 4 << 20


@dataclass(frozen=True)
class Order:
    """What :func:`tune` is to measure, and for how long."""

    folders: tuple[Path, ...]
    """The folders, on one or several drives."""
    io_size: int
    """Bytes of the file in each folder, an int; no transfer is larger."""
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
    """Approximate duration of each search; less if the limit of bytes written is reached before."""
    max_writes: int | None = None
    """The most bytes that the run may write, an int, to all folders together; None for the files and 28 GiB for each search."""

    def __post_init__(self) -> None:
        check_number(self.io_size, "io_size")
        if self.max_writes is not None:
            check_number(self.max_writes, "max_writes")

    @property
    def operations(self) -> list[Operation]:
        """The directions to measure, reads before writes."""
        return [operation for operation in OPERATIONS if (self.read if operation == "read" else self.write)]

    @property
    def write_limit(self) -> int:
        """The most bytes that the run writes, to all folders together: files to read from, and what is measured."""
        files = self.io_size * len(self.folders)
        if not self.write:
            return files
        if self.max_writes is not None:
            return self.max_writes
        each = least_written(len(self.settings or ()), self.io_size) * len(self.folders)
        return files + _parts(len(self.folders)) * max(WRITES, each)


def tune(order: Order, progress: SearchProgress = lambda share, step: None) -> Tuning:
    """Find the best settings for folders. Blocks, for about ``order.seconds`` for each search.

    There is one search for each folder and, if there are several, one for all together. At most ``order.write_limit`` bytes are
    written. An interrupt (KeyboardInterrupt) ends the run with the results so far; if there are none, it is raised. No file is
    left behind.

    Args:
        order: What to measure.
        progress: Called with the share that is done and a description of the current step.

    Returns:
        The results of all searches. ``chosen.best.setting`` is the recommended setting.

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
    writes = _writes_of_each_part(order, len(offered))
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
                # A transfer of the search's size goes to each folder, if they are equally fast.
                limit = None if writes is None else writes // len(group)
                outcome = search(settings, order.operations, measure, order.io_size, order.seconds, limit, part)
                searches.append(_search(outcome, [facts[index] for index in group], backend, time.monotonic() - started))
                if not outcome.complete:
                    break
            if len(searches) == len(groups) > 1 and searches[-1].complete:
                striping = measure_striping(bench, order, searches, facts, writes)
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
        write_limit=order.write_limit if order.write else None,
    )


def _writes_of_each_part(order: Order, settings: int) -> int | None:
    """Return the bytes that each search, and the comparison of several folders, may write; None if only reads are measured.

    Raises:
        Unsuitable: If ``order.max_writes`` is too little for that.
    """
    if not order.write:
        return None
    files, folders = order.io_size * len(order.folders), len(order.folders)
    parts = _parts(folders)
    least = least_written(settings, order.io_size) * folders
    if folders > 1:
        least = max(least, 2 * folders * _STRIPING_PASSES * min(order.io_size, _LEAST_STRIPING_BYTES))
    if order.write_limit < files + parts * least:
        needed = files + parts * least
        raise Unsuitable(
            f"--max-writes: {settings} settings need at least {needed} bytes, got {order.write_limit}; allow more, give fewer "
            "settings (--sweep_config) or a smaller --io_size, or measure only reads (--no_write)"
        )
    return (order.write_limit - files) // parts


def _offered(order: Order) -> tuple[Sequence[AioConfig], str]:
    """Return the settings to choose from, and the backend that "auto" selects."""
    from deepnvme.tools.tune.measure import transfers  # here, because it takes seconds to import torch

    if order.gds:
        transfers.make_handle(AioConfig(use_gds=True))  # raises the reason if GPUDirect Storage does not work
        return order.settings or default_space(order.io_size, ["auto"], use_gds=True), "gds"
    working = [name for name, obstacle in transfers.op().backends().items() if obstacle is None]
    return order.settings or default_space(order.io_size, working), working[0]


def _groups(folders: int) -> list[tuple[int, ...]]:
    """Return the numbers of the folders of each search: each folder alone, then all together if there are several."""
    alone: list[tuple[int, ...]] = [(index,) for index in range(folders)]
    return alone if folders == 1 else [*alone, tuple(range(folders))]


def _parts(folders: int) -> int:
    """Return into how many parts the bytes to write are divided: one for each search, and one for the comparison of folders."""
    return len(_groups(folders)) + (folders > 1)


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


def measure_striping(
    bench: TrialBench, order: Order, searches: Sequence[Search], facts: Sequence[FolderFacts], writes: int | None
) -> Striping:
    """Measure each folder with its own best setting, and all together with theirs. Blocks.

    They take turns, so that a drive that is slow for a while is slow in all measurements.

    Args:
        bench: Measures; open.
        order: What :func:`tune` was given.
        searches: The search of each folder, in their order, and last the one of all together.
        facts: The folders, in their order.
        writes: The most bytes to write; None if only reads are measured.

    Raises:
        OSError: If a transfer fails.
    """
    together = searches[-1]
    groups = _groups(len(facts))
    nbytes = order.io_size
    if writes is not None:
        nbytes = min(nbytes, writes // (2 * len(facts) * _STRIPING_PASSES))
    rates: dict[tuple[int, Operation], list[float]] = {}
    for _, (number, found), operation in itertools.product(range(_STRIPING_PASSES), enumerate(searches), order.operations):
        shares = _shares(groups[number], searches[:-1])
        observed = bench.move(shares, found.best.setting, operation, nbytes)
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
    found = {setting: _result(setting, outcome, backend) for setting in outcome.ranked}
    return Search(
        folders=tuple(facts),
        best=found[outcome.best],
        reason=outcome.reason,
        rounds=len(outcome.rounds),
        seconds=seconds,
        complete=outcome.complete,
        results=tuple(found.values()),
        measured=tuple(RoundFacts(len(each.samples), each.passes, each.nbytes) for each in outcome.rounds),
        reference=Reference(outcome.reference, sum(len(each.reference) for each in outcome.rounds), outcome.reference_spread()),
        shortened=outcome.shortened,
    )


def _result(setting: AioConfig, outcome: Outcome, backend: str) -> Result:
    """Return the values of a setting in the last round in which it was measured."""
    last = outcome.last_round(setting)
    measured = outcome.rounds[last]

    def figures(operation: Operation) -> Figures | None:
        if operation not in measured.operations:
            return None
        speeds = [measured.speeds(operation), outcome.rounds[-1].speeds(operation)]
        # Rounds differ in the size of transfers; the recommended setting took part in all of them.
        scale = speeds[1][outcome.best].rate / speeds[0][outcome.best].rate
        speed, found = speeds[0][setting], measured.observed(setting, operation)
        return Figures(
            gb_per_second=speed.rate * scale / 1e9,
            cpu_seconds_per_gb=cpu_seconds_per_gb(found),
            latency_p50=statistics.median(each.block_latency_p50 for each in found),
            latency_p99=statistics.median(each.block_latency_p99 for each in found),
            interval=None if speed.interval is None else (speed.interval[0] * scale / 1e9, speed.interval[1] * scale / 1e9),
        )

    name = setting.backend
    return Result(
        setting,
        backend if name == "auto" else name,
        figures("read"),
        figures("write"),
        last + 1,
        outcome.differences.get(setting),
    )
