"""What ``import deepnvme.tune`` gives, and costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import deepnvme.tune


def test_its_public_names_are_there() -> None:
    assert all(hasattr(deepnvme.tune, name) for name in deepnvme.tune.__all__)


@pytest.mark.parametrize("heavy", ["torch", "matplotlib", "rich"])
def test_it_can_be_imported_without_what_takes_long(heavy: str) -> None:
    code = f"import sys, deepnvme.tune; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("tool", ["io", "sweep"])
def test_its_tools_run_as_modules_without_a_warning(tool: str) -> None:
    command = [sys.executable, "-W", "error", "-m", f"deepnvme.tune.{tool}", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
