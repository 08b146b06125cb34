"""What a release consists of says the same everywhere."""

from __future__ import annotations

import re
import runpy

from deepnvme.version import __version__

from .op_builder.conftest import REPOSITORY


def test_the_citation_has_the_version() -> None:
    assert re.search(r"^version: (\S+)$", (REPOSITORY / "CITATION.cff").read_text(), re.MULTILINE)[1] == __version__  # type: ignore[index]


def test_the_changelog_begins_with_the_version() -> None:
    assert re.search(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == __version__  # type: ignore[index]


def test_the_pythons_that_have_wheels_are_those_of_the_classifiers() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (REPOSITORY / "pyproject.toml").read_text())
    assert named == runpy.run_path(str(REPOSITORY / "packaging" / "build_wheels.py"))["VERSIONS"]
