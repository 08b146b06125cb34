"""What users do with the package, at random, on a drive that fails; and what has to be there after each failure."""

from __future__ import annotations

import contextlib
import copy
import functools
import random as randoms
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

import deepnvme
from deepnvme.streaming import WeightStore, stream

from ...support.activations import Training as SavingOnDisk
from . import Torn, Wrong
from .parts.fuse_faults import Failed, FailingDrive
from .parts.optimizer_faults import Training
from .ways import REPEATABLE, Saving

_LARGEST = 300_000
"""Bytes of a tensor."""


def _bytes(random: randoms.Random, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(random.randrange(1 << 31))
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


# The engine. ----------------------------------------------------------------------------------------------------------------


class _File:
    """What a file has to hold: ``known`` says of which bytes that is known."""

    def __init__(self) -> None:
        self.content = torch.zeros(0, dtype=torch.uint8)
        self.known = torch.zeros(0, dtype=torch.bool)

    def write(self, offset: int, data: torch.Tensor, done: bool) -> None:
        end = offset + len(data)
        if done and end > len(self.content):
            more = end - len(self.content)
            self.content = torch.cat([self.content, torch.zeros(more, dtype=torch.uint8)])
            self.known = torch.cat([self.known, torch.zeros(more, dtype=torch.bool)])
        end = min(end, len(self.content))
        if end > offset:
            self.content[offset:end] = data[: end - offset]
            self.known[offset:end] = done


def transfers(drive: FailingDrive, random: randoms.Random) -> None:
    """Engine.write, read and fsync, by path and by file."""
    files: dict[str, _File] = {}
    unsynced: dict[str, list[tuple[int, int]]] = {}
    backend = random.choice(("io_uring", "threads"))
    with deepnvme.Engine(
        cast(Any, backend), block_size=random.choice((4096, 65536, 1 << 20)), queue_depth=random.choice((2, 32)),
        num_threads=random.choice((1, 2)),
    ) as engine, contextlib.ExitStack() as opened:  # fmt: skip
        handles: dict[str, Any] = {}
        for _ in range(random.randrange(5, 25)):
            name = random.choice("abc")
            path = drive.path / name
            file = files.setdefault(name, _File())
            target = handles.get(name, str(path))
            action = random.choice(("write", "write", "write", "read", "read", "fsync", "open"))
            if action == "open" and name not in handles and len(file.content):
                made = drive.tries(f"open {name}", lambda path=path: engine.open(path, "rw"), path)
                if not isinstance(made, Failed):
                    handles[name] = opened.enter_context(made)
            elif action == "write":
                data = _bytes(random, random.choice((1, 4096, random.randrange(1, _LARGEST))))
                offset = random.choice((0, 4096, random.randrange(len(file.content) + 1)))
                what = f"write {len(data)} bytes at {offset} of {name}{' by file' if name in handles else ''}"
                done = drive.tries(what, lambda given=(data, target, offset): engine.write(*given).result(), path)
                file.write(offset, data, not isinstance(done, Failed))
                unsynced.setdefault(name, []).append((offset, offset + len(data)))
                if drive.mode == "writeback" and isinstance(done, Failed):
                    for begin, end in unsynced.pop(name):  # its pages may be others' too
                        file.known[begin:end] = False
            elif action == "read" and len(file.content):
                begin = random.randrange(len(file.content))
                out = torch.zeros(random.randrange(1, len(file.content) - begin + 1), dtype=torch.uint8)
                what = f"read {len(out)} bytes at {begin} of {name}"
                done = drive.tries(what, lambda given=(out, target, begin): engine.read(*given).result(), path)
                span = slice(begin, begin + len(out))
                if not isinstance(done, Failed) and not torch.equal(out[file.known[span]], file.content[span][file.known[span]]):
                    raise Wrong(f"read other bytes than were written to {name}")
            elif action == "fsync" and len(file.content):
                done = drive.tries(f"fsync {name}", lambda target=target: engine.fsync(target).result(), path)
                ranges = unsynced.pop(name, [])
                if isinstance(done, Failed):
                    for begin, end in ranges:  # what fsync failed for, no promise is made of
                        file.known[begin:end] = False
        for name, file in files.items():
            out = torch.zeros(len(file.content), dtype=torch.uint8)
            if len(out):
                drive.history.append(f"at the end: read {name}")
                engine.read(out, drive.path / name).result()
                if not torch.equal(out[file.known], file.content[file.known]):
                    raise Wrong(f"{name} does not hold at the end what was written")


# What is saved. -------------------------------------------------------------------------------------------------------------


def saves(way: type[Saving], drive: FailingDrive, random: randoms.Random) -> None:
    """One value after the other. What is there then is that, or the one before where that failed."""
    with contextlib.closing(way(drive.path, durable=random.random() < 0.8)) as saving:
        saving.save(0)
        candidates = {0}
        for value in range(1, random.randrange(3, 9)):
            done = drive.tries(f"save {value}", lambda value=value: saving.save(value), drive.path)
            candidates = {*candidates, value} if isinstance(done, Failed) else {value}
            if random.random() < 0.5:
                found = drive.tries("load", saving.load, drive.path)
                if not isinstance(found, Failed) and found not in candidates:
                    raise Wrong(f"{found} was loaded, and one of {candidates} is there")
            if random.random() < 0.7:
                drive.history.append("healed: load")
                found = saving.load()
                if found not in candidates:
                    raise Torn(f"{found} is there, not one of {candidates}")
                candidates = {found}
        saving.save(100)
        if saving.load() != 100 or saving.leftovers():
            raise Wrong(f"at the end {saving.load()} is there, and {saving.leftovers()}")


# Weights. -------------------------------------------------------------------------------------------------------------------


def weights(drive: FailingDrive, random: randoms.Random) -> None:
    """WeightStore.build and open, and a model that is streamed."""
    torch.manual_seed(random.randrange(1000))
    width = random.choice((16, 100))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(random.randrange(2, 8))))
    streamed = copy.deepcopy(model)
    x = torch.randn(3, width)
    with torch.no_grad():
        expected = model(x)
    path = drive.path / "weights"
    blocks = [name for name, _ in model.named_children()]

    def build() -> WeightStore:
        return WeightStore.build(model, path, blocks=blocks)

    made = drive.tries("build", build, drive.path)
    if isinstance(made, Failed):
        drive.history.append("again, healed")
        try:
            made = build()
        except FileExistsError:  # the fault came after the commit
            made = WeightStore.open(path)
    made.close()
    reopened = drive.tries("open", lambda: WeightStore.open(path), drive.path)
    with WeightStore.open(path) if isinstance(reopened, Failed) else reopened as opened:
        options: dict[str, Any] = {"prefetch": random.randrange(4), "memory_budget": random.choice((0, 100_000))}
        begun = drive.tries("stream", lambda: stream(streamed, opened, **options), path)
        with stream(streamed, opened, **options) if isinstance(begun, Failed) else begun, torch.no_grad():
            for _ in range(random.randrange(2, 8)):
                outcome = drive.tries("forward", lambda: streamed(x), path)
                if isinstance(outcome, Failed):
                    drive.history.append("again, healed")
                    outcome = streamed(x)
                if not torch.equal(outcome, expected):
                    raise Wrong("the streamed model computes something else")


# Training. ------------------------------------------------------------------------------------------------------------------


def optimizer(drive: FailingDrive, random: randoms.Random) -> None:
    """OffloadedOptimizer against the optimizer in memory."""
    drive.behind = True  # gradients, in backward
    made = drive.tries("make", lambda: Training(drive.path, random), drive.path)
    training = Training(drive.path, random) if isinstance(made, Failed) else made
    try:
        for _ in range(random.randrange(4, 12)):
            training.go_on(lambda operation: drive.tries(f"in step {training.steps + 1}", operation, drive.path))
        training.end()
    except BaseException:
        with contextlib.suppress(OSError):
            training.optimizer.close()
        raise
    training.kept.clear()
    if isinstance(drive.tries("close", training.optimizer.close, drive.path), Failed):
        drive.history.append("again, healed")
        training.optimizer.close()


def activations(drive: FailingDrive, random: randoms.Random) -> None:
    """save_on_disk: steps whose gradients are those in memory. A failed transfer is an error."""
    paths = [drive.path / name for name in random.choice((["one"], ["one", "two"]))]
    nbytes = random.choice((8, 64, 512)) << 10
    training = SavingOnDisk(paths, nbytes, memory_budget=random.randrange(4) * nbytes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for _ in range(random.randrange(3, 12)):
                drive.tries("a step", training.step, drive.path)
                if random.random() < 0.3:
                    drive.history.append("again, healed")
                    training.step()
                    if random.random() < 0.3:
                        drive.tries("close", training.activations.close)
    finally:
        training.activations.close()


USES: dict[str, Callable[[FailingDrive, randoms.Random], None]] = {
    **{way.__name__: functools.partial(saves, way) for way in REPEATABLE},
    **{use.__name__: use for use in (transfers, weights, optimizer, activations)},
}
