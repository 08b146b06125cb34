"""A power cut at a moment drawn by lot, on a file system of its own, while a child saves or commits again and again.

The file system lies in a loop device, and that in a file. What the device was given and has completed is in the file, so a copy
made while nothing is written to the device is what a drive without a volatile cache has at a power cut: what the kernel still
holds in memory is lost.
The copy is mounted, which replays its journal, and has to hold what the child had said was saved, or the next.

``control`` makes the same with a rename without fsync, which has to lose data: or the attack could not fail.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch

import deepnvme

from .. import Torn, Wrong
from . import kills

SHORT = 2
SECONDS = 180
_MIB = 1 << 20
_SIZES = {"ext4": 96 * _MIB, "xfs": 320 * _MIB, "btrfs": 128 * _MIB}
_OPTIONS = {"ext4": ["-F"], "xfs": ["-f"], "btrfs": ["-f"]}


class DurablySaving(kills.Saving):
    def save(self, value: int) -> None:
        deepnvme.save(kills.tensors(value), self.path)


class DurablySavingBehind(kills.Saving):
    def save(self, value: int) -> None:
        deepnvme.async_save(kills.tensors(value), self.path).result()


class DurablyManaging(kills.Managing):
    def save(self, value: int) -> None:
        self.manager.save(value, kills.tensors(value))


class DurablySavingSafetensors(kills.SavingSafetensors):
    def save(self, value: int) -> None:
        deepnvme.safetensors.save_file(kills.tensors(value), self.path)


class DurablyDistributing(kills.Distributing):
    durably = True


class Renaming(kills.Saving):
    """The control: what a power cut can undo, or leave half."""

    def save(self, value: int) -> None:
        beside = self.path.with_suffix(".new")
        torch.save(kills.tensors(value), beside)
        os.replace(beside, self.path)


WAYS: tuple[type[kills.Saving], ...] = (
    DurablySaving,
    DurablySavingBehind,
    DurablyManaging,
    DurablySavingSafetensors,
    DurablyDistributing,
    kills.Committing,
    kills.Building,
)


def requires() -> str | None:
    if os.geteuid() != 0:
        return "needs root, for loop devices and mounts"
    missing = [name for name in ("losetup", "mount", "umount", "mkfs.ext4") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if subprocess.run(["losetup", "--find"], capture_output=True).returncode != 0:
        return "needs loop devices"
    return None


def filesystems() -> list[str]:
    """Those that can be made here."""
    return [name for name in _SIZES if shutil.which(f"mkfs.{name}") is not None]


def attack(random: Random, directory: Path) -> None:
    attack_one(random.choice(WAYS), random.choice(filesystems()), random, directory)


def control(random: Random, directory: Path) -> None:
    """Raises Wrong or Torn, nearly always."""
    attack_one(Renaming, "ext4", random, directory)


def attack_one(way: type[kills.Saving], filesystem: str, random: Random, directory: Path) -> None:
    image, copy = directory / "image", directory / "copy"
    with image.open("wb") as file:
        file.truncate(_SIZES[filesystem])
    _run(f"mkfs.{filesystem}", "-q", *_OPTIONS[filesystem], image)
    with _mounted(image, directory / "mounted", filesystem) as (device, mounted), kills.Child(way, mounted) as child:
        child.listen(2)
        time.sleep(random.random() * random.choice([0.02, 0.2, 1.0]))
        child.stop(signal.SIGSTOP)  # what it has said by now was saved before the copy begins
        _copy(device, image, copy)
        last = child.last
    image.unlink()
    with _mounted(copy, directory / "after", filesystem) as (_, mounted):
        kills.check(way(mounted), last, f"{way.__name__} on {filesystem}")


def _copy(device: str, image: Path, copy: Path) -> None:
    """Of what is in the image at one moment: begun again where something was written to the device meanwhile."""
    statistics = Path("/sys/block") / Path(device).name / "stat"
    deadline = time.monotonic() + 60
    while True:
        before = _written(statistics)
        _run("cp", "--sparse=always", image, copy)
        if _written(statistics) == before:
            return
        if time.monotonic() > deadline:
            raise Wrong(f"{device} is written to without an end, though nobody saves")


def _written(statistics: Path) -> tuple[str, ...]:
    """Writes, discards and flushes of a block device, and requests under way."""
    fields = statistics.read_text().split()
    return (*fields[4:9], *fields[11:])


@contextlib.contextmanager
def _mounted(image: Path, at: Path, filesystem: str) -> Iterator[tuple[str, Path]]:
    at.mkdir()
    device = _run("losetup", "--find", "--show", image)
    try:
        _run("mount", "-t", filesystem, *(["-o", "nouuid"] if filesystem == "xfs" else []), device, at)
        try:
            yield device, at
        finally:
            for _ in range(100):
                if subprocess.run(["umount", str(at)], capture_output=True).returncode == 0:
                    break
                time.sleep(0.05)
            else:
                subprocess.run(["umount", "--lazy", str(at)], check=True)
                raise Torn(f"{at} cannot be unmounted: a descriptor was left open")
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def _run(*words: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(done.returncode, f"{words[0]} failed: {done.stderr.strip()}", str(words[-1]))
    return done.stdout.strip()
