"""A drive that hangs, for a minute at the longest, and then goes on as if nothing had been; by FUSE.

Who waits with a timeout is told, who presses Ctrl-C gets control back, and neither ends the transfer: its memory stays, and all
of it has arrived in the end. Another engine on another drive goes on meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import random as randoms
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ....support.faulty_filesystem import MODES, FaultyFilesystem, faulty_filesystem, obstacle
from ....support.patience import PATIENCE
from .. import Wrong

SHORT, SECONDS = 4, 300
LONG_SECONDS = 60.0
"""One in fifty tries hangs for that long."""
SHORT_SECONDS = (0.0, 0.5)
"""The others. Both begin when all has been tried that is not to wait for the drive, however long that takes."""


def requires() -> str | None:
    return obstacle()


def attack(random: randoms.Random, directory: Path) -> None:
    seconds = LONG_SECONDS if random.random() < 0.02 else random.uniform(*SHORT_SECONDS)
    use = random.choice((_transfers, _store, _checkpoint))
    with faulty_filesystem(directory, random.choice(MODES)) as disk:
        use(disk, directory, random, seconds)


@contextlib.contextmanager
def _hanging(disk: FaultyFilesystem, operations: str, seconds: float) -> Iterator[threading.Timer]:
    """Have them hang from now on, in the block or for so long, whatever is shorter. The timer runs while they do."""
    disk.fail(operations, effect="hang", times=-1)
    timer = threading.Timer(seconds, disk.heal)
    timer.start()
    try:
        yield timer
    finally:
        timer.cancel()
        timer.join()
        disk.heal()


def _interrupted(wait: Callable[[], object], hanging: threading.Timer) -> None:
    """Raise Wrong unless Ctrl-C ends the waiting while the drive hangs."""
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        wait()
        timer.join()  # it had ended by itself: Ctrl-C comes here
        time.sleep(5)
    except KeyboardInterrupt:
        pass
    finally:
        timer.join()
    if not hanging.is_alive():
        raise Wrong("Ctrl-C was heard when the drive went on")


def _times_out(wait: Callable[[float], object], hanging: threading.Timer) -> None:
    """Raise Wrong if it takes as long as the drive hangs."""
    with contextlib.suppress(TimeoutError):
        wait(0.1)
    if not hanging.is_alive():
        raise Wrong("a timeout of 0.1 s came when the drive went on")


def _transfers(disk: FaultyFilesystem, directory: Path, random: randoms.Random, seconds: float) -> None:
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    import deepnvme

    backend: Any = random.choice(("io_uring", "libaio", "threads"))
    nbytes = random.choice((4096, 300_001, 3 << 20))
    with deepnvme.Engine(backend, block_size=65536, num_threads=random.choice((1, 2))) as engine:
        content = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        engine.write(content, disk / "there").result()
        source = content.clone()
        kept = StorageWeakRef(source.untyped_storage())
        target = torch.zeros_like(content)
        address = target.data_ptr()
        with _hanging(disk, "read,write,fsync", PATIENCE) as hanging:
            writing = engine.write(source, disk / "new")
            reading = engine.read(target, disk / "there")
            syncing = engine.fsync(disk / "new")
            del source
            futures = [writing, reading, syncing]
            for future in futures:
                _times_out(future.result, hanging)
            if not writing.done() and kept.expired():
                raise Wrong("a tensor was let go of while its write was under way")
            _interrupted(random.choice(futures).result, hanging)
            with deepnvme.Engine(backend) as other:
                other.write(content, directory / "beside").result(PATIENCE)
            if all(future.done() for future in futures):
                raise Wrong("nothing hung")
            time.sleep(seconds)
        for future in futures:
            future.result(PATIENCE)
        if target.data_ptr() != address or not torch.equal(target, content):
            raise Wrong("a read that hung has brought other bytes")
        if (disk.behind / "new").read_bytes() != content.numpy().tobytes():
            raise Wrong("a write that hung has left other bytes")
        if engine.stats().failed_requests:
            raise Wrong(f"{engine.stats().failed_requests} requests failed")


def _store(disk: FaultyFilesystem, _: Path, random: randoms.Random, seconds: float) -> None:
    import torch

    from deepnvme.swap import TensorStore

    tensors = {str(index): torch.randint(0, 256, (random.randrange(1, 200_000),), dtype=torch.uint8) for index in range(5)}
    with TensorStore(disk / "store", persist=True) as store:
        store.put_many(tensors).result()
        with _hanging(disk, random.choice(("read", "write", "read,write")), PATIENCE) as hanging:
            futures = {name: store.get(name) for name in tensors}
            putting = store.put("new", tensors["0"])
            for future in (*futures.values(), putting):
                _times_out(future.result, hanging)
            _interrupted(putting.result, hanging)
            time.sleep(seconds)
        for name, future in futures.items():
            if not torch.equal(future.result(PATIENCE), tensors[name]):
                raise Wrong(f"{name} was got with other bytes than were put")
        putting.result(PATIENCE)
        with _hanging(disk, "fsync", PATIENCE) as hanging:
            _interrupted(store.commit, hanging)
            time.sleep(seconds)
        store.commit()
    with TensorStore(disk / "store", persist=True) as store:
        found = store.get_many(store.names()).result()
        if found.keys() != {*tensors, "new"} or not all(torch.equal(found[name], tensors[name]) for name in tensors):
            raise Wrong("the store does not hold what was committed")


def _checkpoint(disk: FaultyFilesystem, _: Path, random: randoms.Random, seconds: float) -> None:
    import torch

    import deepnvme

    path = disk / "model.pt"
    old = {"weight": torch.randint(0, 256, (random.randrange(1, 200_000),), dtype=torch.uint8)}
    new = {"weight": old["weight"] + 1}
    deepnvme.save(old, path)
    with _hanging(disk, random.choice(("write", "fsync", "rename", "write,fsync,rename")), PATIENCE) as hanging:
        saving = deepnvme.async_save(new, path)
        _times_out(saving.result, hanging)
        _interrupted(saving.result, hanging)
        time.sleep(seconds)
    saving.result(PATIENCE)
    with _hanging(disk, "read", seconds):
        if not torch.equal(deepnvme.load(path)["weight"], new["weight"]):
            raise Wrong("a load or save that hung has moved other bytes")
