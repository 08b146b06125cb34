"""The engine's own ceiling: blocks per second with a backend that completes at once and moves nothing.

What arrays of 48 GB/s and blocks of 4 KiB will need. The target: at least 400 000 blocks/s for one worker, and the same with up
to 100 000 requests pending. Three figures:

- one request: 1 GiB in blocks of 4 KiB;
- pending requests of one block each, held back until all are queued, then drained;
- the same from the first call in Python to the last completion, which adds what submitting costs.

    python benchmarks/engine_ceiling.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.native import EngineTestingBuilder

BLOCK = 4096
TARGET = 400_000
PENDING = (100, 1_000, 10_000, 100_000)


@dataclass
class Figure:
    """Blocks per second of one case, round by round."""

    case: str
    blocks: int
    blocks_per_s: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.blocks_per_s)


def measure(op: ModuleType, path: Path, rounds: int) -> list[Figure]:
    """How many blocks per second the engine can do with a backend that takes no time."""
    gate = op.Gate()
    engine = op.instant_engine(gate, block_size=BLOCK, queue_depth=128, num_threads=1)
    memory = torch.frombuffer(op.empty_pinned(1 << 30), dtype=torch.uint8)
    block = memory[:BLOCK]
    with path.open("wb") as sparse:
        sparse.truncate(memory.nbytes)
    file = engine.open(path)
    figures = [Figure("one request", memory.nbytes // BLOCK, [])]
    figures += [Figure("drained", count, []) for count in PENDING]
    figures += [Figure("submitted and drained", count, []) for count in PENDING]

    for _ in range(rounds):
        begin = time.perf_counter()
        engine.read(memory, file).result()
        figures[0].blocks_per_s.append(figures[0].blocks / (time.perf_counter() - begin))
        for figure in figures[1:]:
            held = figure.case == "drained"
            if held:
                gate.hold()
            begin = time.perf_counter()
            futures = [engine.read(block, file) for _ in range(figure.blocks)]
            if held:
                begin = time.perf_counter()
                gate.release()
            futures[-1].result()
            figure.blocks_per_s.append(figure.blocks / (time.perf_counter() - begin))
    engine.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()

    op = EngineTestingBuilder().load()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        figures = measure(op, Path(directory) / "sparse", arguments.rounds)

    print(f"{'case':24}{'blocks':>10}{'blocks/s':>14}{'spread':>26}  target {TARGET:,}")
    for figure in figures:
        spread = f"{min(figure.blocks_per_s):,.0f} .. {max(figure.blocks_per_s):,.0f}"
        # A hundred blocks take less time than waking the worker: shown, not judged.
        verdict = "" if figure.blocks < 1000 else "met" if figure.median >= TARGET else "MISSED"
        print(f"{figure.case:24}{figure.blocks:>10,}{figure.median:>14,.0f}{spread:>26}  {verdict}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()
