"""What ``import deepnvme`` costs, and what it and its packages show: to people, and to type checkers."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pydoc
import rlcompleter
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import deepnvme

ROOT = Path(deepnvme.__file__).parents[1]
_PUBLIC = (
    "checkpoint", "data", "integrations", "integrations.deepspeed", "kvstore", "memory", "offload", "ops", "store", "streaming",
    "swap", "tables",
)  # fmt: skip
PACKAGES = ["deepnvme", *(f"deepnvme.{name}" for name in _PUBLIC)]
"""Packages that have public names, and modules besides that are not public."""
SUBMODULES = {
    "deepnvme": {
        "checkpoint", "data", "integrations", "io", "kvstore", "memory", "nn", "offload", "ops", "profiles", "quantization",
        "report", "safetensors", "streaming", "swap", "tables", "tune",
    },
    "deepnvme.integrations": {
        "accelerate", "deepspeed", "lightning", "lmcache", "metrics", "sglang", "tensornvme", "torchrec", "torchrl",
        "transformers", "transformers_checkpoints", "transformers_training", "vllm",
    },
    "deepnvme.ops": {"aio", "gds", "op_builder"},
    "deepnvme.swap": {"zero"},
}  # fmt: skip
"""Those that are public, and attributes of their package without an import of their own."""


def run(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


@pytest.mark.parametrize("heavy", ["torch", "pydantic", "rich", "numpy"])
def test_importing_the_package_imports_nothing_that_takes_long(heavy: str) -> None:
    assert run(f"import sys, deepnvme; print({heavy!r} in sys.modules)") == "False"


def test_importing_the_package_is_quick() -> None:
    measure = "import time; began = time.process_time(); import deepnvme; print(time.process_time() - began)"
    assert min(float(run(measure)) for _ in range(5)) < 0.1  # seconds of the processor; about 0.02


@pytest.mark.parametrize("name", PACKAGES)
def test_dir_shows_the_public_names_of_a_package_and_only_these(name: str) -> None:
    package = importlib.import_module(name)
    assert dir(package) == sorted({*package.__all__, *SUBMODULES.get(name, ())})
    # The other integrations need their projects.
    there = dir(package) if name != "deepnvme.integrations" else ["deepspeed", "metrics", "tensornvme"]
    assert [each for each in there if not hasattr(package, each)] == []


def test_dir_shows_the_same_before_anything_was_imported_as_afterwards() -> None:
    shown = "import deepnvme; print(*dir(deepnvme))"
    assert run(shown) == run(f"import deepnvme; deepnvme.save, deepnvme.tune, deepnvme.integrations; {shown}")


def completions(text: str) -> list[str]:
    """What TAB shows in Python's own interpreter."""
    complete = rlcompleter.Completer({"deepnvme": deepnvme})
    matches: list[str] = []
    while (found := complete.complete(text, len(matches))) is not None:
        matches.append(found)
    return matches


def test_an_integration_whose_project_is_missing_is_an_attribute_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.delitem(sys.modules, "deepnvme.integrations.sglang", raising=False)
    monkeypatch.delattr(deepnvme.integrations, "sglang", raising=False)
    assert not hasattr(deepnvme.integrations, "sglang")
    assert "deepnvme.integrations.metrics" in completions("deepnvme.integrations.")
    assert "metrics" in dict(inspect.getmembers(deepnvme.integrations))
    assert "metrics" in pydoc.render_doc(deepnvme.integrations)
    with pytest.raises(AttributeError, match="pip install sglang"):
        deepnvme.integrations.sglang  # noqa: B018
    with pytest.raises(ImportError, match="pip install sglang"):
        from deepnvme.integrations import sglang  # noqa: F401


def test_tab_completion_shows_no_private_name() -> None:
    matches = completions("deepnvme.")
    assert [name for name in matches if name.startswith("deepnvme._")] == []
    assert "deepnvme.Engine(" in matches


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint.verify",
        "integrations.deepspeed.enable",
        "integrations.metrics.PREFIX",
        "swap.zero.OptimizerSwapper",
        "tune.tune",
    ],
)
def test_a_public_submodule_needs_no_import_of_its_own(name: str) -> None:
    assert run(f"import deepnvme; deepnvme.{name}; print('there')") == "there"


def test_a_name_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'deepnvme' has no attribute 'Enginee'"):
        deepnvme.Enginee  # type: ignore[attr-defined]  # noqa: B018


PROGRAM = """
import deepnvme

deepnvme.Engine().close()
deepnvme.save([], "file.pt", progress=False)
deepnvme.integrations.deepspeed.enable()
deepnvme.integrations.metrics.PREFIX
deepnvme.swap.zero.PipelinedOptimizerSwapper
deepnvme.checkpoint.NVMeWriter
deepnvme.streaming.WeightStore.build("model.pt", "/mnt/nvme/store")
deepnvme.tables.RowOptimizer
deepnvme.nn.EmbeddingOnDisk
deepnvme.tune.measure
deepnvme.ops.load_async_io()
"""
MISSPELT = [
    "deepnvme.Enginee",
    "deepnvme.checkpointt",
    "deepnvme.checkpoint.NVMeWriterr",
    "deepnvme.integrations.deepspeedd",
    "deepnvme.integrations.deepspeed.enabled",
    "deepnvme.nn.EmbeddingOnDiskk",
    "deepnvme.streaming.WeightStoree",
    "deepnvme.swap.zero.PipelinedOptimizerSwapperr",
    "deepnvme.tables.RowOptimizerr",
    "deepnvme.tune.measuree",
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """A user's file, and the name that is misspelt in each of its lines that has one."""
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(PROGRAM + "".join(f"{name}\n" for name in MISSPELT))
    first = PROGRAM.count("\n") + 1
    return path, {first + index: name for index, name in enumerate(MISSPELT)}


@pytest.mark.slow
def test_misspelt_names_are_errors_to_mypy_and_others_are_none(program: tuple[Path, dict[int, str]]) -> None:
    """With the settings and the cache of ``make lint``, which has looked at torch: that takes half a minute."""
    path, misspelt = program
    settings = [f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={ROOT / '.mypy_cache'}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, path.name],
        cwd=path.parent, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    lines = [int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error: " in line]
    assert lines == sorted(misspelt), done.stdout + done.stderr


@pytest.mark.slow
def test_misspelt_names_are_errors_to_pyright_and_others_are_none(program: tuple[Path, dict[int, str]]) -> None:
    pyright = next((found for name in ("pyright", "basedpyright") if (found := shutil.which(name))), None)
    if pyright is None:
        pytest.skip("needs pyright, which needs node")
    path, misspelt = program
    (path.parent / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT}"], "typeCheckingMode": "basic"}}')
    done = subprocess.run([pyright, "--pythonpath", sys.executable, path.name], cwd=path.parent, capture_output=True, text=True)
    lines = [int(line.split(":")[1]) for line in done.stdout.splitlines() if " error: " in line]
    assert lines == sorted(misspelt), done.stdout + done.stderr
