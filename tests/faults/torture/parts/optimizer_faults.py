"""Reads and writes of an OffloadedOptimizer that fail, some or all for a while: it comes to the same steps, bit for bit."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from ....support.failed_transfer import FailedTransfer
from ....support.training import assert_same, copied
from .. import Wrong
from .interrupts_optimizer import World, doubled, some_world

SHORT = 10
SECONDS = 60

GONE = "run backward again"


class FaultyDrive:
    """An engine that fails a share of its transfers: some at once, some when they are asked how they ended."""

    def __init__(self, engine: Any, random: Random) -> None:
        self._engine, self._random = engine, random
        self.rate = {"read": 0.0, "write": 0.0}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def read(self, tensor: torch.Tensor, file: Any, offset: int = 0) -> Any:
        return self._transfer("read", tensor, file, offset)

    def write(self, tensor: torch.Tensor, file: Any, offset: int = 0) -> Any:
        return self._transfer("write", tensor, file, offset)

    def _transfer(self, operation: str, tensor: torch.Tensor, file: Any, offset: int) -> Any:
        if self._random.random() >= self.rate[operation]:
            return getattr(self._engine, operation)(tensor, file, offset)
        error = OSError(errno.EIO, f"{operation} of {tensor.nbytes} bytes at offset {offset}", "drive")
        if self._random.random() < 0.2:
            raise error
        if operation == "write":  # torn
            self._engine.write(torch.zeros_like(tensor), file, offset).result()
        else:
            tensor.view(-1).view(torch.uint8).zero_()
        return FailedTransfer(error)

    def heal(self) -> None:
        """From now on all is well."""
        self.rate = {"read": 0.0, "write": 0.0}

    def fail(self) -> None:
        """Some of the transfers, or all."""
        share = self._random.choice([0.02, 0.1, 0.4, 1.0])
        which = self._random.choice([("read",), ("write",), ("read", "write")])
        self.rate = {each: share if each in which else 0.0 for each in self.rate}


def failure(operation: Callable[[], object]) -> str | None:
    """What it raised, of what may be raised, or None."""
    try:
        operation()
    except OSError as error:
        if error.errno != errno.EIO or error.filename is None:
            raise Wrong(f"{error!r} has not the errno and the filename of the drive's error") from error
        return str(error)
    except RuntimeError as error:
        said = str(error) + "".join(getattr(error, "__notes__", []))
        if GONE not in said:
            raise
        return said
    return None


def faulty(world: World, random: Random) -> FaultyDrive:
    """Put it below the world's optimizer."""
    store = world.optimizer._store
    store._engine = drive = FaultyDrive(store._engine, random)  # type: ignore[assignment]
    return drive


def step(world: World, drive: FaultyDrive, random: Random) -> None:
    """One step, tried again until it is made. After some tries the drive is well."""
    optimizer, before = world.optimizer, world.optimizer.steps
    world.backward_of_the_other()
    ready = False
    tries = 0
    while optimizer.steps == before:
        tries += 1
        if tries > 40:
            raise Wrong("a step is not made in 40 tries, most of them on a drive that is well")
        if tries > 5:
            drive.heal()
        if not ready:
            ready = failure(optimizer.zero_grad) is None and failure(world.params_backward) is None
            continue
        error = failure(optimizer.step)
        if error is not None and optimizer.steps != before:
            raise Wrong(f"step() raised, and made the step: {error}")
        if error is not None:
            ready = GONE not in error and not world.in_backward
            if random.random() < 0.3 and not world.in_backward:
                failure(optimizer.state_dict)
    world.backwards += 1
    world.reference_step()
    if optimizer.steps != before + 1:
        raise Wrong(f"{optimizer.steps - before} steps are said to be made instead of one")


def attack(random: Random, directory: Path) -> None:
    world = some_world(random, directory)
    drive = faulty(world, random)
    for _ in range(6):
        if random.random() < 0.7:
            drive.fail()
        step(world, drive, random)
        if random.random() < 0.3:
            drive.heal()
            new = doubled(copied(world.optimizer.state_dict()))
            drive.fail()
            loaded = failure(functools.partial(world.optimizer.load_state_dict, new)) is None
            drive.heal()
            if loaded:
                world.reference.load_state_dict(doubled(copied(world.reference.state_dict())))
        if random.random() < 0.7:
            drive.heal()
            world.check()
    drive.heal()
    world.optimizer.zero_grad()
    drive.fail()
    before = world.optimizer.steps
    world.backward_of_the_other()
    if failure(world.params_backward) is None and random.random() < 0.5:
        failure(world.optimizer.step)
    if random.random() < 0.5:
        failure(world.optimizer.close)
    drive.heal()
    world.optimizer.close()  # what was raised is not raised again
    if world.optimizer.steps > before:
        world.reference_step()
    assert_same(world.params, world.plain)
    world.left_nothing()
