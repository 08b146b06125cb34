"""Our swapper classes in DeepSpeed's ZeRO stage 3, against DeepSpeed's own, both on our op: the same losses, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .running import interpreter, run

STEPS = 10
COMPARED: dict[str, dict[str, Any]] = {
    f"{dtype}-{'pipelined' if pipelined else 'not-pipelined'}": {
        "dtype": dtype,
        "pipelined": pipelined,
        "buffer_count": 16 if pipelined else 5,
    }
    for dtype in ("fp32", "bf16")
    for pipelined in (True, False)
}
COMPARED["accumulated-and-clipped"] = {"dtype": "bf16", "accumulate": 2, "clip": 0.05}
COMPARED["momentum"] = {"dtype": "fp32", "optimizer": "sgd", "buffer_count": 12}
COMPARED["parameters-too"] = {"dtype": "bf16", "offload_param": 12, "prefetch": 0}
COMPARED["parameters-too-not-pipelined"] = {**COMPARED["parameters-too"], "pipelined": False, "buffer_count": 5}
COMPARED["parameters-too-fast-init"] = {**COMPARED["parameters-too"], "fast_init": True}

ALONE: dict[str, dict[str, Any]] = {
    "few-buffers": {"world": "our swappers", "dtype": "fp32", "buffer_count": 10},
    "fewer-buffers-than-a-sub-group": {"world": "our swappers", "dtype": "fp32", "buffer_count": 2},
    "few-buffers-theirs": {"world": "op", "dtype": "fp32", "buffer_count": 10},
    "parameters-read-ahead": {"world": "our swappers", "dtype": "bf16", "offload_param": 12},
    "parameters-read-ahead-theirs": {"world": "op", "dtype": "bf16", "offload_param": 12},
    "checkpoint": {"world": "our swappers", "dtype": "fp32", "steps": 4, "resume": 3},
}
ALONE["checkpoint-not-pipelined"] = {**ALONE["checkpoint"], "dtype": "bf16", "pipelined": False, "buffer_count": 5}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, io_dir: Path) -> dict[str, Any]:
    """Of each case, from one process."""
    python = interpreter(request.config)
    worlds = {"theirs": "op", "ours": "our swappers"}
    cases = {f"{name} {whose}": {**case, "world": worlds[whose]} for name, case in COMPARED.items() for whose in worlds}
    cases |= ALONE
    (results,) = run(python, "tests.compat.zero3_program", [{"steps": STEPS, **case} for case in cases.values()], io_dir)
    return dict(zip(cases, results, strict=True))


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", COMPARED)
def test_losses_are_deepspeeds_own_bit_for_bit(results: dict[str, Any], name: str) -> None:
    theirs, ours = results[f"{name} theirs"], results[f"{name} ours"]
    assert "error" not in theirs, theirs
    assert "error" not in ours, ours
    assert ours["class"].startswith("deepnvme.")
    assert theirs["class"].startswith("deepspeed.")
    assert ours["groups"] > 5
    assert len(set(ours["losses"])) == STEPS
    assert ours["losses"] == theirs["losses"]


@pytest.mark.parametrize("name", COMPARED)
def test_the_files_are_deepspeeds_own_once_the_folder_is_asked_for(results: dict[str, Any], name: str) -> None:
    theirs, ours = results[f"{name} theirs"], results[f"{name} ours"]
    assert len(theirs["files"]) >= 12
    assert ours["files"] == theirs["files"]


def test_parameters_are_swapped_by_our_class_too(results: dict[str, Any]) -> None:
    ours = "deepnvme.integrations.deepspeed.swap_tensor.partitioned_param_swapper.AsyncPartitionedParameterSwapper"
    assert ours in results["parameters-too ours"]["parts"]
    assert ours not in results["parameters-too theirs"]["parts"]


def test_it_trains_with_fewer_buffers_than_deepspeed_can(results: dict[str, Any]) -> None:
    assert "ran out of swap buffers" in results["few-buffers-theirs"]["error"]
    assert results["few-buffers"]["losses"] == results["fp32-pipelined theirs"]["losses"]


def test_it_takes_more_memory_where_a_sub_group_does_not_fit(results: dict[str, Any]) -> None:
    assert results["fewer-buffers-than-a-sub-group"].get("losses") == results["fp32-pipelined theirs"]["losses"]


def test_parameters_can_be_read_ahead_of_a_step_that_changes_them(results: dict[str, Any]) -> None:
    assert "already assigned swap buffer" in results["parameters-read-ahead-theirs"]["error"]
    assert results["parameters-read-ahead"].get("losses") == results["parameters-too theirs"]["losses"]


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint-not-pipelined"])
@pytest.mark.parametrize("how", ["resumed", "rewound"])
def test_a_checkpoint_has_what_was_still_in_memory(results: dict[str, Any], name: str, how: str) -> None:
    assert "error" not in results[name], results[name]
    assert results[name][how] == results[name]["continued"]
