"""The picture of the README: of the runs that are recorded, and of what benchmarks write."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import overview
import pytest
from harness.figures import Verdict

from deepnvme.tools.tune.figures import Spread

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "docs/images/overview.json"


def document(benchmark: str, what: str, median: float | None) -> dict[str, Any]:
    figure = None if median is None else Spread.of([median])
    return {"benchmark": benchmark, "targets": [Verdict(what, figure, "at least", 1).as_json()]}


def test_the_picture_in_the_documentation_is_of_the_recorded_runs() -> None:
    found = overview.documents([RECORDED])
    drawn = overview.svg(overview.bars(found), found[0]["in_words"])
    assert (ROOT / "docs/images/overview.svg").read_text() == drawn
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_the_recorded_runs_are_those_of_the_results() -> None:
    results = (ROOT / "docs/benchmarks.md").read_text()
    for recorded in json.loads(RECORDED.read_text()):
        for target in recorded["targets"]:
            median = target["figure"]["median"]
            assert re.search(rf"(?<![\d.])({median:.2f}|{median:.1f})(?!\d)", results), target
    glance = results[results.index("## At a glance") : results.index("## Tensors to and from")]
    ranges = [bar.text.removesuffix("\N{MULTIPLICATION SIGN}") for bar in overview.bars(overview.documents([RECORDED]))]
    assert len(ranges) == len(overview.ROWS)
    for text in ranges:
        assert f"| {text} |" in glance


def test_it_prints_a_table_and_ends_with_1_if_there_is_nothing_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "run.json"
    given.write_text(json.dumps(document("checkpoint", "save, times as fast: deepnvme / safetensors", 1.5)))
    assert overview.main([str(given), "--svg", str(tmp_path / "a.svg"), "--machine", "four cores & a drive"]) == 0
    assert "| the same | safetensors | 1.5 |" in capsys.readouterr().out
    assert "four cores &amp; a drive" in (tmp_path / "a.svg").read_text()
    given.write_text("[]")
    assert overview.main([str(given)]) == 1
    assert "none of the comparisons" in capsys.readouterr().err
