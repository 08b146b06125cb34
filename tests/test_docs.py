"""The code in the README and in docs/ runs, the pages' links lead somewhere, and the API reference has every public name.

Each page's blocks are run in order, in a process and a directory of their own: Python in one namespace, bash and console commands
in the same directory. ``/mnt/nvme`` in a block stands for a directory on the drive. All that they need is on the page, so that a
reader can copy it. A block that cannot run here has a comment ``<!-- not run: WHY -->`` above it: its Python is compiled, its
bash is parsed.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

import deepnvme

from .support.interpreters import Interpreters

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "bash", "console", "json", "text"}
"""What a block may be in. Blocks in the last two are not run."""
MOST_NOT_RUN = 15
"""Blocks marked as such today. Find a way to run a new one before raising it."""

BLOCK = re.compile(r"^(?P<fence>```+)(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=fence)[ ]*$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- not run:(?P<why>(?:(?!-->).)*)-->\n\Z", re.DOTALL)
LINK = re.compile(r"(?<!`)\[(?:[^][]|\[[^][]*\])*\]\(([^)\s:]+)\)")

RUN = """
import json, os, subprocess, sys, warnings
os.chdir({directory!r})
torch.set_num_threads(1)  # many threads for models this small do nothing but wait for one another
warnings.simplefilter("ignore")
warnings.simplefilter("error", RuntimeWarning)
namespace = {{"__name__": "__main__"}}
for block in json.loads({blocks!r}):
    if block["language"] == "python":
        exec(compile("\\n" * block["line"] + block["code"], block["page"], "exec"), namespace)
    else:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", block["code"]])
        if done.returncode:
            sys.exit(f"{{block['page']}}:{{block['line']}}: ended with {{done.returncode}}")
"""
"""What runs a page's blocks. The empty lines give tracebacks the page's own line numbers."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    """Lines of the page above the block's first."""
    language: str
    code: str
    why_not: str | None
    """Why it is not run, as the mark says; None if it is run."""


def blocks_of(page: str, markdown: str) -> list[Block]:
    blocks = []
    for found in BLOCK.finditer(markdown):
        mark = MARK.search(markdown, 0, found.start())
        why_not = mark["why"].strip() if mark else None
        code = found["code"]
        if found["language"] == "console":
            code = "\n".join(re.findall(r"^\$ (.*)", code, re.MULTILINE))
        language = {"console": "bash"}.get(found["language"], found["language"])
        blocks.append(Block(page, markdown.count("\n", 0, found.start("code")), language, code, why_not))
    return blocks


def blocks_of_all() -> Iterator[Block]:
    for path in PAGES:
        yield from blocks_of(str(path), path.read_text())


def check(blocks: list[Block]) -> None:
    """Look at blocks without running them."""
    for block in blocks:
        where = f"{block.page}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: say what the block is in: {', '.join(sorted(LANGUAGES))}"
        assert block.why_not is None or len(block.why_not.split()) > 2, f"{where}: say why it is not run"
        if block.language == "json":
            json.loads(block.code)
        elif block.language == "python":
            compile(block.code, where, "exec")
        elif block.language == "bash":
            assert block.code.strip(), f"{where}: nothing to run; commands of a console begin with '$ '"
            parsed = subprocess.run(["bash", "-n", "-c", block.code], capture_output=True, text=True)
            assert parsed.returncode == 0, f"{where}: {parsed.stderr}"


def run(blocks: list[Block], directory: Path, interpreters: Interpreters) -> None:
    """Run a page's blocks in a process of their own, in an empty directory on the drive."""
    (directory / "nvme").mkdir()
    given = json.dumps([asdict(block) for block in blocks if is_run(block)]).replace("/mnt/nvme", str(directory / "nvme"))
    tools = f"{Path(sys.executable).parent}:{ROOT / 'bin'}"
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with mock.patch.dict(os.environ, environment):
        interpreters.run(RUN.format(directory=str(directory), blocks=given)).check()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_on_a_page_can_be_parsed(path: Path) -> None:
    check(blocks_of(str(path), path.read_text()))


def is_run(block: Block) -> bool:
    return block.why_not is None and block.language in ("python", "bash")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if any(map(is_run, blocks_of(str(path), path.read_text())))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_code_on_a_page_runs(path: Path, drive: Path, interpreters: Interpreters) -> None:
    # Recipes take longest: they import Lightning and start two ranks. Tuning has ds_io write and read 1 GiB, as its page says.
    run(blocks_of(str(path), path.read_text()), drive, interpreters)


def test_most_blocks_are_run() -> None:
    blocks = [block for block in blocks_of_all() if block.language in ("python", "bash")]
    not_run = [f"{block.page}:{block.line}: {block.why_not}" for block in blocks if block.why_not is not None]
    assert len(not_run) <= MOST_NOT_RUN, "\n".join(not_run)
    assert len(blocks) - len(not_run) > len(not_run)


def anchors_of(markdown: str) -> set[str]:
    """The anchors of headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_an_example_that_imports_something_imports_all_that_it_uses() -> None:
    """Those of the README and the tour are typed in alone."""
    modules = {"deepnvme", "torch", "transformers", "os", "numpy"}
    looked_at = 0
    for found in BLOCK.finditer((ROOT / "README.md").read_text() + (ROOT / "docs" / "tour.md").read_text()):
        if found["language"] != "python":
            continue
        tree = ast.parse(found["code"])
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        imported = {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & modules
        assert not imports or used <= imported, f"{used - imported} is not imported in:\n{found['code']}"
        looked_at += bool(imports)
    assert looked_at > 1


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in LINK.findall(path.read_text()):
        target, _, anchor = link.partition("#")
        there = path.parent / target if target else path
        assert there.exists(), link
        assert not anchor or anchor in anchors_of(there.read_text()), link


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(path: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a checkout: git lists no files here")
    files = [f"/{file}" for file in listed.stdout.splitlines()]
    for name in re.findall(r"`([\w./-]*\w\.(?:py|cpp|h|md))(?:::\w+)?`", path.read_text()):
        assert any(file.endswith(f"/{name}") for file in files), name


PACKAGES = (
    "deepnvme",
    *(f"deepnvme.{name}" for name in dir(deepnvme) if isinstance(getattr(deepnvme, name), ModuleType)),
    "deepnvme.drives",
    "deepnvme.integrations.accelerate",
    "deepnvme.integrations.deepspeed",
    "deepnvme.integrations.lightning",
    "deepnvme.integrations.metrics",
    "deepnvme.integrations.safetensors",
    "deepnvme.integrations.tensornvme",
    "deepnvme.integrations.torchrec",
    "deepnvme.integrations.transformers",
    "deepnvme.ops.op_builder",
    "deepnvme.swap.zero",
)
NOT_DOCUMENTED = {"__version__", "main", "ALL_OPS"}


@pytest.fixture
def public_names() -> ModuleType:
    """What lists the public names on the site."""
    spec = importlib.util.spec_from_file_location("public_names", ROOT / "docs" / "site" / "public_names.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_list_of_public_names_has_each_with_a_sentence(public_names: ModuleType) -> None:
    rows = re.findall(
        r"^\| \[`([\w.]+)`\]\((\w+\.md)#\1\) \| (\S.*[.:]) \|$", public_names.listed(ROOT / "docs" / "api"), re.MULTILINE
    )
    listed = {name.rpartition(".")[2] for name, _, _ in rows}
    for package in PACKAGES:
        missing = set(importlib.import_module(package).__all__) - listed - NOT_DOCUMENTED
        assert not missing, f"{package}: {', '.join(sorted(missing))}"
    sentences = {name: sentence for name, _, sentence in rows}
    assert sentences["deepnvme.Engine"] == "Transfers tensors to and from files, asynchronously."
    pages = [path for path in (ROOT / "docs" / "api").glob("*.md") if "\n::: " in path.read_text()]
    assert {page for _, page, _ in rows} == {path.name for path in pages}, "docs/api/index.md lacks a row for a page"


@pytest.mark.parametrize("name", ["deepnvme.Enjine", "deepnvme.nowhere.Engine"])
def test_a_name_without_a_docstring_is_refused(public_names: ModuleType, name: str) -> None:
    with pytest.raises(LookupError, match=re.escape(name.removesuffix(".Engine"))):
        public_names.first_sentence(name)
