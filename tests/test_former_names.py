"""Arguments are taken by their former names too."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

import deepnvme


def test_former_names_mean_the_present_ones(drive: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    given = {"nvme_path": drive, "dram_budget": "1MB", "config": deepnvme.AioConfig(queue_depth=3)}
    with deepnvme.OffloadedOptimizer([parameter], torch.optim.AdamW, **given) as optimizer:  # type: ignore[arg-type]
        parameter.sum().backward()
        optimizer.step()
        assert optimizer.report().resident_bytes > 0


def test_both_names_at_once_are_refused(drive: Path) -> None:
    config = deepnvme.AioConfig()
    with pytest.raises(TypeError, match="config is the former name of aio_config: give only aio_config"):
        deepnvme.save({}, drive / "file", config=config, aio_config=config)  # type: ignore[call-arg]


def test_signatures_show_the_present_names_only() -> None:
    assert "config" not in inspect.signature(deepnvme.save).parameters
    assert "aio_config" in inspect.signature(deepnvme.save).parameters
