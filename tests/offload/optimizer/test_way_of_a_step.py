"""The way of a step, as docs/design.md has it: through eight files for each transfer, and never back up."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import deepnvme

from ...support.training import FULL_SHAPES, PRECISIONS, backward, optimizer_in, parameters

ROOT = Path(deepnvme.__file__).parents[1]
WAY = [
    {"deepnvme/offload/optimizer/optimizer.py"},
    {"deepnvme/offload/optimizer/step.py"},
    {"deepnvme/offload/optimizer/pipeline.py"},
    {"deepnvme/transfer/block_cache.py"},
    {"deepnvme/offload/optimizer/counted_io.py"},
    {"deepnvme/store/tensor_store.py"},
    {"deepnvme/store/reading.py", "deepnvme/store/writing.py"},
    {"deepnvme/engine.py"},
]
"""Files by their place on the way, from top to bottom. A read passes ``reading.py``, a write ``writing.py``."""
PLACES = {file: place for place, files in enumerate(WAY) for file in files}
ASKED = {
    "deepnvme/drives.py",  # how /proc/self/mountinfo is written, to find the limit of memory
    *(
        f"deepnvme/offload/optimizer/{name}.py"
        for name in ("block_versions", "gradients", "params", "resident_sub_groups", "spare_memory", "sub_group")
    ),
}
"""Files of the package that are asked on the way."""
SMALLER = ("deepnvme/memory/", "deepnvme/ops/", "deepnvme/transfer/", "deepnvme/store/", "deepnvme/_")
"""Where the files are that answer one question each."""


def sections() -> list[str]:
    """Return the two tables of the documented way: the way itself, and what is asked."""
    text = (ROOT / "docs" / "design.md").read_text()
    section = text[text.index("## The way of a step") :]
    return re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[:2]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "options",
    [{}, {"dram_budget": 1 << 40}, {"offload_gradients": True, "dram_budget": 60_000}, {"step_in_backward": True}],
    ids=str,
)
def test_a_step_goes_down_through_eight_files(drive: Path, precision: str, options: dict[str, Any]) -> None:
    calls: set[tuple[str, str]] = set()
    entered: set[str] = set()

    def file_of(frame: FrameType) -> str:
        return frame.f_code.co_filename.removeprefix(f"{ROOT}/")

    def look(frame: FrameType, event: str, _: Any) -> None:
        file = file_of(frame)
        if event != "call" or not file.startswith("deepnvme/"):
            return
        entered.add(file)
        if file in PLACES:
            caller = frame.f_back
            while caller is not None and file_of(caller) not in PLACES:
                caller = caller.f_back
            if caller is not None:
                calls.add((file_of(caller), file))

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
    assert {(caller, file) for caller, file in calls if PLACES[caller] > PLACES[file]} == set()
    assert {file for file in entered - set(PLACES) - ASKED if not file.startswith(SMALLER)} == set()
    if not options:  # all blocks are on the drive: each file calls the next
        passed = {(PLACES[caller], PLACES[file]) for caller, file in calls}
        assert set(pairwise(range(len(WAY)))) <= passed
        assert set(PLACES) <= entered


def test_the_documented_way_is_this_one() -> None:
    way, asked = sections()
    rows = [set(re.findall(r"`([\w/]+\.py)`", row)) for row in way.splitlines()[2:]]
    assert [{name if "/" in name else f"deepnvme/store/{name}" for name in row} for row in rows] == WAY
    assert set(re.findall(r"`([\w/]+\.py)`", asked)) == ASKED
