"""docs/deepspeed-names.md: whatever it says is the same, a test says too."""

from __future__ import annotations

import re

import pytest

from ...support.interpreters import REPOSITORY

TEXT = (REPOSITORY / "docs" / "deepspeed-names.md").read_text()
ROWS = re.findall(r"^\| ([^|]+) \| (\w[^|]*) \| ([^|]*)\|$", TEXT, re.MULTILINE)[1:]  # without the heading


def test_there_is_a_row_for_each_part() -> None:
    assert len(ROWS) > 40
    names = {name for row, _, _ in ROWS for name in re.findall(r"`([^`]+)`", row)}
    assert {"aio_handle", "gds_handle", "PipelinedOptimizerSwapper", "FastFileWriter", "ds_io", "use_gds"} <= names


@pytest.mark.parametrize(("name", "state", "test"), ROWS, ids=[re.sub(r"\W+", "-", name)[:40] for name, _, _ in ROWS])
def test_what_is_the_same_or_better_is_tested(name: str, state: str, test: str) -> None:
    kind = re.match("same|better|not yet", state)
    assert kind is not None, state
    if kind[0] == "not yet":
        return
    file, _, function = test.strip("` ").partition("::")
    assert re.search(rf"^(async )?def {re.escape(function)}\(", (REPOSITORY / file).read_text(), re.MULTILINE), test
