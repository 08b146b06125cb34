"""The tutorials are notebooks without outputs. `make docs` executes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def test_there_is_one_for_each_row_of_the_page() -> None:
    page = (ROOT / "docs" / "tutorials" / "README.md").read_text()
    assert TUTORIALS
    for path in TUTORIALS:
        assert f"({path.name})" in page


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.name)
def test_it_is_stored_without_outputs_and_its_code_can_be_parsed(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert cells[0]["cell_type"] == "markdown"
    assert cells[0]["source"][0].startswith("# ")
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            compile("".join(cell["source"]), f"{path}, {cell['id']}", "exec")
