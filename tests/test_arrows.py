"""Imports between the packages go downwards only, private modules and sub-packages included; tests import no other tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import deepnvme

ROOT = Path(deepnvme.__file__).parent
FILES = [path for path in sorted(ROOT.rglob("*.py")) if "op_builder" not in path.parts]

BASE = {"_former_names", "_interrupts", "_lazy", "_polling", "files", "ops", "telemetry", "version"}
"""What may be used anywhere, and uses nothing but itself."""
ENGINE = BASE | {"engine", "drives"}
TRANSFER = ENGINE | {"memory", "transfer", "cache"}
STORE = TRANSFER | {"store"}
CHECKPOINT = TRANSFER | {"model", "checkpoint", "checkpoint.formats"}
STREAMING = STORE | CHECKPOINT
PARTS_OF_A_STREAM = {"streaming.extent_memory", "streaming.placeholder", "streaming.replaced_forward"}
LOCATING = {"streaming.located_weights", "streaming.merged_weights"}
TABLES = STORE | CHECKPOINT  # of weights that are in a checkpoint
DATA = TABLES | {"tables"}  # rows of tensors in files are found as tables find them
ACTIVATIONS = STORE | {"offload.pinned_arena"}
BLOCKS = ACTIVATIONS | {"model", "states", "offload.activations", "offload.training.ranks"}
OFFLOAD = {"offload", "offload.activations", "offload.optimizer", "offload.options", "offload.tiles", "offload.training"}
INTEGRATIONS = STREAMING | OFFLOAD | LOCATING | {"kvstore", "states", "tables", "streaming", "streaming.weights", "streaming.kv"}
DEEPSPEED = {f"integrations.deepspeed{part}" for part in ("", ".io", ".swap_tensor")}
MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(BASE, BASE),
    "engine": BASE,
    "drives": BASE | {"engine"},
    "memory": ENGINE,
    "transfer": ENGINE | {"memory"},
    "cache": ENGINE | {"memory"},
    "model": ENGINE | {"memory"},
    "store": STORE,
    "tables": TABLES,
    "kvstore": STORE,
    "data": DATA,
    "offload.pinned_arena": STORE,
    "states": STORE,
    "offload.options": TRANSFER,
    "offload.optimizer": STORE | {"states", "offload.options"},
    "offload.activations": ACTIVATIONS,
    "offload.tiles": BASE | {"memory", "model"},
    "offload.training.ranks": BASE | {"memory", "states", "offload.activations"},
    "offload.training.blocks": BLOCKS,
    "offload.training": CHECKPOINT  # a training may begin with the weights of a checkpoint
    | BLOCKS
    | {"offload.options", "offload.tiles", "offload.training.blocks"},
    "offload": {"_lazy", "states"} | OFFLOAD - {"offload"},
    "checkpoint.formats": TRANSFER,
    "checkpoint": CHECKPOINT,
    "checkpoint.dcp": CHECKPOINT,
    "safetensors": CHECKPOINT,
    "nn": {"_lazy", "tables"},
    "streaming.weights": STREAMING,
    "streaming.kv": STREAMING,
    **dict.fromkeys(PARTS_OF_A_STREAM, TRANSFER | {"model"}),
    "streaming.merged_weights": STREAMING | {"streaming.weights"},
    "streaming.located_weights": STREAMING | {"streaming.weights", "streaming.merged_weights"},
    "streaming.experts": STREAMING | PARTS_OF_A_STREAM | {"streaming.weights"} | LOCATING,
    "streaming": STREAMING  # a model may have tables
    | PARTS_OF_A_STREAM
    | LOCATING
    | {"streaming.weights", "streaming.kv", "streaming.experts", "tables"},
    "integrations": INTEGRATIONS,
    "integrations.deepspeed.io": ENGINE | {"memory"},
    "integrations.deepspeed.swap_tensor": CHECKPOINT,
    "integrations.deepspeed": INTEGRATIONS | DEEPSPEED,
    "tools": {"_lazy"},
    "tools.report": ENGINE | {"memory"},
    "tools.tune": ENGINE | DEEPSPEED | {"memory", "tools.report"},
    # public names of what is elsewhere
    "profiles": {"_lazy", "drives"},
    "quantization": {"_lazy", "model"},
    "report": {"_lazy", "tools.report"},
    "tune": {"_lazy", "tools.tune"},
    "swap": {"_lazy", "memory", "store", *DEEPSPEED},
    "io": {"_lazy", *DEEPSPEED},
}
PUBLIC_NAMES = {
    ("checkpoint", "checkpoint.dcp"),
    ("checkpoint", "integrations.deepspeed"),
    ("integrations", "integrations.deepspeed"),
}
"""Of an ``__init__.py`` that has names of packages above it, imported when one asks for them."""


def part_of(module: tuple[str, ...]) -> str:
    """The deepest package or module of the table that a module belongs to."""
    names = (".".join(module[:length]) for length in range(len(module), 0, -1))
    return next((name for name in names if name in MAY_IMPORT), module[0])


def module_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported(path: Path) -> Iterator[tuple[str, ...]]:
    """The modules, and the names in them, that a file imports from this package, wherever in it."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
            yield from (name[1:] for name in names if name[0] == "deepnvme" and len(name) > 1)
        elif isinstance(node, ast.ImportFrom):
            module = tuple((node.module or "").split(".")) if node.module else ()
            if node.level:
                base = package[: len(package) - node.level + 1] + module
            elif module[:1] == ("deepnvme",):
                base = module[1:]
            else:
                continue
            yield from ((*base, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_what_is_below_it(path: Path) -> None:
    module = module_of(path)
    if len(module) < 2 and module[:1] in ((), ("__main__",)):
        return  # above all
    part = part_of(module)
    parts = {part_of(name) for name in imported(path)} - {part}
    if path.name == "__init__.py":
        parts = {name for name in parts if (part, name) not in PUBLIC_NAMES}
    assert parts - MAY_IMPORT[part] == set()


def test_the_table_has_every_package_and_module() -> None:
    parts = {part_of(module_of(path)) for path in FILES if module_of(path) not in ((), ("__main__",))}
    assert parts == set(MAY_IMPORT)


def test_no_package_is_below_itself() -> None:
    below = {part: names - BASE - {part} for part, names in MAY_IMPORT.items()}
    while below:
        lowest = {part for part, names in below.items() if not names & set(below)}
        assert lowest, f"in a circle: {sorted(below)}"
        below = {part: names for part, names in below.items() if part not in lowest}


def test_no_file_of_tests_imports_another() -> None:
    """What several need is in a conftest.py or in tests/support."""
    found = {}
    for path in Path(__file__).parent.rglob("*.py"):
        imports = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom))
        names = {name for node in imports for alias in node.names for name in (getattr(node, "module", None), alias.name) if name}
        if tests := [name for name in names if any(part.startswith("test_") for part in name.split("."))]:
            found[str(path)] = tests
    assert found == {}
