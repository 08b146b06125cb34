"""Which package to install, and with which command, on this distribution."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PackageManager:
    """One package manager: the command that installs, the one that asks, and its names for what this package needs."""

    tool: str
    install: tuple[str, ...]
    query: tuple[str, ...]  # followed by the package; exit status 0 if it is installed; empty for conda
    names: dict[str, str]

    def has(self, package: str) -> bool:
        """Whether the package for ``package`` (a key of ``names``) is installed. Never raises."""
        name = self.names[package]
        if not self.query:
            return any(Path(os.environ["CONDA_PREFIX"], "conda-meta").glob(f"{name}-[0-9]*.json"))
        try:
            done = subprocess.run(
                [*self.query, name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, text=True, errors="replace"
            )
        except (OSError, subprocess.SubprocessError):
            return False
        # dpkg also knows packages that were removed but left their configuration behind
        return done.returncode == 0 and "deinstall" not in done.stdout

    def install_command(self, *packages: str) -> str:
        """What to type to install those packages."""
        command = " ".join([*self.install, *(self.names[package] for package in packages)])
        return as_root(command) if self.query else command


_DEBIAN = {"compiler": "g++", "python": "python3-dev"}
_FEDORA = {"compiler": "gcc-c++", "python": "python3-devel"}
_ARCH = {"compiler": "gcc", "python": "python"}
_CONDA = {"compiler": "gxx", "python": "python"}

_WITHOUT_MANAGER = {
    "compiler": "install GCC 11 or Clang 14, or later",
    "python": "install Python's header files",
}

_MANAGERS = (  # what asks, the manager
    ("dpkg", PackageManager("apt", ("apt", "install"), ("dpkg", "-s"), _DEBIAN)),
    ("pacman", PackageManager("pacman", ("pacman", "-S"), ("pacman", "-Q"), _ARCH)),
    ("zypper", PackageManager("zypper", ("zypper", "install"), ("rpm", "-q"), _FEDORA)),
    ("dnf", PackageManager("dnf", ("dnf", "install"), ("rpm", "-q"), _FEDORA)),
    ("rpm", PackageManager("yum", ("yum", "install"), ("rpm", "-q"), _FEDORA)),
)


def manager() -> PackageManager | None:
    """The package manager to recommend here: conda in an active conda environment, else the distribution's."""
    if os.environ.get("CONDA_PREFIX") and shutil.which("conda"):
        return PackageManager("conda", ("conda", "install", "-c", "conda-forge"), (), _CONDA)
    return next((manager for asks, manager in _MANAGERS if shutil.which(asks)), None)


def remedy(package: str) -> str:
    """How to get ``package`` ("compiler", "python"): a command, or what to look for."""
    found = manager()
    return found.install_command(package) if found else _WITHOUT_MANAGER[package]


def as_root(command: str) -> str:
    """``command`` as it is to be typed by this user, if only root may run it."""
    geteuid = getattr(os, "geteuid", None)
    return f"sudo {command}" if geteuid is not None and geteuid() != 0 else command
