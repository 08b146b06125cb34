"""The benchmark of checkpoints: complete, tidy, and able to see what it looks for. Its figures are not looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint
import pytest
import torch
from harness import checkpoints, load_worker
from harness.workloads import ContenderFailed

pytestmark = pytest.mark.slow


def test_every_target_has_a_line_and_nothing_is_left_behind(tmp_path: Path, document_of: Callable[..., Any]) -> None:
    document = document_of(checkpoint.main, tmp_path, "--rounds", "1")
    ours = [target for target in document["targets"] if "Run:ai" not in target["what"] and "safetensors" not in target["what"]]
    assert len(document["targets"]) == 21
    assert all(target["figure"] is not None for target in ours)


def test_a_load_that_comes_back_differently_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"width": 8, "layers": 1, "vocabulary": 10}
    state = checkpoints.transformer(**shape)
    honest = checkpoints.library("torch")
    liar = checkpoints.Library(honest.save, lambda path, shapes: {**torch.load(path), "layers.0.norm1.weight": torch.zeros(8)})
    honest.save(state, tmp_path / "file")
    for library, caught in ((honest, contextlib.nullcontext()), (liar, pytest.raises(ContenderFailed, match="1 of 7 tensors"))):
        monkeypatch.setattr(load_worker, "library", lambda name, library=library: library)
        with caught:
            load_worker.LoadWorker(name="any", path=str(tmp_path / "file"), **shape).load()
