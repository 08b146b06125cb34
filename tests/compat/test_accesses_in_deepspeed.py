"""Weights, states and gradients looked at and set between backward and step, in real DeepSpeed with our swapper classes.

What is seen is as in memory, and the losses are those of DeepSpeed's own classes as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .running import interpreter, run

STEPS = 3
_OFTEN: dict[str, Any] = {"dtype": "bf16", "bias": False}
_PARAMETERS_TOO: dict[str, Any] = {**_OFTEN, "offload_param": 12, "prefetch": 0}
_SKIPS_OF_TWO: dict[str, Any] = {
    **_OFTEN, "accumulate": 2, "skips": [2, 3, 8], "skips every": 4, "steps": 8, "before step": "see_gradients"
}  # fmt: skip
COMPARED: dict[str, dict[str, Any]] = {
    "set_whole": {**_OFTEN, "before step": "set_whole"},
    "set_whole-not-pipelined": {**_OFTEN, "before step": "set_whole", "pipelined": False},
    "set_whole-accumulated": {**_OFTEN, "before step": "set_whole", "accumulate": 2, "steps": 4},
    "set_whole-after-the-step": {**_PARAMETERS_TOO, "after step": "set_weights"},
    "set_local": {**_OFTEN, "before step": "set_local"},
    "set_gradients": {**_OFTEN, "before step": "set_gradients"},
    "evaluate": {**_PARAMETERS_TOO, "before step": "evaluate", "after step": "evaluate"},
    "gather_and_change": {**_PARAMETERS_TOO, "before step": "gather_and_change"},
    "gather_and_change-after-the-step": {**_PARAMETERS_TOO, "after step": "gather_and_change"},
    "consolidate": {**_PARAMETERS_TOO, "before step": "consolidate", "after step": "consolidate"},
    "forget_gathered": {**_PARAMETERS_TOO, "after step": "forget_gathered"},
    "save": {**_OFTEN, "before step": "save"},
    # DeepSpeed steps what a backward has not reached with the gradient of the last one that has, wherever gradients are.
    "skips": {**_OFTEN, "skips": [2, 3, 8], "before step": "see_gradients", "steps": 5},
    "skips-one-of-a-sub-group": {**_OFTEN, "skips": [2, 3, 8], "steps": 5, "layers_of_a_sub_group": 2},
    # It gives gradients on at the last micro-batch of a step, and forgets then what one before, but not that one, has reached.
    "skips-the-last-of-two": {**_SKIPS_OF_TWO, "skips in": 3},
    "skips-the-last-of-two-one-of-a-sub-group": {**_SKIPS_OF_TWO, "skips in": 3, "layers_of_a_sub_group": 2},
    "skips-the-first-of-two": {**_SKIPS_OF_TWO, "skips in": 2},
    "after-the-step": {**_OFTEN, "after step": "see_gradients"},
}
OURS_ALONE: dict[str, dict[str, Any]] = {
    # DeepSpeed's own lose a gradient that is too small to be swapped, as a bias's, when something is set.
    "biases": {**_OFTEN, "bias": True, "before step": "set_whole"},
    "biases-and-few-buffers": {**_OFTEN, "bias": True, "before step": "set_gradients", "buffer_count": 2},
    # Of a small gradient that is used up they have none, or what was in memory.
    "biases-skipped": {**_OFTEN, "bias": True, "skips": [2, 3, 8], "after step": "see_gradients", "steps": 5, "buffer_count": 5},
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def _cases(names: dict[str, dict[str, Any]], worlds: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        f"{name} {whose}": {"steps": STEPS, **case, **world} for name, case in names.items() for whose, world in worlds.items()
    }


_MEMORY = {"world": "op", "device": "cpu", "offload_param": None}
# DeepSpeed's own, pipelined, reads back what was set while that is still being written: now the old value, now the new one.
_THEIRS = {"world": "op", "pipelined": False}
_WORLDS: dict[str, dict[str, Any]] = {"theirs": _THEIRS, "ours": {"world": "our swappers"}, "memory": _MEMORY}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, io_dir: Path) -> dict[str, Any]:
    """Of each case, from one process."""
    python = interpreter(request.config)
    cases = _cases(COMPARED, _WORLDS) | _cases(OURS_ALONE, {name: _WORLDS[name] for name in ("ours", "memory")})
    (results,) = run(python, "tests.compat.zero3_program", list(cases.values()), io_dir)
    return dict(zip(cases, results, strict=True))


@pytest.mark.parametrize("name", [*COMPARED, *OURS_ALONE])
def test_what_is_seen_and_the_losses_are_as_in_memory(results: dict[str, Any], name: str) -> None:
    memory, ours = results[f"{name} memory"], results[f"{name} ours"]
    assert "error" not in memory, memory
    assert "error" not in ours, ours
    assert ours["class"].startswith("deepnvme.")
    assert ours["seen"] == memory["seen"]
    assert ours["losses"] == memory["losses"]


@pytest.mark.parametrize("name", COMPARED)
def test_the_losses_are_those_of_deepspeeds_own_classes(results: dict[str, Any], name: str) -> None:
    theirs, ours = results[f"{name} theirs"], results[f"{name} ours"]
    assert "error" not in theirs, theirs
    assert theirs["class"].startswith("deepspeed.")
    assert ours["losses"] == theirs["losses"]
    assert ours["seen"] == theirs["seen"]


@pytest.mark.parametrize("access", ["set_whole", "set_local", "set_gradients"])
def test_two_ranks_set_and_see_the_same_as_in_memory(request: pytest.FixtureRequest, drive: Path, access: str) -> None:
    case = {**_OFTEN, "before step": access, "steps": STEPS, "width": 1024}
    worlds = [{"world": "our swappers"}, {"world": "op", "device": "cpu"}]
    ranks = run(interpreter(request.config), "tests.compat.zero3_program", [{**case, **each} for each in worlds], drive, ranks=2)
    for ours, memory in ranks:
        assert "error" not in ours, ours
        assert ours["seen"] == memory["seen"]
        assert ours["losses"] == memory["losses"]
