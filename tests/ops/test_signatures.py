"""What help() shows of the op: signatures, which C++ and the stub both have, and texts, which are made from the stub's."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from types import ModuleType

import pytest

import deepnvme

Signature = list[tuple[str, str | None]]

STUB = Path(deepnvme.__file__).parent / "ops" / "aio" / "async_io_op" / "__init__.pyi"


def arguments(function: ast.FunctionDef) -> Signature:
    """Name and default of each argument but self; keyword-only ones after a "*"."""
    named = function.args
    positional = [each.arg for each in (*named.posonlyargs, *named.args)]
    defaults = [None] * (len(positional) - len(named.defaults)) + [ast.unparse(each) for each in named.defaults]
    found: Signature = list(zip(positional, defaults, strict=True))
    if named.kwonlyargs:
        found.append(("*", None))
    keywords = zip(named.kwonlyargs, named.kw_defaults, strict=True)
    found += [(each.arg, default and ast.unparse(default)) for each, default in keywords]
    return [(name, default) for name, default in found if name != "self"]


def shown(method: object) -> list[Signature]:
    """The arguments of each overload, from the docstring. ``async`` is no name in Python."""
    lines = [line for line in (method.__doc__ or "").splitlines() if " -> " in line]
    parsed = [ast.parse(f"def {line.replace('async:', 'async_:')}: ...").body[0] for line in lines]
    return [arguments(function) for function in parsed if isinstance(function, ast.FunctionDef)]


@pytest.mark.parametrize("kind", ["Future", "File", "Engine", "aio_handle"])
def test_the_stub_has_the_arguments_that_help_shows(kind: str, op: ModuleType) -> None:
    tree = ast.parse(STUB.read_text())
    (described,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind)
    checked = 0
    for function in described.body:
        if not isinstance(function, ast.FunctionDef) or function.name in ("__enter__", "__exit__"):
            continue
        if any(isinstance(each, ast.Name) and each.id == "property" for each in function.decorator_list):
            continue
        assert arguments(function) in shown(getattr(getattr(op, kind), function.name)), function.name
        checked += 1
    assert checked


TEXTS = runpy.run_path(str(Path(deepnvme.__file__).parents[1] / "packaging" / "help_texts.py"))


def test_the_help_texts_are_those_of_the_stubs() -> None:
    assert TEXTS["HEADER"].read_text() == TEXTS["header"](), "run packaging/help_texts.py"


@pytest.mark.parametrize("kind", ["Future", "File", "aio_handle"])
def test_help_shows_a_text_for_each_public_name(kind: str, op: ModuleType) -> None:
    shown_class = getattr(op, kind)
    texts = TEXTS["docstrings"]()
    assert shown_class.__doc__ == texts[kind]
    for name, member in vars(shown_class).items():
        if not name.startswith("_"):
            assert (member.__doc__ or "").endswith(texts[f"{kind}_{name}"]), name


def test_help_says_what_a_newcomer_asks(op: ModuleType) -> None:
    """Units, what blocks, and what is raised."""
    for text in ("block_size: Most bytes", "to 1 GiB", "wait() waits", "Offsets and sizes are in bytes", "OSError: "):
        assert text in op.aio_handle.__doc__
