"""Ctrl-C in whatever writes checkpoints: at a point of the interpreter, or by a real signal at a moment, drawn by lot.

Afterwards, with the traceback still alive, as a notebook keeps it: the name holds the old or the new object whole, another thread
saves to it, and nothing is left that was taken.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import deepnvme
from deepnvme.checkpoint.file_io import shared_engine
from deepnvme.integrations.deepspeed.io import FastFileWriter, FastFileWriterConfig
from deepnvme.ops.op_builder import AsyncIOBuilder
from deepnvme.swap import BufferPool, buffer_pool

from .. import Leaked, Torn, Wrong
from ..interruption import interrupted

SHORT = 16
SECONDS = 120
_SETTLE_SECONDS = 200.0
OTHERS = (str(Path(torch.__file__).parent), str(Path(logging.__file__).parent))
"""Code that is not attacked: torch's, and logging's, whose handlers' locks stay taken by an interrupt, for the next save too."""
Tensors = dict[str, torch.Tensor]

# A descriptor whose object was dropped between the call that opened it and the next instruction is closed with this warning.
warnings.simplefilter("ignore", ResourceWarning)
warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)|Detected an existing checkpoint")


class Saves:
    """One way to save; ``path`` is what it makes. The tensors of one save all have the same value."""

    name = ".pt"

    def __init__(self, directory: Path, random: Random) -> None:
        self.path = directory / self.name
        self.directory = directory
        self.random = random
        sizes = random.choices([0, 1, 1000, 70_000, 600_000, 3_000_000], k=random.randint(1, 6))
        self.shapes = [max(size // 4, 1) for size in sizes]

    def tensors(self, value: int) -> Tensors:
        return {f"t{number}": torch.full((size,), float(value)) for number, size in enumerate(self.shapes)}

    def save(self, tensors: Tensors) -> None:
        deepnvme.save(tensors, self.path, fsync=self.random.random() < 0.5)

    def load(self) -> Tensors:
        found: Tensors = torch.load(self.path, weights_only=True)
        return found

    def value(self) -> int:
        """Of what is saved. Raises Torn."""
        try:
            found = self.load()
        except Exception as error:
            raise Torn(f"{self.path.name} cannot be loaded: {error!r}") from error
        values = {int(bound) for tensor in found.values() for bound in tensor.aminmax()}
        if len(values) != 1 or {name: tensor.numel() for name, tensor in found.items()} != {
            f"t{number}": size for number, size in enumerate(self.shapes)
        }:
            raise Torn(f"{self.path.name} has {values} in {found.keys()}")
        return values.pop()

    def leftovers(self) -> set[str]:
        return {entry.name for entry in self.directory.iterdir()} - {self.path.name}


class Background(Saves):
    """With a pool that holds all of it, or a part."""

    def __init__(self, directory: Path, random: Random) -> None:
        super().__init__(directory, random)
        self.pool = BufferPool(random.choice([6 << 20, 64 << 20]))
        self.lazy = random.random() < 0.3
        self.wait = random.random() < 0.5

    def save(self, tensors: Tensors) -> None:
        future = deepnvme.async_save(tensors, self.path, pool=self.pool, lazy=self.lazy, fsync=False)
        if self.wait:
            future.wait_staged()
            future.result()


class Managed(Saves):
    name = "step-00000002.pt"

    def __init__(self, directory: Path, random: Random) -> None:
        super().__init__(directory, random)
        self.manager = deepnvme.CheckpointManager(directory, keep=2)
        self.asynchronous = random.random() < 0.5
        self.step = 2
        for step in (0, 1):
            self.manager.save(step, self.tensors(0))

    def save(self, tensors: Tensors) -> None:
        self.manager.latest()
        if self.asynchronous:
            self.manager.save(self.step, tensors, asynchronous=True, fsync=False).result()
        else:
            self.manager.save(self.step, tensors, fsync=False)
        self.manager.steps()

    def leftovers(self) -> set[str]:
        """``keep`` are there after the next, and one less before."""
        names = super().leftovers()
        return names - {"step-00000001.pt"} if len(names) == 1 else names


class SafeTensors(Saves):
    name = ".safetensors"

    def save(self, tensors: Tensors) -> None:
        deepnvme.safetensors.save_file(tensors, self.path, fsync=False)

    def load(self) -> Tensors:
        return deepnvme.safetensors.load_file(self.path)


class Distributed(Saves):
    name = "checkpoint"

    def __init__(self, directory: Path, random: Random) -> None:
        super().__init__(directory, random)
        self.threads = random.choice([1, 2, 3])

    def save(self, tensors: Tensors) -> None:
        writer = deepnvme.NVMeWriter(self.path, thread_count=self.threads, sync_files=False)
        try:
            dcp.save(tensors, storage_writer=writer, no_dist=True)
        except dcp.api.CheckpointException as error:
            if any(isinstance(failure, KeyboardInterrupt) for failure, _ in error.failures.values()):
                raise KeyboardInterrupt from error
            raise

    def load(self) -> Tensors:
        found = self.tensors(-1)
        dcp.load(found, storage_reader=dcp.FileSystemReader(self.path), no_dist=True)
        return found

    def leftovers(self) -> set[str]:
        named = {info.relative_path for info in dcp.FileSystemReader(self.path).read_metadata().storage_data.values()}
        return {entry.name for entry in self.path.iterdir()} - named - {".metadata"}


class Streamed(Saves):
    """FastFileWriter promises nothing of a file that it was interrupted in but that the next one is whole."""

    def save(self, tensors: Tensors) -> None:
        handle = AsyncIOBuilder().load().aio_handle()
        pinned = handle.new_cpu_locked_tensor(64 << 10, torch.empty(0, dtype=torch.uint8))
        try:
            file = FastFileWriter(self.path, FastFileWriterConfig(handle, pinned))
            try:
                with file:
                    torch.save(tensors, file)
            finally:
                file.close()  # once more, where the one of `with` was interrupted before it had begun
        except RuntimeError as error:  # torch ends its archive whatever happened, and finds it too short
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            raise
        finally:
            handle.free_cpu_locked_tensor(pinned)


KINDS: list[type[Saves]] = [Saves, Background, Managed, SafeTensors, Distributed, Streamed]


_warm = False


def attack(random: Random, directory: Path) -> None:
    global _warm
    if not _warm:  # what a process keeps for good is there once each has saved
        for kind in KINDS:
            (own := directory / kind.__name__).mkdir()
            way = kind(own, Random(0))
            way.save({"t": torch.ones(1 << 20)})
            in_another_thread(lambda way=way: settled(way))
        # and each of the engine's workers has pinned what it copies memory through that is not aligned
        unaligned = torch.zeros((1 << 20) + 1, dtype=torch.uint8)[1:]
        for future in [shared_engine(directory).write(unaligned, directory / "unaligned", number << 20) for number in range(64)]:
            future.result()
        _warm = True
    (own := directory / "own").mkdir()
    attack_one(random.choice(KINDS), random, own)


def attack_one(kind: type[Saves], random: Random, directory: Path) -> None:
    """Save with an interrupt, and see what is left."""
    way = kind(directory, random)
    way.save(way.tensors(1))
    in_another_thread(lambda: settled(way))
    kept: list[BaseException] = []
    new = way.tensors(2)

    def operation() -> None:
        try:
            way.save(new)
        except BaseException as error:
            kept.append(error)
            raise

    if random.random() < 0.7:
        points = interrupted(0, lambda: way.save(way.tensors(1)), skip=OTHERS).passed
        where = interrupted(random.randint(1, points), operation, skip=OTHERS).where
    else:
        began = time.perf_counter()
        way.save(way.tensors(1))
        where = _with_signal(operation, random.uniform(0, time.perf_counter() - began))
    check(way, f"{kind.__name__}, interrupted at {where}, ended with {kept!r}")
    kept.clear()


def check(way: Saves, what: str) -> None:
    """All that is promised after an interrupt. Raises Torn, Wrong or Leaked."""
    try:
        if not isinstance(way, Streamed) and way.value() not in (1, 2):
            raise Torn("neither the old nor the new")
        in_another_thread(lambda: way.save(way.tensors(3)))
        in_another_thread(lambda: settled(way))
        if way.value() != 3:
            raise Wrong(f"the next save left {way.value()}")
        if way.leftovers():
            raise Leaked(f"there are {way.leftovers()} after the next save")
    except (Torn, Wrong, Leaked) as error:
        raise type(error)(f"{what}: {error}") from error


def settled(way: Saves) -> None:
    """Wait for what goes on behind. Raises Leaked for what does not end."""
    pools = [buffer_pool(), *([way.pool] if isinstance(way, Background) else [])]
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        taken = [f"{pool.in_use} bytes of a pool of {pool.budget}" for pool in pools if pool.in_use]
        taken += [f"descriptor of {path}" for path in _open_files(way.directory)]
        taken += [f"thread {thread.name}" for thread in threading.enumerate() if thread.name.startswith("deepnvme")]
        if not taken:
            return
        if time.monotonic() > deadline:
            raise Leaked(", ".join(taken))
        time.sleep(0.01)


def _open_files(directory: Path) -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it meanwhile
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(f"{directory}/")]


def in_another_thread(work: Callable[[], object]) -> None:
    """Raises Wrong if it hangs, and what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS / 2)
    if thread.is_alive():
        raise Wrong("the next save hangs")
    if errors:
        if isinstance(errors[0], Torn | Wrong | Leaked):
            raise errors[0]
        raise Wrong("the next save fails: " + "".join(traceback.format_exception(errors[0])))


def _with_signal(operation: Callable[[], Any], seconds: float) -> str:
    """Run it, with Ctrl-C after so many seconds. KeyboardInterrupt ends here."""
    main = threading.get_ident()

    def send() -> None:
        time.sleep(seconds)
        signal.pthread_kill(main, signal.SIGINT)

    sender = threading.Thread(target=send)
    try:
        sender.start()
        operation()
        sender.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        pass
    sender.join()
    return f"{seconds} s"
