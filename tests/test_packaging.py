"""What is shipped: wheels, sdists, editable installs and ops compiled ahead of time.

A copy of the repository is built by calling its build backend as pip does; the engine in it is replaced by a few lines of
C++ where something is compiled, because it is not the engine that is tested.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import nanobind
import pytest

from .op_builder.conftest import REPOSITORY, STANDIN
from .support.patience import PATIENCE

pytestmark = pytest.mark.slow

ENGINE = '#include "value.h"\n' + STANDIN

# Prints where the builder and the op come from, and what the op's value is. Without importing the rest of the package.
LOAD = """
import sys, types
package = types.ModuleType("deepnvme"); package.__path__ = [sys.argv[1]]; sys.modules["deepnvme"] = package
from deepnvme.ops.op_builder import AsyncIOBuilder
import deepnvme.ops.op_builder
op = AsyncIOBuilder().load()
print(deepnvme.ops.op_builder.__file__, op.__file__, op.value, sep="\\n")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the repository holds."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=REPOSITORY, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("needs a git checkout, to know what belongs to it")
    copy = tmp_path / "checkout"
    for name in listed.stdout.splitlines():
        if (REPOSITORY / name).is_file() or (REPOSITORY / name).is_symlink():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture
def small_engine(checkout: Path) -> Path:
    """A checkout whose engine is a constant."""
    shutil.rmtree(checkout / "csrc")
    (checkout / "csrc" / "bindings").mkdir(parents=True)
    for name in ("async_io.cpp", "gds.cpp"):
        (checkout / "csrc" / "bindings" / name).write_text(ENGINE)
    (checkout / "csrc" / "value.h").write_text("#define STANDIN_VALUE 1\n")
    return checkout


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name in ("DS_BUILD_OPS", "DS_BUILD_AIO", "DS_BUILD_GDS", "DS_BUILD_UTILS"):
        monkeypatch.delenv(name, raising=False)


def build(kind: str, source: Path, destination: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call the hook that pip calls: build_wheel, build_sdist or build_editable."""
    destination.mkdir(exist_ok=True)
    program = f"from setuptools.build_meta import build_{kind} as build; print('made', build({str(destination)!r}))"
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=source,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def built(kind: str, source: Path, destination: Path, **environment: str) -> Path:
    done = build(kind, source, destination, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return destination / re.findall(r"^made (.*)$", done.stdout, re.MULTILINE)[-1]


def unpack(wheel: Path, destination: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(destination)
    return destination


def load(installed: Path, package: Path | None = None, program: str = LOAD) -> subprocess.CompletedProcess[str]:
    """Load async_io from an installation, in another process that stands elsewhere and knows no other installation.

    ``program``: what it runs instead, with the package's directory as its argument."""
    libraries = str(Path(nanobind.__file__).parents[1])
    program = f"import site, sys; sys.path.append({libraries!r}); site.addsitedir({str(installed)!r})\n{program}"
    return subprocess.run(
        [sys.executable, "-S", "-W", "always", "-c", program, str(package or installed / "deepnvme")],
        cwd=installed,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


# Refusals


def test_a_wish_that_is_not_understood_fails_the_install(small_engine: Path, tmp_path: Path) -> None:
    done = build("wheel", small_engine, tmp_path / "wheels", DS_BUILD_GDS="2")
    assert done.returncode != 0
    assert "DS_BUILD_GDS must be 0 or 1, got '2'" in done.stdout + done.stderr


@pytest.mark.parametrize(("variable", "name"), [("DS_BUILD_AIO", "async_io"), ("DS_BUILD_GDS", "gds")])
def test_asking_for_an_op_without_a_compiler_fails_the_install_with_the_reason(
    small_engine: Path, tmp_path: Path, variable: str, name: str
) -> None:
    done = build("wheel", small_engine, tmp_path / "wheels", CXX="no-such-compiler", **{variable: "1"})
    assert done.returncode != 0
    assert f"{variable}=1, but {name} cannot be built" in done.stdout + done.stderr


SETUP = REPOSITORY / ".ci" / "install_system_packages"


@pytest.fixture
def bare_machine(tmp_path: Path) -> Path:
    """A directory to be all of PATH: an ordinary user's machine with apt and without a compiler."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, body in (("apt-get", "exit 1"), ("sudo", "exit 1"), ("id", "echo 1000")):
        (commands / name).write_text(f"#!/bin/sh\n{body}\n")
        (commands / name).chmod(0o755)
    return commands


def prepare(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "CXX"}
    bash = shutil.which("bash")
    assert bash is not None
    variables = {**kept, "PYTHON": sys.executable, **environment}
    return subprocess.run([bash, str(SETUP), *arguments], env=variables, capture_output=True, text=True, timeout=PATIENCE)


def test_setting_up_stops_at_once_where_no_compiler_can_be_had_and_says_what_to_type(bare_machine: Path) -> None:
    done = prepare(PATH=str(bare_machine))
    assert done.returncode == 1
    assert re.search(r"^    sudo apt-get install .*\bg\+\+", done.stderr, re.MULTILINE)
    assert "Nothing can be set up without: compiler" in done.stderr


@pytest.mark.parametrize("wanted", [(), ("for-tests",)], ids=["to use it", "for tests"])
def test_no_library_is_needed_but_for_tests_and_they_can_do_without(bare_machine: Path, wanted: tuple[str, ...]) -> None:
    (bare_machine / "c++").write_text("#!/bin/sh\nexit 1\n")
    (bare_machine / "c++").chmod(0o755)
    done = prepare(*wanted, PATH=str(bare_machine))
    assert ("libaio-dev libfuse3-dev" in done.stderr) == bool(wanted)  # libaio is for DeepSpeed's own op
    assert "liburing" not in done.stderr
    assert ("Nothing can be set up" in done.stderr) == bool(done.returncode)
    assert "compiler" not in done.stderr


@pytest.mark.parametrize("told", [False, True], ids=["allowed", "NO_APT=1"])
def test_system_packages_are_named_before_they_are_installed_and_left_alone_if_told_so(bare_machine: Path, told: bool) -> None:
    log = bare_machine / "log"
    (bare_machine / "id").write_text("#!/bin/sh\necho 0\n")
    (bare_machine / "apt-get").write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    (bare_machine / "env").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    (bare_machine / "env").chmod(0o755)
    done = prepare(PATH=str(bare_machine), **({"NO_APT": "1"} if told else {"NO_APT": ""}))
    assert "Nothing can be set up without: compiler" in done.stderr  # what is installed here does nothing
    if told:
        assert not log.exists()
        assert "Installing" not in done.stdout
        assert re.search(r"^    sudo apt-get install .*\bg\+\+", done.stderr, re.MULTILINE)
    else:
        first = done.stdout.splitlines()[0]
        assert re.fullmatch(r"Installing system packages: .*g\+\+.* \(NO_APT=1 prints the command instead\)", first)
        assert log.read_text().startswith("update -qq\ninstall ")


@pytest.mark.parametrize("torch", ["there", "missing"])
def test_the_makefile_says_what_it_installs_before_it_does(tmp_path: Path, torch: str) -> None:
    """A Python that says whether it has torch, and makes no environment, ends it there."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && [ "$2" = "import torch" ] && exit {0 if torch == "there" else 1}\nexit 1\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "--no-print-directory", "demo", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}", "NO_APT=1"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    said = done.stdout.splitlines()
    assert said[0] == f"Installing by pip, in {tmp_path / 'venv'}: this package, and what it depends on"
    assert ("torch==" in done.stdout) == (torch == "missing")


# Contents


def test_the_wheel_and_the_sdist_hold_the_package_the_builder_and_the_engines_sources(checkout: Path, tmp_path: Path) -> None:
    files = [path.relative_to(checkout) for path in checkout.rglob("*") if not path.is_symlink()]  # setup.py makes the links
    wheel = built("wheel", checkout, tmp_path / "wheels")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = contents(wheel)
    shipped = {name for name in names if name.startswith("deepnvme/")}
    sources = {path.relative_to(checkout).as_posix() for kind in ("*.cpp", "*.h") for path in (checkout / "csrc").rglob(kind)}
    assert {f"deepnvme/ops/{source}" for source in sources} <= shipped
    assert {f"deepnvme/ops/op_builder/{path.name}" for path in (checkout / "op_builder").glob("*.py")} <= shipped
    stubs = {f"deepnvme/ops/{name}.pyi" for name in ("aio/async_io_op/__init__", "aio/async_io_op/checkpoint", "gds/gds_op")}
    page = {f"deepnvme/tools/tune/{name}" for name in ("ds_io.txt", "ds_nvme_tune.html", "ds_nvme_tune.txt")}
    assert {"deepnvme/py.typed", "deepnvme/tools/report/ds_report.py", *page, *stubs} <= shipped
    assert all(name.startswith("deepnvme") for name in names)
    assert any(name.endswith(".data/scripts/ds_report") for name in names)
    # The sdist builds the same wheel.
    with tarfile.open(built("sdist", checkout, tmp_path / "sdists")) as archive:
        archive.extractall(tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert [str(path) for path in files if not (unpacked / path).exists()] == []
    assert contents(built("wheel", unpacked, tmp_path / "again")) == names


# Installations


def test_an_installed_wheel_compiles_the_op_at_first_use(small_engine: Path, tmp_path: Path) -> None:
    installed = unpack(built("wheel", small_engine, tmp_path / "wheels"), tmp_path / "installed")
    done = load(installed)
    assert done.returncode == 0, done.stderr
    builder, op, value = done.stdout.splitlines()
    assert builder == str(installed / "deepnvme" / "ops" / "op_builder" / "__init__.py")
    assert op.startswith(str(tmp_path / "extensions"))
    assert value == "1"


def test_an_op_compiled_ahead_of_time_is_loaded_without_a_compiler(
    small_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = built("wheel", small_engine, tmp_path / "wheels", DS_BUILD_OPS="1", CFLAGS="-DFROM_CFLAGS=1")
    assert "none-any" not in wheel.name
    installed = unpack(wheel, tmp_path / "installed")
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = load(installed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith(str(installed / "deepnvme" / "ops" / "aio" / "async_io_op"))
    assert "Warning" not in done.stderr


def test_a_prebuilt_op_that_does_not_match_is_compiled_again_saying_why(small_engine: Path, tmp_path: Path) -> None:
    installed = unpack(built("wheel", small_engine, tmp_path / "wheels", DS_BUILD_AIO="1"), tmp_path / "installed")

    def compiled_again(value: str, reason: str) -> None:
        done = load(installed)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[2] == value
        assert "the prebuilt async_io op is not used" in done.stderr
        assert reason in done.stderr

    (library,) = (installed / "deepnvme" / "ops" / "aio").glob("*.so")
    whole = library.read_bytes()
    library.write_bytes(re.sub(rb"^.{4}", b"JUNK", whole, flags=re.DOTALL))  # the sources' digest is still in it
    compiled_again("1", "invalid ELF header")
    library.write_bytes(whole)
    (installed / "deepnvme" / "ops" / "csrc" / "value.h").write_text("#define STANDIN_VALUE 2\n")
    compiled_again("2", "was compiled from other sources")
