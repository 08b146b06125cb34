"""No function, constructor or class is too large to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import deepnvme

ROOT = Path(deepnvme.__file__).parent
MOST_LINES = 70
"""Of code in a function: without its docstring, comments and blank lines."""
MOST_PARAMETERS = 12
"""Of a public class's constructor, ``self`` not counted."""
MOST_METHODS = 30
"""Of a class, properties among them."""
ALLOWED = {
    "cache/block_cache.py: BlockCache": "one mechanism, whose states all its methods keep; most are of a few lines",
    "store/tensor_store.py: TensorStore": "31 methods, each of them public",
    "streaming/kv/layer.py: OffloadedLayer": "transformers' interface of a layer asks for most of its methods",
}
"""What is larger, and why."""


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, text: list[str]) -> int:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0
    first, last = body[0].lineno, function.end_lineno or 0
    lines = [line.strip() for line in text[first - 1 : last]]
    return sum(bool(line) and not line.startswith("#") for line in lines)


def too_large() -> Iterator[str]:
    for path in sorted(ROOT.rglob("*.py")):
        if "op_builder" in path.parts:
            continue
        source = path.read_text()
        name, text = str(path.relative_to(ROOT)), source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node, text) > MOST_LINES:
                yield f"{name}: {node.name} has {code_lines(node, text)} lines"
            elif isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                if len(methods) > MOST_METHODS:
                    yield f"{name}: {node.name} has {len(methods)} methods"
                for each in methods:
                    given = each.args
                    count = len(given.posonlyargs + given.args + given.kwonlyargs) - 1
                    if each.name == "__init__" and not node.name.startswith("_") and count > MOST_PARAMETERS:
                        yield f"{name}: {node.name} has {count} parameters"


def test_functions_constructors_and_classes_can_be_read_at_once() -> None:
    assert [each for each in too_large() if each.split(" has ")[0] not in ALLOWED] == []
