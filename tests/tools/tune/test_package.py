"""What ``import deepnvme.tune`` gives, and costs."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_it_can_be_imported_without_what_takes_long() -> None:
    code = "import sys, deepnvme.tune; sys.exit(bool({'torch', 'matplotlib', 'rich'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("tool", ["io", "sweep"])
def test_its_tools_run_as_modules_without_a_warning(tool: str) -> None:
    command = [sys.executable, "-W", "error", "-m", f"deepnvme.tune.{tool}", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
