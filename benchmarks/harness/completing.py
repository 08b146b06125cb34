"""Blocks per second of the engine with a backend that completes at once and moves nothing: what is left is its own cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from deepnvme.tools.tune.figures import Spread
from harness.command_line import Progress
from harness.figures import Verdict
from harness.tables import spread_text, table

BLOCK = 4096
MANY = 100_000
"""Requests that the targets are for."""

_DRAINED, _SUBMITTED = "queued requests of one block", "requests of one block, from Python"
_READ_MANY = "one read_many of single blocks, from Python"


@dataclass
class Figure:
    """Blocks per second of one case, round by round."""

    case: str
    blocks: int
    blocks_per_s: list[float] = field(default_factory=list)
    cpu_ns_per_block: list[float] = field(default_factory=list)  # of all threads; hardly changed by other programs

    def add(self, cost: Cost) -> None:
        self.blocks_per_s.append(self.blocks / cost.seconds)
        self.cpu_ns_per_block.append(cost.cpu_seconds / self.blocks * 1e9)


@dataclass(frozen=True)
class Cost:
    """What a case took."""

    seconds: float
    cpu_seconds: float


class _Stopwatch:
    """Measures from its construction on."""

    def __init__(self) -> None:
        self._seconds, self._cpu_seconds = time.perf_counter(), time.process_time()

    def read(self) -> Cost:
        return Cost(time.perf_counter() - self._seconds, time.process_time() - self._cpu_seconds)


class _Cases:
    """An engine of one worker over the completing backend, and what is asked of it."""

    def __init__(self, op: ModuleType, path: Path, blocks: int) -> None:
        with path.open("wb") as sparse:
            sparse.truncate(blocks * BLOCK)
        self._op, self._path = op, str(path)
        self._engine = op.instant_engine(op.Gate(), block_size=BLOCK, queue_depth=128, num_threads=1)
        self._memory = torch.frombuffer(op.empty_pinned(blocks * BLOCK), dtype=torch.uint8)
        self._file = self._engine.open(path)

    def close(self) -> None:
        self._engine.close()

    def one_request(self) -> Cost:
        watch = _Stopwatch()
        self._engine.read(self._memory, self._file).result()
        return watch.read()

    def drained(self, count: int) -> Cost:
        """The cost of ``count`` queued requests of one block. Without Python, which would drop their futures meanwhile."""
        return Cost(*self._op.drain_requests(self._path, BLOCK, count))

    def submitted(self, count: int) -> Cost:
        """The cost of ``count`` requests of one block, one call from Python for each."""
        block = self._memory[:BLOCK]
        watch = _Stopwatch()
        futures = [self._engine.read(block, self._file) for _ in range(count)]
        futures[-1].result()
        return watch.read()

    def read_many(self, count: int) -> Cost | None:
        """The cost of one call that reads ``count`` blocks into a tensor each; None if the engine has no such call."""
        if not hasattr(self._engine, "read_many"):
            return None
        blocks = self._memory.view(-1, BLOCK)
        tensors = [blocks[i % len(blocks)] for i in range(count)]
        offsets = [i % len(blocks) * BLOCK for i in range(count)]
        watch = _Stopwatch()
        self._engine.read_many(tensors, self._file, offsets).result()
        return watch.read()


def measure(op: ModuleType, directory: Path, rounds: int, quick: bool, progress: Progress) -> list[Figure]:
    """Measure every case in each round. ``op``: the module of :class:`tests.native.EngineTestingBuilder`."""
    blocks = (16 << 20 if quick else 1 << 30) // BLOCK
    cases = _Cases(op, directory / "sparse", blocks)
    pending = (100, 1_000) if quick else (100, 1_000, 10_000, MANY)

    def all_of_them() -> Iterator[tuple[Figure, Callable[[], Cost | None]]]:
        yield Figure("one request", blocks), cases.one_request
        for count in pending:
            yield Figure(_DRAINED, count), lambda count=count: cases.drained(count)
        for count in pending:
            yield Figure(_SUBMITTED, count), lambda count=count: cases.submitted(count)
        for count in pending[1:]:
            yield Figure(_READ_MANY, count), lambda count=count: cases.read_many(count)

    measured = list(all_of_them())
    for number in range(1, rounds + 1):
        progress(f"a backend that completes at once, round {number}")
        for figure, run in measured:
            cost = run()
            if cost is not None:
                figure.add(cost)
    cases.close()
    return [figure for figure, _ in measured]


def verdicts(figures: Sequence[Figure]) -> list[Verdict]:
    """The targets, which are for the largest number of requests: waking the worker is not to count."""
    found = []
    for case, bound in ((_DRAINED, 5), (_READ_MANY, 3)):
        figure = max((each for each in figures if each.case == case), key=lambda each: each.blocks)
        rates = [rate / 1e6 for rate in figure.blocks_per_s]
        what = f"completing backend, one worker, {figure.blocks:,} blocks: {case}"
        spread = Spread.of(rates) if rates else None
        found.append(Verdict(what, spread, "at least", bound, "million/s", note="the engine has no read_many"))
    return found


def figure_table(figures: Sequence[Figure]) -> str:
    rows = [
        [
            figure.case,
            f"{figure.blocks:,}",
            spread_text(Spread.of([rate / 1e6 for rate in figure.blocks_per_s])),
            f"{Spread.of(figure.cpu_ns_per_block).median:.0f}",
            "",
        ]
        for figure in figures
        if figure.blocks_per_s
    ]
    header = ["case", "blocks", "million blocks/s, median (quartiles)", "CPU ns a block", ""]
    return table("A backend that completes at once, one worker", header, rows, left=1)


def as_json(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    return [asdict(figure) for figure in figures]
