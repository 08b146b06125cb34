"""What GPU-direct storage would find here: the CUDA toolkit, cuFile and torch's CUDA version. Files are looked for and
read; no CUDA library is loaded, and torch is not imported."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import packages

DEFAULT_TOOLKIT = Path("/usr/local/cuda")
NVIDIA_FS = Path("/proc/driver/nvidia-fs/version")
DEVICES = Path("/dev")
PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
"""What PCI devices have as their vendor, and as the beginning of their class."""


@dataclass(frozen=True)
class Found:
    """A part of the CUDA software on this machine: its path and version (None if unknown), and what is wrong with it.

    The latter includes a remedy, and is empty if nothing is wrong.
    """

    path: str | None = None
    version: str | None = None
    problem: str = ""


@dataclass(frozen=True)
class Torch:
    """The torch that an import would load. A version is None if torch was built without that software."""

    path: str
    version: str
    cuda: str | None
    hip: str | None


@dataclass(frozen=True)
class GdsProbe:
    """Everything GPU-direct storage needs that can be seen without a GPU."""

    toolkit: Found
    nvcc: Found
    cufile_header: Found
    cufile_library: Found
    nvidia_fs: Found
    torch_cuda: str | None
    gpu: bool = True
    """Whether there is an NVIDIA GPU, with its driver or without."""

    def lacking(self) -> list[str]:
        """Return the reasons why the gds op would not work; none if it would. Without a GPU, that is the only reason."""
        reasons = [reason for reason in (self.without_cuda(), self.cufile_library.problem) if reason]
        return reasons if self.gpu else reasons[:1] and [self.without_gpu()]

    def without_gpu(self) -> str:
        """Return the message that there is no GPU; empty if there is one."""
        return "" if self.gpu else "this machine has no NVIDIA GPU, which only gds needs"

    def without_cuda(self) -> str:
        """Return the message that torch cannot use CUDA, and how to get a torch that can; empty if it can."""
        if self.torch_cuda or not self.gpu:
            return "" if self.torch_cuda else self.without_gpu()
        remedy = "pip install --force-reinstall torch, from an index with CUDA builds"
        return f"torch is missing or was built without CUDA, which only gds needs: {remedy}"


def probe() -> GdsProbe:
    """Look for all that GPU-direct storage needs. Never raises. Takes about 0.02 s, most of it nvcc's."""
    toolkit, nvcc = _toolkit()
    torch = installed_torch()
    torch_cuda = torch.cuda if torch else None
    header, library = _cufile_header(toolkit), _cufile_library(toolkit)
    return GdsProbe(toolkit, nvcc, header, library, _nvidia_fs(), torch_cuda, _has_gpu())


def _has_gpu() -> bool:
    """Return whether there is an NVIDIA GPU, as far as can be seen: a container may have its device, and no PCI devices."""
    if any(DEVICES.glob("nvidia[0-9]*")) or (DEVICES / "dxg").exists():  # the latter in WSL
        return True
    for vendor in PCI_DEVICES.glob("*/vendor"):
        with contextlib.suppress(OSError):
            if vendor.read_text().strip() == _NVIDIA and (vendor.parent / "class").read_text().startswith(_DISPLAY):
                return True
    return False


def installed_torch() -> Torch | None:
    """Return the installed torch, or None. It is read from torch's ``version.py``, because importing torch takes seconds."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        directory = Path(spec.origin).parent
        text = (directory / "version.py").read_text()
    except (ImportError, OSError, ValueError):
        return None

    def value(name: str) -> str | None:
        found = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE)
        return found[1] if found else None

    return Torch(str(directory), value("__version__") or "unknown", value("cuda"), value("hip"))


def _toolkit() -> tuple[Found, Found]:
    """Return the CUDA toolkit and its nvcc."""
    on_path = shutil.which("nvcc")
    named = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = named + ([Path(on_path).resolve().parent.parent] if on_path else []) + [DEFAULT_TOOLKIT]
    with_nvcc = [place for place in places if (place / "bin" / "nvcc").exists()]
    # An nvcc on PATH may be a script that stands elsewhere than its toolkit; a directory with the headers is the toolkit.
    home = next((place for place in places if (place in named and place in with_nvcc) or _header_version(place)), None)
    home = home or next(iter(with_nvcc), None)
    if home is None:
        tried = ", ".join(dict.fromkeys(str(place) for place in places))
        problem = f"no CUDA toolkit (tried CUDA_HOME, CUDA_PATH, nvcc on PATH, {tried}), only gds needs it: set CUDA_HOME"
        return Found(problem=problem), Found(problem=problem)
    nvcc = home / "bin" / "nvcc"
    release, problem = None, ""
    try:
        said = subprocess.run([nvcc, "-V"], capture_output=True, text=True, timeout=20, errors="replace").stdout
        match = re.search(r"release (\d+\.\d+)", said)
        release = match[1] if match else None
        problem = "" if match else f"{nvcc} -V printed no release: reinstall the CUDA toolkit"
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"{nvcc} could not be run ({error}): install the CUDA toolkit's nvcc, or set CUDA_HOME"
    return Found(str(home), release or _header_version(home)), Found(str(nvcc), release, problem)


def _header_version(home: Path) -> str | None:
    """Return the version that ``cuda.h`` of a toolkit states; None if it has none."""
    try:
        match = re.search(r"#define CUDA_VERSION (\d+)", (home / "include" / "cuda.h").read_text(errors="replace"))
    except OSError:
        return None
    return f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}" if match else None


def _cufile_header(toolkit: Found) -> Found:
    """Return where cufile.h is, and its version if it came with a wheel."""
    places = [place / "include" for place in _cufile_homes(toolkit)]
    for place in places:
        if (place / "cufile.h").is_file():
            return Found(str(place / "cufile.h"), _wheel_version(place / "cufile.h"))
    return Found(problem=f"cufile.h was not found ({_tried(places)}): {_cufile_remedy(toolkit)}")


def _cufile_library(toolkit: Found) -> Found:
    """Return where libcufile is, and the version in its file's name or of its wheel."""
    places = [home / part for home in _cufile_homes(toolkit) for part in ("lib64", "lib")]
    places += [Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), Path("/usr/lib64")]
    for place in places:
        for file in sorted(place.glob("libcufile.so*")):
            numbers = re.search(r"\.so\.(\d+\.[\d.]+)$", file.resolve().name)
            return Found(str(file), numbers[1] if numbers else _wheel_version(file))
    return Found(problem=f"libcufile.so was not found ({_tried(places)}): {_cufile_remedy(toolkit)}")


def _cufile_homes(toolkit: Found) -> Iterator[Path]:
    """Return directories with ``include`` and ``lib``: the toolkit's, then those of NVIDIA's wheels."""
    if toolkit.path:
        yield Path(toolkit.path)
        yield from sorted(Path(toolkit.path, "targets").glob("*"))
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return
    for place in (spec.submodule_search_locations or []) if spec else []:
        yield Path(place, "cufile")
        yield from sorted(Path(place).glob("cu[0-9]*"))


def _wheel_version(file: Path) -> str | None:
    """Return the version of the ``nvidia-cufile`` wheel that ``file`` came with, if it came with one."""
    site = next((parent.parent for parent in file.parents if parent.name == "nvidia"), None)
    infos = sorted(site.glob("nvidia_cufile*-*.dist-info")) if site else []
    return infos[0].name.removesuffix(".dist-info").rpartition("-")[2] if infos else None


def _cufile_remedy(toolkit: Found) -> str:
    """Return the command that installs cuFile for the version of CUDA."""
    major = (toolkit.version or "").partition(".")[0]
    return "pip install nvidia-cufile" + (f"-cu{major}" if major == "12" else "")


def _nvidia_fs() -> Found:
    """Return the version of the loaded nvidia-fs kernel module."""
    try:
        text = NVIDIA_FS.read_text()
    except OSError:
        return Found(
            problem="the nvidia-fs kernel module is not loaded, without it gds goes through host memory: "
            f"{packages.as_root('modprobe nvidia-fs')} (package nvidia-gds)"
        )
    match = re.search(r"\d+\.[\d.]*", text)
    return Found(str(NVIDIA_FS), match[0] if match else None)


def _tried(places: list[Path]) -> str:
    return "tried " + ", ".join(str(place) for place in places) if places else "no place to look in"
