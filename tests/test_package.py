"""What ``import deepnvme`` costs, and what it shows."""

from __future__ import annotations

import subprocess
import sys

import pytest

import deepnvme
import deepnvme.checkpoint
import deepnvme.integrations.deepspeed
import deepnvme.streaming


def run(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


@pytest.mark.parametrize("heavy", ["torch", "pydantic", "rich", "numpy"])
def test_importing_the_package_imports_nothing_that_takes_long(heavy: str) -> None:
    assert run(f"import sys, deepnvme; print({heavy!r} in sys.modules)") == "False"


def test_importing_the_package_is_quick() -> None:
    measure = "import time; began = time.process_time(); import deepnvme; print(time.process_time() - began)"
    assert min(float(run(measure)) for _ in range(5)) < 0.1  # seconds of the processor; about 0.02


@pytest.mark.parametrize(
    "package", [deepnvme, deepnvme.checkpoint, deepnvme.streaming, deepnvme.integrations.deepspeed], ids=lambda it: it.__name__
)
def test_dir_shows_the_public_names_and_all_of_them_are_there(package: object) -> None:
    shown = dir(package)
    assert set(package.__all__) <= set(shown)  # type: ignore[attr-defined]
    assert [name for name in shown if not hasattr(package, name)] == []


def test_dir_shows_the_public_names_before_anything_was_imported() -> None:
    shown = run("import deepnvme; print(*dir(deepnvme))").split()
    assert {"AioConfig", "Engine", "OffloadedOptimizer", "checkpoint", "load", "save", "streaming"} <= set(shown)
    assert not {"TYPE_CHECKING", "annotations"} & set(shown)
