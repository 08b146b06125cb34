"""Small file systems of a test's own: loop-mounted, frozen, full, or in memory. Need root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20


def _command(*words: object) -> str:
    """Run it; skip the test, saying why, where this machine refuses."""
    name = str(words[0])
    if os.geteuid() != 0:
        pytest.skip("needs root, for loop devices and mounts")
    if shutil.which(name) is None:
        pytest.skip(f"needs {name}")
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{name} was refused: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


class Disk:
    """A mounted file system. ``device`` is its loop device, empty for tmpfs."""

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        self.device = device

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def bytes_free(self) -> int:
        facts = os.statvfs(self.path)
        return facts.f_bfree * facts.f_frsize

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """While it lasts, whatever writes to the file system waits."""
        _command("fsfreeze", "--freeze", self.path)
        try:
            yield
        finally:
            self.thaw()

    def thaw(self) -> None:
        """Idempotent."""
        subprocess.run(["fsfreeze", "--unfreeze", str(self.path)], capture_output=True)


@contextlib.contextmanager
def loop_device(directory: Path, size: int, sector_size: int = 512) -> Iterator[str]:
    """A block device of ``size`` bytes, kept in a sparse file in ``directory``."""
    image = directory / "image"
    with image.open("wb") as file:
        file.truncate(size)
    try:
        device = _command("losetup", "--find", "--show", "--sector-size", sector_size, image)
        try:
            yield device
        finally:
            subprocess.run(["losetup", "--detach", device], check=True)
    finally:
        image.unlink()


@contextlib.contextmanager
def loop_disk(
    directory: Path, filesystem: str, size: int, sector_size: int = 512, options: tuple[str, ...] = ()
) -> Iterator[Disk]:
    """``options``: for mkfs."""
    force = {"ext4": "-F", "xfs": "-f"}[filesystem]
    with loop_device(directory, size, sector_size) as device:
        _command(f"mkfs.{filesystem}", "-q", force, *options, device)
        with _mounted(directory, device, filesystem) as path:
            yield Disk(path, device)


@contextlib.contextmanager
def memory_disk(directory: Path, size: int) -> Iterator[Disk]:
    """A tmpfs; 0 is one without a limit."""
    with _mounted(directory, "tmpfs", "tmpfs", f"size={size}") as path:
        yield Disk(path, "")


@contextlib.contextmanager
def _mounted(directory: Path, source: str, filesystem: str, options: str = "defaults") -> Iterator[Path]:
    path = directory / "mounted"
    path.mkdir()
    _command("mount", "-t", filesystem, "-o", options, source, path)
    try:
        yield path
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(path)], capture_output=True)
        unmounted = subprocess.run(["umount", str(path)], capture_output=True, text=True)
        if unmounted.returncode != 0:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
        path.rmdir()
        assert unmounted.returncode == 0, f"a descriptor was left open: {unmounted.stderr}"
