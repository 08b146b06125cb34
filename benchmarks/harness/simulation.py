"""The engine over simulated drives (tests/native/simulated_drive.h), compared with what the same cores do without it."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from deepnvme.tools.tune.figures import Spread
from harness.command_line import Progress
from harness.figures import Verdict
from harness.tables import size_text, spread_text, table

GB_PER_S, MILLION_IOPS, LATENCY_US = 14.0, 2.5, 60.0
"""What a simulated drive does: a drive of PCIe 5.0."""
DEPTH = 256
"""Blocks under way at each drive: 2.5 M IOPS at 60 us take 150."""
MIB = 1 << 20

_FILE_SIZE = 1 << 40
_FAULTS = ("slow", "failing", "hanging")


@dataclass(frozen=True)
class Rate:
    """What drives did in a while."""

    gb_per_s: tuple[float, ...]  # of each drive
    cpu_us_per_block: float
    cores: float  # in use, on average

    @property
    def total(self) -> float:
        return sum(self.gb_per_s)


@dataclass
class Point:
    """One number of cores, drives and bytes in a block: rates with the engine and without it, round by round."""

    cores: int
    drives: int
    block_size: int
    engine: list[Rate] = field(default_factory=list)
    sleeping: list[Rate] = field(default_factory=list)  # without the engine, a thread for each drive, as workers are
    polling: list[Rate] = field(default_factory=list)  # without the engine, a thread for each core, which never sleeps

    @property
    def hardware(self) -> float:
        """What the drives can do, in GB/s."""
        return self.drives * min(GB_PER_S, MILLION_IOPS * self.block_size / 1e3)

    def possible(self) -> list[float]:
        """What the cores allow without the engine, in GB/s: the better of both ways, and no more than the drives can do."""
        return [min(self.hardware, max(a.total, b.total)) for a, b in zip(self.sleeping, self.polling, strict=True)]

    def of_hardware(self, rates: Sequence[Rate]) -> Spread:
        return Spread.of([rate.total / self.hardware for rate in rates])

    def possible_of_hardware(self) -> Spread:
        return Spread.of([rate / self.hardware for rate in self.possible()])

    def of_possible(self) -> Spread:
        """The engine's share of what the cores allow. Ratios of neighbours in time."""
        return Spread.of([rate.total / possible for rate, possible in zip(self.engine, self.possible(), strict=True)])


@dataclass(frozen=True)
class Scale:
    """How much to measure, and how many completions wake a worker."""

    drives: tuple[int, ...]
    block_sizes: tuple[int, ...]
    seconds: float
    rounds: int
    coalesced: int

    @classmethod
    def of(cls, rounds: int, coalesced: int, quick: bool) -> Scale:
        if quick:
            return cls((1, 8), (4 << 10, MIB), 0.02, rounds, coalesced)
        return cls((1, 2, 4, 8), tuple(4 << 10 << shift for shift in range(0, 11, 2)), 0.3, rounds, coalesced)


@contextlib.contextmanager
def limited_to(cores: int) -> Iterator[None]:
    """Threads that are started within run on so many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Drives:
    """Makes simulated drives, each with a file that is said to be on it, and loads them."""

    def __init__(self, op: ModuleType, directory: Path, scale: Scale) -> None:
        self._op = op
        self._seconds = scale.seconds
        self._model = op.DriveModel(GB_PER_S * 1e9, MILLION_IOPS * 1e6, LATENCY_US / 1e6, scale.coalesced)
        self._paths = [directory / f"drive{index}" for index in range(8)]
        for path in self._paths:
            with path.open("wb") as sparse:
                sparse.truncate(_FILE_SIZE)

    def without_engine(self, count: int, block_size: int, polling_threads: int) -> Rate:
        drives = self._new(count)
        return self._rate(self._op.BareLoad(drives, block_size, DEPTH, polling_threads), drives)

    def with_engine(self, count: int, block_size: int, single_blocks: bool = False, fault: str = "healthy") -> Rate:
        """``single_blocks``: requests of one block, else one for all. ``fault``: what is wrong with the first drive."""
        drives = self._new(count)
        drives[0].become(fault)
        paths = [str(path) for path in self._paths[:count]]
        load = self._op.EngineLoad(drives, paths, _FILE_SIZE, block_size, DEPTH, workers=1, single_blocks=single_blocks)
        return self._rate(load, drives)

    def _new(self, count: int) -> list[Any]:
        return [self._op.SimulatedDrive(self._model) for _ in range(count)]

    def _rate(self, load: Any, drives: Sequence[Any]) -> Rate:
        try:
            time.sleep(self._seconds / 4)
            begin, busy, before = time.perf_counter(), _cpu_seconds(), [drive.bytes for drive in drives]
            operations = sum(drive.operations for drive in drives)
            time.sleep(self._seconds)
            seconds, busy, after = time.perf_counter() - begin, _cpu_seconds() - busy, [drive.bytes for drive in drives]
            operations = sum(drive.operations for drive in drives) - operations
        finally:
            load.stop()
        rates = tuple((end - start) / seconds / 1e9 for start, end in zip(before, after, strict=True))
        return Rate(rates, busy / max(operations, 1) * 1e6, busy / seconds)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# -- how far the engine gets -------------------------------------------------------------------------------------------


def measure_points(op: ModuleType, directory: Path, cores: Sequence[int], scale: Scale, progress: Progress) -> list[Point]:
    """Measure each number of cores, drives and bytes in a block, with the engine and without it in turn."""
    drives = Drives(op, directory, scale)
    points = [Point(number, count, size) for number in cores for count in scale.drives for size in scale.block_sizes]
    for number in range(1, scale.rounds + 1):
        for point in points:
            progress(f"round {number}: cores: {point.cores}, drives: {point.drives}, blocks of {size_text(point.block_size)}")
            with limited_to(point.cores):
                point.sleeping.append(drives.without_engine(point.drives, point.block_size, polling_threads=0))
                point.engine.append(drives.with_engine(point.drives, point.block_size))
                point.polling.append(drives.without_engine(point.drives, point.block_size, polling_threads=point.cores))
    return points


def point_verdict(points: Sequence[Point]) -> Verdict:
    what = "eight simulated drives, 1 MiB blocks, two cores: engine / what two cores allow without it"
    point = next((each for each in points if (each.cores, each.drives, each.block_size) == (2, 8, MIB)), None)
    return Verdict(what, point.of_possible() if point else None, "at least", 0.9, note="two cores were not measured")


def point_table(points: Sequence[Point]) -> str:
    rows = []
    for point in points:
        cpu = Spread.of([rate.cpu_us_per_block for rate in point.engine]).median
        rows.append(
            [
                str(point.cores),
                str(point.drives),
                size_text(point.block_size),
                f"{point.hardware:.1f}",
                spread_text(point.of_hardware(point.engine)),
                spread_text(point.of_hardware(point.sleeping)),
                spread_text(point.of_hardware(point.polling)),
                spread_text(point.of_possible()),
                f"{cpu:.2f}",
                f"{Spread.of([rate.cores for rate in point.engine]).median:.1f}",
                "",
            ]
        )
    title = (
        f"Simulated drives of {GB_PER_S:g} GB/s, {MILLION_IOPS:g} M IOPS and {LATENCY_US:g} us: "
        "shares of what they can do, by the engine, and without it by threads that sleep and that poll"
    )
    header = ["cores", "drives", "block", "GB/s", "engine", "sleeping", "polling", "engine / better of both"]
    return table(title, [*header, "CPU us a block", "cores in use", ""], rows, left=0)


def points_as_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    def rates(measured: Sequence[Rate]) -> list[dict[str, Any]]:
        return [vars(rate) for rate in measured]

    return [
        {
            "cores": point.cores,
            "drives": point.drives,
            "block_size": point.block_size,
            "hardware_gb_per_s": point.hardware,
            "engine": rates(point.engine),
            "sleeping": rates(point.sleeping),
            "polling": rates(point.polling),
        }
        for point in points
    ]


# -- a drive with a fault beside healthy ones --------------------------------------------------------------------------


@dataclass
class Neighbours:
    """What the other seven drives did, in GB/s round by round, while the first of eight had a fault."""

    healthy: list[float] = field(default_factory=list)
    beside: dict[str, list[float]] = field(default_factory=lambda: {fault: [] for fault in _FAULTS})

    def loss(self, fault: str) -> Spread:
        return Spread.of([1 - rate / healthy for rate, healthy in zip(self.beside[fault], self.healthy, strict=True)])


def measure_neighbours(op: ModuleType, directory: Path, scale: Scale, progress: Progress) -> Neighbours:
    """Measure eight drives, each with requests of one block of 1 MiB, all healthy and with each fault in turn."""
    drives = Drives(op, directory, scale)
    measured = Neighbours()
    for number in range(1, scale.rounds + 1):
        progress(f"round {number}: eight drives, one with a fault")
        measured.healthy.append(sum(drives.with_engine(8, MIB, single_blocks=True).gb_per_s[1:]))
        for fault, rates in measured.beside.items():
            rates.append(sum(drives.with_engine(8, MIB, single_blocks=True, fault=fault).gb_per_s[1:]))
    return measured


def neighbour_verdicts(measured: Neighbours) -> list[Verdict]:
    return [
        Verdict(f"loss of seven drives' throughput beside one that is {fault}", measured.loss(fault), "at most", 0.03)
        for fault in measured.beside
    ]
