"""Arrows between the parts of the package point one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import deepnvme

ROOT = Path(deepnvme.__file__).parent
BASE = {"ops", "engine", "config", "version"}
"""Any part may import these, and private modules."""
MAY_IMPORT: dict[str, set[str]] = {
    "ops": set(),
    "swap": BASE,
    "checkpoint": BASE | {"swap"},
    "safetensors": BASE | {"swap", "checkpoint"},
    "streaming": BASE | {"swap", "checkpoint"},
    "io": BASE,
    "tune": BASE | {"io"},
}
ABOVE_ALL = ("integrations", "report", "__init__", "__main__")
PARTS = sorted(path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())


def imported(path: Path) -> Iterator[str]:
    """The parts of the package that a file imports from, wherever in it."""
    package = ["deepnvme", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        yield from (name[1] for name in names if name[0] == "deepnvme" and len(name) > 1)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_what_is_below_it(part: str) -> None:
    files = [*ROOT.glob(f"{part}.py"), *(ROOT / part).rglob("*.py")]
    below = set(PARTS) - {"integrations"} if part in ABOVE_ALL else MAY_IMPORT.get(part, BASE)
    arrows = {(path.name, name) for path in files for name in imported(path) if name in PARTS and not name.startswith("_")}
    assert {(file, name) for file, name in arrows if name not in below | {part}} == set()
