"""A griffe extension: docstrings' ``code`` and :meth:`roles`, which Python's own tools read, as Markdown and cross-references."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:mod|class|meth|func|attr|data|exc):`([^`]+)`")
LITERAL = re.compile(r"``([^`]+)``")
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1(?:>>>|\.\.\.).*)*", re.MULTILINE)


class SphinxRoles(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return

        def reference(match: re.Match[str]) -> str:
            name = match[1]
            return f'<autoref identifier="{_path(obj, name)}" optional><code>{name}</code></autoref>'

        text = LITERAL.sub(r"`\1`", ROLE.sub(reference, obj.docstring.value))
        obj.docstring.value = EXAMPLE.sub(_fenced, text)


def _fenced(example: re.Match[str]) -> str:
    indent = example[1]
    return f"{indent}```pycon\n{example[0]}\n{indent}```"


def _path(obj: griffe.Object, name: str) -> str:
    """The full path of what a docstring calls ``name``: of its class, of its module, or of another."""
    if name.startswith("deepnvme."):
        return name
    first, _, rest = name.partition(".")
    scope: griffe.Object | None = obj
    while scope is not None:
        if first in scope.members:
            return ".".join(filter(None, (scope.path, first, rest)))
        scope = scope.parent if not scope.is_module else None
    return name
