"""Many small tensors through a ``TensorStore``, against the same bytes as tensors of 1 MiB."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

from deepnvme.store.tensor_store import TensorStore
from deepnvme.tools.tune.folder import settle
from harness.command_line import Progress
from harness.comparison import Comparison, Counts, judge, measure_interleaved
from harness.figures import Verdict

KIB = 1 << 10
MIB = 1 << 20


def measure(directory: Path, count: int, rounds: int, progress: Progress) -> tuple[list[Verdict], Comparison[str, Counts]]:
    """``count`` tensors of 4 to 64 KiB: the rate at which they are put over themselves and got."""
    sizes = random.Random(0).choices(range(4 * KIB, 64 * KIB + 1, 4), k=count)
    sets = {
        "small": _tensors("small", sizes),
        "large": _tensors("large", [MIB] * max(1, round(sum(sizes) / MIB))),
    }
    with TensorStore(directory) as store:
        for tensors in sets.values():
            store.put_many(tensors).result()  # space is found once, before anything is measured

        def put(which: str) -> Counts:
            settle(directory)
            begun = time.perf_counter()
            nbytes = store.put_many(sets[which]).result()
            return {"seconds": time.perf_counter() - begun, "bytes": nbytes}

        def get(which: str) -> Counts:
            settle(directory)
            begun = time.perf_counter()
            found = store.get_many(sets[which]).result()
            seconds = time.perf_counter() - begun
            wrong = [name for name, tensor in found.items() if not torch.equal(tensor, sets[which][name])]
            if wrong or len(found) != len(sets[which]):
                raise ValueError(f"{len(wrong)} of {len(sets[which])} tensors came back differently, '{wrong[:1]}' first")
            return {"seconds": seconds, "bytes": sum(tensor.nbytes for tensor in found.values())}

        contenders = {f"{which} {move.__name__}": _call(move, which) for move in (put, get) for which in sets}
        comparison = measure_interleaved("small tensors", contenders, rounds, progress)
    verdicts = [
        judge(
            comparison,
            f"{count} tensors of 4 to 64 KiB, {move}: rate / that of 1 MiB",
            (f"small {move}", f"large {move}"),
            _rates,
            "at least",
            0.7,
        )
        for move in ("put", "get")
    ]
    return verdicts, comparison


def _tensors(name: str, sizes: list[int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {f"{name}.{index}": torch.empty(size, dtype=torch.uint8) for index, size in enumerate(sizes)}
    for tensor in made.values():
        tensor.random_(generator=generator)
    return made


def _call(move: Callable[[str], Counts], which: str) -> Callable[[], Counts]:
    return lambda: move(which)


def _rates(small: Counts, large: Counts) -> float:
    """A figure for verdicts: bytes per second of the small ones over that of the large ones."""
    ratio: float = (small["bytes"] / small["seconds"]) / (large["bytes"] / large["seconds"])
    return ratio
