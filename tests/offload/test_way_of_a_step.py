"""The way of a step, as docs/design.md has it: through eight files, and never back up."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import deepnvme.offload

from ..support.training import FULL_SHAPES, PRECISIONS, backward, optimizer_in, parameters

PACKAGE = Path(deepnvme.offload.__file__).parent
WAY = ["optimizer", "step", "pipeline", "resident_sub_groups", "gradients", "sub_group", "io_stats", "params"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "options",
    [{}, {"dram_budget": 1 << 40}, {"offload_gradients": True, "dram_budget": 60_000}, {"step_in_backward": True}],
    ids=str,
)
def test_a_step_goes_down_through_eight_files(drive: Path, precision: str, options: dict[str, Any]) -> None:
    calls: set[tuple[str, str]] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back
        if event == "call" and Path(frame.f_code.co_filename).parent == PACKAGE:
            while caller is not None and Path(caller.f_code.co_filename).parent != PACKAGE:
                caller = caller.f_back
            if caller is not None:
                calls.add((Path(caller.f_code.co_filename).stem, Path(frame.f_code.co_filename).stem))

    dtype, masters = PRECISIONS[precision]
    params = parameters(dtype, FULL_SHAPES)
    with optimizer_in(drive, params, master_weights=masters, **options) as optimizer:
        for step in range(3):
            backward(params, step)
            sys.setprofile(look)
            try:
                optimizer.step()
            finally:
                sys.setprofile(None)
            optimizer.zero_grad()
    assert {file for call in calls for file in call} <= set(WAY)
    assert [(caller, file) for caller, file in calls if WAY.index(caller) > WAY.index(file)] == []


def test_the_documented_way_is_this_one() -> None:
    text = (PACKAGE.parents[1] / "docs" / "design.md").read_text()
    section = text[text.index("## The way of a step") :]
    places = [section.index(f"| `{name}.py` |") for name in WAY]
    assert places == sorted(places)
