"""Which package to install, and with which command, on this distribution."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass


@dataclass(frozen=True)
class PackageManager:
    """One package manager: the command that installs, and its names for what this package needs."""

    install: str
    names: dict[str, str]
    root: bool = True  # whether only root may install

    def install_command(self, package: str) -> str:
        """Return the command that installs ``package``, a key of ``names``."""
        command = f"{self.install} {self.names[package]}"
        return as_root(command) if self.root else command


_DEBIAN = {"compiler": "g++", "python": "python3-dev"}
_FEDORA = {"compiler": "gcc-c++", "python": "python3-devel"}
_ARCH = {"compiler": "gcc", "python": "python"}
_CONDA = {"compiler": "gxx", "python": "python"}

_WITHOUT_MANAGER = {
    "compiler": "install GCC 11 or Clang 14, or later",
    "python": "install Python's header files",
}

_MANAGERS = (  # a command that gives the manager away, the manager
    ("dpkg", PackageManager("apt install", _DEBIAN)),
    ("pacman", PackageManager("pacman -S", _ARCH)),
    ("zypper", PackageManager("zypper install", _FEDORA)),
    ("dnf", PackageManager("dnf install", _FEDORA)),
    ("rpm", PackageManager("yum install", _FEDORA)),
)


def manager() -> PackageManager | None:
    """Return the package manager to recommend: conda in an active conda environment, else the distribution's."""
    if os.environ.get("CONDA_PREFIX") and shutil.which("conda"):
        return PackageManager("conda install -c conda-forge", _CONDA, root=False)
    return next((manager for command, manager in _MANAGERS if shutil.which(command)), None)


def remedy(package: str) -> str:
    """Return how to install ``package`` ("compiler", "python"): a command, or what to look for."""
    found = manager()
    return found.install_command(package) if found else _WITHOUT_MANAGER[package]


def as_root(command: str) -> str:
    """Return the text that this user types for a ``command`` that only root may run."""
    geteuid = getattr(os, "geteuid", None)
    return f"sudo {command}" if geteuid is not None and geteuid() != 0 else command
