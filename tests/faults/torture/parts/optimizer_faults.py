"""Reads and writes of an OffloadedOptimizer that fail, some or all for a while: it comes to the same steps, bit for bit."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from pathlib import Path
from random import Random

from ....support.engines import FailingDrive
from ....support.training import assert_same, copied
from .. import Wrong
from .interrupts_optimizer import World, doubled, some_world

SHORT = 10
SECONDS = 60

GONE = "run backward again"


class FaultyDrive:
    """Fails a share of the transfers: some at once, some when they are asked how they ended."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.rate = {"read": 0.0, "write": 0.0}
        self.transfers = FailingDrive(lambda operation: random.random() < self.rate[operation], lambda: random.random() < 0.2)

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
    world, drive = some_world(random, directory), FaultyDrive(random)
    with drive.transfers:
        _train(world, drive, random)


def _train(world: World, drive: FaultyDrive, random: Random) -> None:
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
