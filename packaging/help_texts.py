"""Write csrc/bindings/help_texts.h: what help() shows of the ops, from the docstrings of the stubs and of deepnvme.engine.

    python packaging/help_texts.py

The docstrings are the only source. Run it after changing one; tests/ops/test_signatures.py fails if the header is out of date.
"""

import ast
import inspect
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "deepnvme"
HEADER = PACKAGE.parent / "csrc" / "bindings" / "help_texts.h"
SOURCES = {
    "engine.py": ("Future", "File"),
    "ops/aio/async_io_op/__init__.pyi": (
        "PinnedBuffer", "Engine", "aio_handle", "backends", "fail_at_exit", "empty_pinned", "is_pinned", "aio_read", "aio_write",
        "deepspeed_memcpy",
    ),
    "ops/gds/gds_op.pyi": ("gds_handle", "adopt_pinned_ranges", "version"),
}  # fmt: skip
"""The classes and functions of each file that the ops define."""


def plain(docstring: str) -> str:
    """Return a docstring as a terminal shall show it: without Sphinx's roles."""
    text = re.sub(r":(?:meth|func):`~?([^`]+)`", r"\1()", inspect.cleandoc(docstring))
    return re.sub(r":\w+:`~?([^`]+)`", r"\1", text).replace("``", "`")


def docstrings() -> dict[str, str]:
    """Return the docstrings by the names of their constants: "aio_handle", "aio_handle_wait"."""
    found: dict[str, str] = {}

    def add(prefix: str, node: ast.stmt) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            if text := ast.get_docstring(node):
                found[prefix + node.name] = plain(text)
            if isinstance(node, ast.ClassDef):
                for each in node.body:
                    add(f"{node.name}_", each)

    for file, names in SOURCES.items():
        for node in ast.parse((PACKAGE / file).read_text()).body:
            if getattr(node, "name", None) in names:
                add("", node)
    return found


def header() -> str:
    """Return the text of the header."""
    constants = (f'inline constexpr const char* {name} = R"help({text})help";' for name, text in docstrings().items())
    return "\n".join([
        "// What help() shows. Made by packaging/help_texts.py from the docstrings of the stubs: change those.",
        "#pragma once",
        "",
        "namespace deepnvme::bindings::help {",
        "",
        *constants,
        "",
        "}  // namespace deepnvme::bindings::help",
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    HEADER.write_text(header())
