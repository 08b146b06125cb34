"""A hook of MkDocs: puts Markdown files from outside docs/, such as the README, and the executed tutorials on the site.

Links between files become links between pages."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import join, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarking.md",
    "tests/README.md": "tests.md",
}
"""Files outside docs/ -> their pages."""
SOURCES = {page: source for source, page in PAGES.items()}
EXECUTED = Path("build", "tutorials")
"""Where `make docs` puts the tutorials with their outputs."""
LINK = re.compile(r"\[((?:[^][]|\[[^][]*\])*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        path = Path(config.config_file_path).parent / source
        if path.exists():
            files.append(File.generated(config, page, content=path.read_text()))
    for notebook in [file for file in files if file.src_uri.startswith("tutorials/") and file.src_uri.endswith(".ipynb")]:
        executed = Path(config.config_file_path).parent / EXECUTED / PurePosixPath(notebook.src_uri).name
        if not executed.exists():
            raise PluginError(f"'{executed}' is not there: `make docs` executes the tutorials first")
        markdown, found = MarkdownExporter().from_filename(str(executed))
        files.append(File.generated(config, _page_of(notebook.src_uri), content=markdown))
        for name, content in found["outputs"].items():  # pictures
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def _page_of(notebook: str) -> str:
    """Return the page of a notebook: beside it, so that links between tutorials and others are the same."""
    return str(PurePosixPath(notebook).with_suffix(".md"))


def on_page_markdown(markdown: str, page: Page, **rest: Any) -> str:
    """Have relative links, which lead to files of the repository, lead to pages. One to a file without a page becomes text."""
    here = page.file.src_uri
    folder = str(PurePosixPath(SOURCES.get(here, join("docs", here))).parent)

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = normpath(join(folder, target))
        there = path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path)
        if there is not None and there.endswith(".ipynb"):
            there = _page_of(there)
        if there is None:
            return text
        return f"[{text}]({relpath(there, str(PurePosixPath(here).parent))}{anchor})"

    return LINK.sub(link, markdown)
