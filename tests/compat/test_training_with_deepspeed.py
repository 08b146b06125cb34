"""One line has real DeepSpeed train on this package: ZeRO stage 3 on a drive, one rank and two, the losses of DeepSpeed alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .running import interpreter, run

STEPS = 20
WORLDS = ("alone", "op", "our swappers")
CASES: dict[str, dict[str, Any]] = {
    "fp32-pipelined": {"dtype": "fp32"},
    "bf16-not-pipelined": {"dtype": "bf16", "pipelined": False, "buffer_count": 5},
    "accumulated-and-clipped": {"dtype": "bf16", "accumulate": 2, "clip": 0.05},
    "parameters-too": {"dtype": "bf16", "offload_param": 12, "prefetch": 0},
}
WIDE_ENOUGH = {1: 768, 2: 1024}
"""By ranks: a rank's part of a layer in bf16 is no less than the least that is swapped."""
UNALIGNED = 1088
"""A layer's weights begin in the middle of a sector of their sub-group."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
Results = dict[str, list[Any]]


@pytest.fixture(scope="module")
def training(request: pytest.FixtureRequest, io_dir: Path) -> Callable[[int], Results]:
    """On so many ranks, of each case and world what the ranks have had; from one process a rank."""
    python = interpreter(request.config)
    known: dict[int, Results] = {}

    def results(ranks: int) -> Results:
        if ranks not in known:
            cases = {f"{name} {world}": {**case, "world": world} for name, case in CASES.items() for world in WORLDS}
            cases["few-buffers alone"] = {"dtype": "fp32", "buffer_count": 10, "world": "alone", "steps": 2}
            cases["few-buffers our swappers"] = {"dtype": "fp32", "buffer_count": 10, "world": "our swappers"}
            for world in WORLDS:
                cases[f"unaligned {world}"] = {"dtype": "fp32", "world": world, "width": UNALIGNED, "steps": 4}
            cases["unaligned in memory"] = {**cases["unaligned alone"], "device": "cpu"}
            for name, case in cases.items():
                own = io_dir / f"{ranks}-{name}"
                own.mkdir()
                case |= {"directories": [str(own)] * ranks}
            given = [{"steps": STEPS, "width": WIDE_ENOUGH[ranks], **case} for case in cases.values()]
            each = run(python, "tests.compat.zero3_program", given, io_dir, ranks=ranks)
            known[ranks] = {name: [rank[number] for rank in each] for number, name in enumerate(cases)}
        return known[ranks]

    return results


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_are_those_of_deepspeed_alone_bit_for_bit(
    training: Callable[[int], Results], ranks: int, name: str, world: str
) -> None:
    alone, ours = (training(ranks)[f"{name} {each}"] for each in ("alone", world))
    assert [result.get("error") for result in (*alone, *ours)] == [None] * 2 * ranks
    assert [result["losses"] for result in ours] == [result["losses"] for result in alone]
    assert len({loss for result in ours for loss in result["losses"]}) == STEPS * ranks
    assert all(result["class"].startswith("deepnvme." if world == "our swappers" else "deepspeed.") for result in ours)


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_begin_anywhere_are_those_in_memory(training: Callable[[int], Results], ranks: int, world: str) -> None:
    memory, ours, alone = (training(ranks)[f"unaligned {each}"] for each in ("in memory", world, "alone"))
    losses = [result.get("losses") for result in memory]
    assert [result.get("losses") for result in ours] == losses
    # What DeepSpeed's own op cannot read into such memory it leaves out, in silence.
    assert [result.get("losses") for result in alone] != losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_ten_buffers_deepspeed_alone_stops_and_with_our_swappers_it_trains(
    training: Callable[[int], Results], ranks: int
) -> None:
    assert all("ran out of swap buffers" in result["error"] for result in training(ranks)["few-buffers alone"])
    ours, alone = (training(ranks)[name] for name in ("few-buffers our swappers", "fp32-pipelined alone"))
    assert [result.get("losses") for result in ours] == [result["losses"] for result in alone]
