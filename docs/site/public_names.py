"""A hook of MkDocs: lists all public names below the table of docs/api/index.md, with the first sentence of each docstring.

The names are those of the pages beside it. Docstrings are read from the sources: the environment has neither torch nor this
package."""

from __future__ import annotations

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DIRECTIVE = re.compile(r"^::: (\S+)", re.MULTILINE)
ROLE = re.compile(r"(?::\w+:)?`+([^`]+)`+")


def on_page_markdown(markdown: str, page: Page, **rest: Any) -> str:
    return markdown + listed(ROOT / "docs" / "api") if page.file.src_uri == "api/index.md" else markdown


def listed(folder: Path) -> str:
    """Return a Markdown section with a table for each page that index.md lists.

    Raises:
        LookupError: If a name of a page is not in the sources, or has no docstring.
    """
    sections = ["\n## All public names\n"]
    for title, file in re.findall(r"^\| \[(.*?)\]\((\w+\.md)\)", (folder / "index.md").read_text(), re.MULTILINE):
        names = DIRECTIVE.findall((folder / file).read_text())
        rows = [f"| [`{name}`]({file}#{name}) | {first_sentence(name)} |" for name in names]
        sections += [f"### {title}\n", "| | |", "|---|---|", *rows, ""]
    return "\n".join(sections)


def first_sentence(name: str) -> str:
    """Return the first sentence of a public name's docstring, as Markdown."""
    module, _, attribute = name.rpartition(".")
    docstring = _docstring(module, attribute)
    if not docstring:
        raise LookupError(f"{name}: no docstring found in the sources")
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return ROLE.sub(r"`\1`", re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0]).replace("|", r"\|")


def _docstring(module: str, name: str) -> str | None:
    """Find a name's docstring where it is defined: in the module, or in a module that it is imported from."""
    for node, after in pairwise([*_statements(module), ast.Pass()]):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(after, ast.Expr) and any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return str(ast.literal_eval(after.value))
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name) or alias.name == "*":
                    package = module if _file(module).stem == "__init__" else module.rpartition(".")[0]
                    parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
                    target = ".".join(filter(None, (*parents, node.module)))
                    if target.startswith("deepnvme") and (found := _docstring(target, name if alias.name == "*" else alias.name)):
                        return found
    return None


@cache
def _statements(module: str) -> list[ast.stmt]:
    """Return the statements of a module's top level, and those below ``if TYPE_CHECKING:``."""
    top = ast.parse(_file(module).read_text()).body
    return top + [inner for statement in top if isinstance(statement, ast.If) for inner in statement.body]


def _file(module: str) -> Path:
    """Return the source of a module, or the stub of a compiled one."""
    path = ROOT.joinpath(*module.split("."))
    for candidate in (path / "__init__.py", path.with_suffix(".py"), path / "__init__.pyi", path.with_suffix(".pyi")):
        if candidate.exists():
            return candidate
    raise LookupError(f"{module}: no source found")
