"""A power cut at a moment drawn by lot, on a file system of its own, while a child saves or commits again and again.

The file system lies in a loop device, and that in a file. What the device was given and has completed is in the file, so a copy
made while nothing is written to the device is what a drive without a volatile cache has at a power cut: what the kernel still
holds in memory is lost.
A drive with a volatile cache is such a device whose file lies on another one of these file systems. What it is given is in the
page cache there until the device is flushed, which is an fsync of its file. Before the cut, the drive writes some pages of its
cache, by lot.
What is saved on several drives is cut on all of them.
The copies are mounted where the drives were, which replays their journals, and have to hold what the child had said was saved, or
the next.

``control`` makes the same with a rename without fsync, and ``cache_control`` with direct writes that are not flushed: those, only
a drive with a volatile cache loses. Both have to lose data: or the attack could not fail.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import torch

from .. import Torn, Wrong
from ..ways import WAYS, Saving, tensors
from . import kills

SHORT = 2
SECONDS = 180
_MIB = 1 << 20
_SIZES = {"ext4": 96 * _MIB, "xfs": 320 * _MIB, "btrfs": 128 * _MIB}
_OPTIONS = {"ext4": ["-F"], "xfs": ["-f"], "btrfs": ["-f"]}


class Renaming(Saving):
    """The control: what a power cut can undo, or leave half."""

    def save(self, value: int) -> None:
        beside = self.path.with_suffix(".new")
        torch.save(tensors(value), beside)
        os.replace(beside, self.path)


class WritingDirectly(Saving):
    """The control of volatile caches: the first commit flushes the file's metadata, those after it nothing."""

    def save(self, value: int) -> None:
        flags = os.O_DIRECT | os.O_WRONLY | os.O_CREAT
        descriptor = os.open(self.path, flags)
        with mmap.mmap(-1, 1 << 20) as page:
            page.write(value.to_bytes(8, "little") * (len(page) // 8))
            os.pwrite(descriptor, page, 0)
        if value == 0:
            os.fsync(descriptor)
        os.close(descriptor)

    def load(self) -> int:
        content = self.path.read_bytes()
        found = {int.from_bytes(content[begin : begin + 8], "little") for begin in range(0, len(content), 8)}
        if len(found) != 1:
            raise Torn(f"there are values {found}")
        return found.pop()


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
    way = random.choice(WAYS)
    drives = [random.choice(filesystems()) for _ in range(random.randint(1, way.most_drives))]
    attack_one(way, drives, random.random() < 0.5, random, directory)


def control(random: Random, directory: Path) -> None:
    """Raises Wrong or Torn, nearly always."""
    attack_one(Renaming, ["ext4"], False, random, directory)


def cache_control(random: Random, directory: Path, volatile: bool) -> None:
    """Raises Wrong or Torn, nearly always, if the drive has a volatile cache; otherwise never."""
    attack_one(WritingDirectly, ["ext4"], volatile, random, directory)


def attack_one(way: type[Saving], filesystems: Sequence[str], volatile: bool, random: Random, directory: Path) -> None:
    """``filesystems``: of each drive. ``volatile``: whether drives have volatile caches."""
    drives = []
    for number, filesystem in enumerate(filesystems):
        (own := directory / str(number)).mkdir()
        drives.append(Drive(own, filesystem, volatile))
    places = [drive.place for drive in drives]
    with contextlib.ExitStack() as mounted:
        for drive in drives:
            drive.format()
            mounted.enter_context(drive.mounted())
        with kills.Child(way, *places, durable=True) as child:
            child.listen(2)
            time.sleep(random.random() * random.choice([0.02, 0.2, 1.0]))
            child.stop(signal.SIGSTOP)  # what it has said by now was saved before the copy begins
            for drive in drives:
                drive.copy(random)
            last = child.last
    with contextlib.ExitStack() as mounted:
        for drive in drives:
            drive.cut()
            mounted.enter_context(drive.mounted())
        kills.check(way(*places), last, f"{way.__name__} on {filesystems}, volatile: {volatile}")


class Drive:
    """A file system of its own at ``place``, on a drive whose power can be cut."""

    def __init__(self, directory: Path, filesystem: str, volatile: bool) -> None:
        self._filesystem, self._volatile = filesystem, volatile
        self._image, self._copy = directory / "image", directory / "copy"
        self._cache = directory / "cache"
        """Where the file system is mounted whose page cache is the drive's volatile cache."""
        self.place = directory / "mounted"
        self._device = ""
        for path in (self._cache, self.place):
            path.mkdir()

    @property
    def _content(self) -> Path:
        """The file whose bytes are the drive's, those of its cache included."""
        return self._cache / "content" if self._volatile else self._image

    def format(self) -> None:
        """Make the file system."""
        size = _SIZES[self._filesystem]
        _truncate(self._image, size + 64 * _MIB if self._volatile else size)
        with contextlib.ExitStack() as stack:
            if self._volatile:
                _run("mkfs.ext4", "-q", "-F", self._image)
                stack.enter_context(_mounted(self._image, self._cache, "ext4"))
                with self._content.open("wb") as file:  # written once: blocks that are allocated later would be lost as a whole
                    for _ in range(size // _MIB):
                        file.write(bytes(_MIB))
            _run(f"mkfs.{self._filesystem}", "-q", *_OPTIONS[self._filesystem], self._content)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        """Have the file system at ``place``."""
        with contextlib.ExitStack() as stack:
            if self._volatile:
                self._device = stack.enter_context(_mounted(self._image, self._cache, "ext4"))
            device = stack.enter_context(_mounted(self._content, self.place, self._filesystem))
            if not self._volatile:
                self._device = device
            yield

    def copy(self, random: Random) -> None:
        """Keep what the drive would have if its power were cut now. Nobody saves any more."""
        if self._volatile:
            with self._content.open("rb") as file:
                for _ in range(random.choice([0, 1000])):
                    length = random.choice([1, 1, 1, 64]) * mmap.PAGESIZE
                    begin = random.randrange(_SIZES[self._filesystem]) // mmap.PAGESIZE * mmap.PAGESIZE
                    os.posix_fadvise(file.fileno(), begin, length, os.POSIX_FADV_DONTNEED)  # begins to write it
        _copy(self._device, self._image, self._copy)

    def cut(self) -> None:
        """Go back to the copy. Nothing is mounted."""
        self._copy.replace(self._image)


def _truncate(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


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
def _mounted(image: Path, at: Path, filesystem: str) -> Iterator[str]:
    """Yield the loop device."""
    device = _run("losetup", "--find", "--show", image)
    try:
        _run("mount", "-t", filesystem, *(["-o", "nouuid"] if filesystem == "xfs" else []), device, at)
        try:
            yield device
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
