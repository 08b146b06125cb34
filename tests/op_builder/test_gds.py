"""What the gds probes find: the CUDA toolkit, cuFile and torch's CUDA, laid out in directories made for the purpose."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from deepnvme.ops.op_builder import GDSBuilder, cuda

NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n"


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No toolkit, no wheels and no driver but those that a test makes; a GPU."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "commands"))
    monkeypatch.setattr(cuda, "DEFAULT_TOOLKIT", tmp_path / "default")
    monkeypatch.setattr(cuda, "NVIDIA_FS", tmp_path / "nvidia-fs")
    monkeypatch.setattr(cuda, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(cuda, "PCI_DEVICES", tmp_path / "pci")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    for name in ("torch", "nvidia"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


@pytest.fixture
def toolkit(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "default", version: str = "12.4", nvcc: str | None = NVCC, cufile: str | None = None) -> Path:
        home = tmp_path / name
        for part in ("bin", "include", "lib64"):
            (home / part).mkdir(parents=True)
        major, minor = version.split(".")
        (home / "include" / "cuda.h").write_text(f"#define CUDA_VERSION {int(major) * 1000 + int(minor) * 10}\n")
        if nvcc is not None:
            (home / "bin" / "nvcc").write_text(nvcc.format(version=version))
            (home / "bin" / "nvcc").chmod(0o755)
        if cufile is not None:
            (home / "include" / "cufile.h").touch()
            (home / "lib64" / f"libcufile.so.{cufile}").touch()
            (home / "lib64" / "libcufile.so").symlink_to(f"libcufile.so.{cufile}")
        return home

    return make


@pytest.fixture
def torch_for_cuda(tmp_path: Path) -> Callable[[str | None], None]:
    def make(version: str | None) -> None:
        package = tmp_path / "site" / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('torch was imported')\n")
        (package / "version.py").write_text(
            f"from typing import Optional\n__version__ = '2.6.0'\ncuda: Optional[str] = {version!r}\nhip: Optional[str] = None\n"
        )
        importlib.invalidate_caches()

    return make


def test_with_nothing_there_each_part_says_what_was_tried_and_what_to_do(tmp_path: Path) -> None:
    probe = cuda.probe()
    assert probe.toolkit.path is None
    assert str(tmp_path / "default") in probe.toolkit.problem
    assert "CUDA_HOME" in probe.toolkit.problem
    assert "pip install nvidia-cufile" in probe.cufile_header.problem
    assert "libcufile.so was not found (tried " in probe.cufile_library.problem
    assert "modprobe nvidia-fs" in probe.nvidia_fs.problem


def test_cufile_of_the_toolkit_is_found_with_its_version(toolkit: Callable[..., Path]) -> None:
    home = toolkit(cufile="1.9.1")
    probe = cuda.probe()
    assert probe.cufile_header.path == str(home / "include" / "cufile.h")
    assert probe.cufile_library.version == "1.9.1"


@pytest.mark.parametrize(("home", "wheel"), [("cufile", "nvidia_cufile_cu12-1.11.1.6"), ("cu13", "nvidia_cufile-1.15.0.42")])
def test_cufile_of_a_wheel_is_found_with_its_version(tmp_path: Path, home: str, wheel: str) -> None:
    place = tmp_path / "site" / "nvidia" / home
    (place / "include").mkdir(parents=True)
    (place / "lib").mkdir()
    (place / "include" / "cufile.h").touch()
    (place / "lib" / "libcufile.so.0").touch()
    (tmp_path / "site" / f"{wheel}.dist-info").mkdir()
    importlib.invalidate_caches()
    probe = cuda.probe()
    assert probe.cufile_header.path == str(place / "include" / "cufile.h")
    assert probe.cufile_library.path == str(place / "lib" / "libcufile.so.0")
    assert probe.cufile_library.version == wheel.rpartition("-")[2]


def test_with_everything_there_no_problem_is_left(
    toolkit: Callable[..., Path], torch_for_cuda: Callable[[str | None], None], tmp_path: Path
) -> None:
    toolkit(cufile="1.9.1")
    torch_for_cuda("12.4")
    (tmp_path / "nvidia-fs").write_text("version: 2.22.3\n")
    probe = cuda.probe()
    assert probe.lacking() == []
    assert probe.nvidia_fs.version == "2.22.3"


# Loading


def refusal(load: Callable[[], ModuleType]) -> str:
    with pytest.raises(RuntimeError) as caught:
        load()
    return str(caught.value)


def test_without_cuda_in_torch_loading_is_refused_in_one_clear_line(
    toolkit: Callable[..., Path], torch_for_cuda: Callable[[str | None], None], capsys: pytest.CaptureFixture[str]
) -> None:
    toolkit(cufile="1.9.1")
    torch_for_cuda(None)
    builder = GDSBuilder()
    reason = "torch is missing or was built without CUDA, which only gds needs: pip install --force-reinstall torch"
    for load in (builder.load, builder.jit_load):
        assert refusal(load).startswith(f"gds cannot be used: {reason}")
        assert "\n" not in refusal(load)
    assert not builder.is_compatible(verbose=True)
    assert f"gds {reason}" in capsys.readouterr().out
    assert builder.error_log is not None
    assert reason in builder.error_log


def test_without_a_gpu_that_is_the_reason_and_nothing_is_advised(tmp_path: Path) -> None:
    (tmp_path / "dev" / "nvidia0").unlink()
    assert GDSBuilder().lacking() == ["this machine has no NVIDIA GPU, which only gds needs"]
    assert refusal(GDSBuilder().load) == "gds cannot be used: this machine has no NVIDIA GPU, which only gds needs"


@pytest.mark.parametrize(
    ("vendor", "kind", "seen"), [("0x10de", "0x030200", True), ("0x10de", "0x020000", False), ("0x1002", "0x030000", False)]
)
def test_a_gpu_without_its_driver_is_seen(tmp_path: Path, vendor: str, kind: str, seen: bool) -> None:
    (tmp_path / "dev" / "nvidia0").unlink()
    device = tmp_path / "pci" / "0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    assert cuda.probe().gpu == seen


def test_without_cufile_loading_is_refused_with_where_it_was_looked_for_and_the_remedy(
    toolkit: Callable[..., Path], torch_for_cuda: Callable[[str | None], None]
) -> None:
    home = toolkit()
    torch_for_cuda("12.4")
    text = refusal(GDSBuilder().load)
    assert text.startswith("gds cannot be used: libcufile.so was not found (tried ")
    assert str(home / "lib64") in text
    assert text.endswith(": pip install nvidia-cufile-cu12")
