"""The benchmark of checkpoints: complete, tidy, and able to see what it looks for. Its figures are not looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint
import pytest
import torch
from harness import checkpoints
from harness.free_memory import FreeMemory
from harness.workloads import ContenderFailed

pytestmark = pytest.mark.slow


def test_every_target_has_a_line_and_nothing_is_left_behind(tmp_path: Path, document_of: Callable[..., Any]) -> None:
    document = document_of(checkpoint.main, tmp_path, "--rounds", "1")
    ours = [target for target in document["targets"] if "Run:ai" not in target["what"] and "safetensors" not in target["what"]]
    assert len(document["targets"]) == 19
    assert all(target["figure"] is not None for target in ours)


def test_a_load_that_comes_back_differently_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"weight": torch.arange(10.0)}
    liar = checkpoints.Library(lambda state, path: torch.save(state, path), lambda path, state: {"weight": torch.zeros(10)})
    monkeypatch.setattr(checkpoint, "library", lambda name: liar)
    with pytest.raises(ContenderFailed, match="came back differently"):
        checkpoint.loading("liar", state, tmp_path, FreeMemory(1 << 20))()
