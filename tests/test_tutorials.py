"""The tutorials are notebooks without outputs, and every cell of them runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


@pytest.fixture(scope="module")
def executing() -> ModuleType:
    """What ``make docs`` executes them with."""
    pytest.importorskip("nbclient", reason="needs nbclient")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    spec = importlib.util.spec_from_file_location("execute_tutorials", ROOT / "docs" / "site" / "execute_tutorials.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of Jupyter's own packages
def test_every_cell_runs(path: Path, drive: Path, executing: ModuleType) -> None:
    notebook = executing.execute(path, drive)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    assert not any(text in str(output) for output in outputs for text in ("Warning", str(drive)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_cell_that_raises_is_an_error(tmp_path: Path, drive: Path, executing: ModuleType) -> None:
    notebook = json.loads(TUTORIALS[0].read_text())
    notebook["cells"] = notebook["cells"][:1]
    notebook["cells"].append(
        {"cell_type": "code", "id": "broken", "metadata": {}, "source": ["1 / 0"], "execution_count": None, "outputs": []}
    )
    (tmp_path / "broken.ipynb").write_text(json.dumps(notebook))
    with pytest.raises(Exception, match="ZeroDivisionError"):
        executing.execute(tmp_path / "broken.ipynb", drive)
