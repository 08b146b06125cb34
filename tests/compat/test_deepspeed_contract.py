"""DeepSpeed's own sources against ours: every method, its arguments in their order, and their defaults.

The sources are read, not compiled: DeepSpeed's op takes minutes to build, and says no more.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from deepnvme import AioConfig

from ..support.interpreters import REPOSITORY

pytestmark = pytest.mark.slow

# DeepSpeed's spelling, which nobody passes by name
MISSPELT = {"example_tenosr": "example_tensor"}


@pytest.fixture(scope="module")
def deepspeed(request: pytest.FixtureRequest) -> Path:
    """Where DeepSpeed is installed: here, or for the interpreter given as --deepspeed-python."""
    python = request.config.getoption("--deepspeed-python")
    if python:
        program = "import importlib.util; print(importlib.util.find_spec('deepspeed').origin)"
        origin = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()
    else:
        spec = importlib.util.find_spec("deepspeed")
        if spec is None or spec.origin is None:
            pytest.skip("needs DeepSpeed: pip install deepspeed, or --deepspeed-python PATH")
        origin = spec.origin
    return Path(origin).parent


Arguments = list[tuple[str, str | None]]


@pytest.fixture(scope="module")
def theirs(deepspeed: Path) -> dict[str, list[Arguments]]:
    """Of each method of DeepSpeed's handle, the overloads: (name, default) of each argument."""
    source = deepspeed / "ops" / "csrc" / "aio" / "py_lib" / "py_ds_aio.cpp"
    text = source.read_text().partition('py::class_<deepspeed_aio_handle_t>(m, "aio_handle")')[2]
    found: dict[str, list[Arguments]] = {}
    for part in re.split(r"\n\s*\.def\(", text)[1:]:
        name = re.match(r'\s*"(\w+)"', part)
        arguments = re.findall(r'"(\w+)"_a(?: = ([^,)]+))?', part)
        found.setdefault(name[1] if name else "__init__", []).append(
            [(MISSPELT.get(argument, argument), _plain(default) if default else None) for argument, default in arguments]
        )
    return found


def _plain(default: str) -> str:
    """C++ as Python prints it."""
    default = default.strip()
    if default in ("true", "false"):
        return default.capitalize()
    return str(eval(default, {"__builtins__": {}}))


def ours(method: object) -> list[Arguments]:
    """The overloads of one of our methods, from what nanobind writes of it."""
    text = method.__doc__ or ""
    overloads = []
    for signature in re.findall(r"^(?:\d+\. )?\w+\((.*)\) -> ", text, re.MULTILINE):
        if signature in ("*args, **kwargs",):
            continue
        positional = signature.partition(", *,")[0]
        arguments = re.split(r", (?=\w+:)", positional)[1:]  # without self
        parts = re.findall(r"^(\w+):.*?(?: = (.+))?$", "\n".join(arguments), re.MULTILINE)
        overloads.append([(name, default or None) for name, default in parts])
    return overloads


def test_every_method_takes_the_same_arguments_in_the_same_order(theirs: dict[str, list[Arguments]], op: ModuleType) -> None:
    assert len(theirs) > 15, "DeepSpeed's source has changed: this test no longer finds its methods"
    differences = {
        name: (wanted, ours(getattr(op.aio_handle, name, None)))
        for name, overloads in theirs.items()
        for wanted in overloads
        if wanted not in ours(getattr(op.aio_handle, name, None))
    }
    assert not differences


def test_every_function_of_theirs_is_ours(deepspeed: Path, op: ModuleType) -> None:
    text = (deepspeed / "ops" / "csrc" / "aio" / "py_lib" / "py_ds_aio.cpp").read_text()
    names = re.findall(r'm\.def\("(\w+)"', text)
    assert names
    assert [name for name in names if not hasattr(op, name)] == []


def test_the_defaults_of_the_aio_block_are_theirs(deepspeed: Path) -> None:
    text = (deepspeed / "runtime" / "swap_tensor" / "constants.py").read_text()
    names: dict[str, object] = {}
    exec(text.partition("AIO = ")[1] + text.partition("AIO = ")[2], names)
    defaults = {names[name]: names[f"{name}_DEFAULT"] for name in names if f"{name}_DEFAULT" in names}
    assert AioConfig().model_dump(exclude={"backend"}) == defaults  # ours alone


def test_every_name_of_the_surface_is_on_the_page(deepspeed: Path) -> None:
    def found(pattern: str, *places: str) -> set[str]:
        files = [file for place in places for file in deepspeed.glob(place)]
        assert files, places
        return {name for file in files for name in re.findall(pattern, file.read_text(), re.MULTILINE)}

    ops, builders, swapping = "ops/csrc", "ops/op_builder", "runtime/swap_tensor"
    names = found(r'def\(\s*"(\w+)"', f"{ops}/aio/py_lib/py_*.cpp", f"{ops}/gds/py_lib/py_*.cpp", f"{ops}/pin_memory/*.cpp")
    names |= found(r"^class ([A-Z]\w+)\(", f"{swapping}/*.py", "io/*.py", "runtime/checkpoint_engine/[tfd]*_engine.py")
    names |= found(r"^    (\w+): .* = ", "runtime/zero/offload_config.py")
    names |= found(r'^AIO_(?:\w+) = "(\w+)"', f"{swapping}/constants.py")
    names |= found(r'^CHECKPOINT_(?:W|IO|DATA)\w+ = "(\w+)"', "runtime/model_checkpointing/constants.py")
    names |= found(r'^    BUILD_VAR = "(\w+)"', *(f"{builders}/{name}.py" for name in ("async_io", "gds", "pin_memory")))
    names |= found(r'environ.get\("(\w+)"', "utils/pin_memory.py")
    assert len(names) > 60
    page = (REPOSITORY / "docs" / "deepspeed-names.md").read_text()
    listed = {name for row in page.splitlines() if row.startswith("| ") for name in re.findall(r"`(\w+)`", row)}
    assert names - listed == set()
