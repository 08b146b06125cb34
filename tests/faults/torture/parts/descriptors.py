"""Thousands of requests, engines, stores, saves and reads, with errors among them: what the process holds is as before.

Descriptors, threads, the pool's bytes and locked memory are the runner's to count; here it is mappings and files left behind.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

import deepnvme
from deepnvme.swap import StoreLocked, TensorStore

from .. import Leaked, Wrong

SHORT = 3
SECONDS = 120

_MOST_MAPPINGS = 20
"""That the C library's allocator may keep for itself; a leak is one for each of some hundred operations."""


def attack(random: Random, directory: Path) -> None:
    deepnvme.async_save({}, directory / "kept.pt").result()  # the engine for all saves is kept for good
    operation = random.choice((_requests, _engines, _stores, _saves, _failures))
    operation(directory, random)  # what is kept once is kept for good
    before = _mappings()
    for _ in range(2):
        operation(directory, random)
    more = _mappings() - before
    if more > _MOST_MAPPINGS:
        raise Leaked(f"{operation.__name__}: {more} more mappings")
    left = [path.name for path in directory.iterdir() if not path.name.startswith("kept")]
    if left:
        raise Leaked(f"{operation.__name__}: files are left behind: {left[:5]}")


def _mappings() -> int:
    gc.collect()
    return len(Path("/proc/self/maps").read_text().splitlines())


def _requests(directory: Path, random: Random) -> None:
    """A thousand, of which some are waited for, most are forgotten, and some cannot be."""
    with deepnvme.Engine(queue_depth=random.choice((1, 8, 128)), num_threads=random.choice((1, 3))) as engine:
        tensor = torch.ones(random.choice((1, 1000, 5000)))
        file = engine.open(directory / "kept", "w+") if random.random() < 0.5 else directory / "kept"
        engine.write(tensor, file).result()
        for _ in range(1000):
            kind = random.randrange(8)
            if kind == 0:
                _expect(FileNotFoundError, engine.read, tensor, directory / "missing")
            elif kind == 1:
                _expect(ValueError, engine.read, tensor, file, 1 << 20)
            elif kind == 2:
                engine.read(torch.empty_like(tensor), file).result()
            else:
                engine.write(tensor, file, random.choice((0, 7, 4096)))


def _engines(directory: Path, random: Random) -> None:
    """Forty, closed, dropped, or left by an error, with requests under way."""
    tensor = torch.ones(20_000)
    for _ in range(40):
        engine = deepnvme.Engine(queue_depth=4, num_threads=random.choice((1, 2)))
        pinned = engine.empty_pinned(20_000)
        engine.write(random.choice((tensor, pinned)), directory / "kept", random.choice((0, 7)))
        if random.random() < 0.5:
            engine.close()
        del engine, pinned


def _stores(directory: Path, random: Random) -> None:
    """Twenty, with names that are not there, a second owner, and a block that ends by an error."""
    for _ in range(20):
        try:
            with TensorStore(directory / "store") as store:
                store.put_many({str(name): torch.ones(random.randrange(1, 3000)) for name in range(20)})
                _expect(KeyError, store.get, "missing")
                _expect(StoreLocked, TensorStore, directory / "store")
                future = store.get(str(random.randrange(20)))
                if random.random() < 0.3:
                    raise _Ended
                future.result()
                store.delete("3").result()
        except _Ended:
            pass


def _saves(directory: Path, random: Random) -> None:
    """Forty, at once and in the background, and some of what cannot be saved, or not there."""
    path = directory / "kept.pt"
    for number in range(20):
        state = {"tensor": torch.full((random.randrange(1, 100_000),), float(number)), "number": number}
        deepnvme.save(state, path)
        deepnvme.async_save({**state, "number": -number}, path).result()
        _expect(OSError, deepnvme.save, state, directory / "missing" / "file.pt")
        _expect((TypeError, AttributeError), deepnvme.save, {**state, "what": (each for each in ())}, path)
        if deepnvme.load(path)["number"] != -number:
            raise Wrong("another checkpoint was loaded than saved")


def _failures(directory: Path, random: Random) -> None:
    """Each engine's requests fail at a limit of the size of files, in the middle of what is under way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        for _ in range(30):
            with deepnvme.Engine(block_size=16 << 10) as engine:
                futures = [engine.write(torch.ones(random.choice((100, 30_000))), directory / "kept", 150_000) for _ in range(20)]
                for future in futures[:10]:
                    error = future.exception()
                    if error is not None and (not isinstance(error, OSError) or error.errno != errno.EFBIG or not error.filename):
                        raise Wrong(f"another error than that of the limit: {error!r}")
    except OSError as error:  # of space reserved before the first byte
        if error.errno != errno.EFBIG:
            raise
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        os.truncate(directory / "kept", 0)


class _Ended(Exception):
    """A user's own, in the middle of something."""


def _expect(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[..., object], *arguments: object) -> None:
    try:
        call(*arguments)
    except kind:
        return
    raise Wrong(f"{getattr(call, '__name__', call)} did not raise {kind}")
