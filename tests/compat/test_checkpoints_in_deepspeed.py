"""Our checkpoint engine and our file writer in DeepSpeed: what one saves the other loads, and training goes on as if never
interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .running import interpreter, run

pytestmark = pytest.mark.slow

CASES: dict[str, dict[str, Any]] = {
    f"{saved}-{loaded}-stage-{stage}": {"saved_by": saved, "loaded_by": loaded, "stage": stage}
    for stage in (0, 2, 3)
    for saved, loaded in (("ours", "ours"), ("ours", "theirs"), ("theirs", "ours"))
}
WRITTEN: dict[str, dict[str, Any]] = {
    "fast": {"saved_by": "fast", "loaded_by": "ours", "stage": 3},
    "fast-single-buffer-older-format": {
        "saved_by": "fast", "loaded_by": "theirs", "stage": 3, "double": False, "zipped": False
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, io_dir: Path) -> dict[str, Any]:
    """Of each case, and what DeepSpeed's classes have that ours lack, from one process."""
    cases = CASES | WRITTEN
    (results,) = run(interpreter(request.config), "tests.compat.checkpoint_program", list(cases.values()), io_dir)
    return dict(zip([*cases, "lacking"], results, strict=True))


def test_nothing_that_deepspeed_calls_is_lacking(results: dict[str, Any]) -> None:
    not_called = ["save_torch_storage_object_list", "split_index_list"]  # by DeepSpeed or by torch
    assert results["lacking"] == {"engine": [], "config": [], "FastFileWriter": not_called}


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_from_a_checkpoint_bit_for_bit(results: dict[str, Any], name: str) -> None:
    result = results[name]
    assert "error" not in result, result
    assert result["class"] == {"ours": "NVMeCheckpointEngine", "theirs": "TorchCheckpointEngine"}[CASES[name]["saved_by"]]
    assert (result["client_state"], result["latest"]) == ("kept", "saved")
    assert len(result["files"]) == (1 if CASES[name]["stage"] == 0 else 2)
    assert len(set(result["continued"])) == 2
    assert result["resumed"] == result["continued"]


@pytest.mark.parametrize("name", WRITTEN)
def test_deepspeeds_fast_engine_saves_through_our_writer(results: dict[str, Any], name: str) -> None:
    result = results[name]
    assert "error" not in result, result
    assert result["class"] == "FastCheckpointEngine"
    assert sorted(result["opened"]) == result["files"]
    assert len(result["files"]) == 2
    assert result["resumed"] == result["continued"]
