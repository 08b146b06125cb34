"""A store of blocks by key: kills, power cuts, drives that fail, and damaged files. No block that is got has a wrong byte.

Of six tries three are kills, one is a power cut, one has some fifty operations on a drive that fails, and one damages the file.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

from deepnvme.kvstore import BlockStore, BlockStoreStats
from deepnvme.kvstore.block_files import FILE_NAME

from ....support.faulty_filesystem import MODES, faulty_filesystem, obstacle
from ....support.kv_blocks import content, keys_of
from .. import Wrong
from ..ways import Saving
from . import kills, power_cuts
from .fuse_faults import Failed, FailingDrive

SHORT, SECONDS = 6, 180

BLOCK = 12_000
CAPACITY = 1 << 20
"""For some 60 of the keys on one drive."""
KEYS = keys_of(range(150))


def opened(directories: Sequence[Path]) -> BlockStore:
    return BlockStore([directory / "kv" for directory in directories], CAPACITY, BLOCK, fingerprint="torture")


def put(store: BlockStore, keys: list[bytes]) -> list[bool]:
    return store.put_many(keys, [content(key, BLOCK) for key in keys]).result()


def get(store: BlockStore, keys: list[bytes]) -> int:
    """Return how many are hits. Raises Wrong unless all of them are right."""
    out = torch.zeros(len(keys), BLOCK, dtype=torch.uint8)
    hits = store.get_many(keys, out).result()
    for key, block, hit in zip(keys, out, hits, strict=True):
        if hit and not torch.equal(block, content(key, BLOCK)):
            raise Wrong(f"wrong bytes of {key!r}: {store.stats()}")
    return sum(hits)


def turn(store: BlockStore, random: Random) -> None:
    """One operation, or two beside each other."""
    keys = random.sample(KEYS, 8)
    what = random.random()
    if what < 0.1:
        store.delete(keys[:3])
    elif what < 0.5:
        get(store, keys)
    else:
        beside = store.put_many(keys, [content(key, BLOCK) for key in keys])
        get(store, random.sample(KEYS, 8))
        beside.result()


def check(directories: Sequence[Path]) -> BlockStoreStats:
    """Open the store after whatever has come over it, get all keys, and return the figures of that. Raises Wrong."""
    with opened(directories) as store:
        sizes = sum((directory / "kv" / FILE_NAME).stat().st_size for directory in directories)
        if sizes > CAPACITY or store.stats().used > store.stats().slots:
            raise Wrong(f"{sizes} bytes, {store.stats()}")
        get(store, KEYS)
        found = store.stats()
        if not all(put(store, KEYS[:20])) or get(store, KEYS[:20]) != 20:
            raise Wrong(f"it does not go on: {store.stats()}")
    return found


class Storing(Saving):
    """What the child of a kill or power cut does."""

    most_drives = 3
    store: BlockStore | None = None

    def save(self, value: int) -> None:
        if self.store is None:
            self.store = opened(self.directories)
        random = Random(value)
        for _ in range(5):
            turn(self.store, random)


def kill(random: Random, directory: Path) -> None:
    directories = [directory / str(number) for number in range(random.choice([1, 1, 2, 3]))]
    for each in directories:
        each.mkdir()
    with kills.Child(Storing, *directories) as child:
        child.listen(3)
        time.sleep(random.random() * random.choice([0.02, 0.2]))
        child.stop(signal.SIGKILL)
    found = check(directories)
    if found.corrupt or found.hits < found.slots // 3:
        raise Wrong(f"a kill has cost blocks: {found}")


def power_cut(random: Random, directory: Path) -> None:
    filesystem = random.choice(power_cuts.filesystems())
    drive = power_cuts.Drive(directory, filesystem, volatile=random.random() < 0.5)
    drive.format()
    with drive.mounted(), kills.Child(Storing, drive.place) as child:
        child.listen(3)
        if random.random() < 0.5:
            os.sync()  # some records and clearings are on the drive
            child.listen(3)
        time.sleep(random.random() * 0.2)
        child.stop(signal.SIGSTOP)
        drive.copy(random)
    drive.cut()
    with drive.mounted():
        check([drive.place])


def faults(random: Random, directory: Path) -> None:
    mode = random.choice(MODES)
    with faulty_filesystem(directory, mode) as disk:
        drive = FailingDrive(disk, mode, random)
        for _ in range(4):
            store = drive.tries("open", lambda: opened([disk.path]), disk.path)
            if isinstance(store, Failed):
                continue
            for _ in range(12):
                with drive.failing():
                    turn(store, random)
            drive.tries("close", store.close, disk.path)
        check([disk.path])


def damage(random: Random, directory: Path) -> None:
    with opened([directory]) as store:
        for _ in range(5):
            put(store, random.sample(KEYS, 20))
    path = directory / "kv" / FILE_NAME
    size = path.stat().st_size
    records = 8192 + 128 * store._layout.slots
    with path.open("r+b") as file:
        for _ in range(random.choice([1, 5, 50])):
            at = random.randrange(random.choice([8192, records, size]))
            file.seek(at)
            file.write(random.choice([random.randbytes(1), random.randbytes(100), bytes(4096)])[: size - at])
    if random.random() < 0.5:
        os.truncate(path, random.choice([random.randrange(records), random.randrange(size)]))
    try:
        check([directory])
    except OSError as error:
        if error.errno != errno.EBADMSG or error.filename != str(path):
            raise
        path.unlink()  # as the message says
        check([directory])


def requires() -> str | None:
    return obstacle() or power_cuts.requires()


def attack(random: Random, directory: Path) -> None:
    random.choice([kill, kill, kill, power_cut, faults, damage])(random, directory)
