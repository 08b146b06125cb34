"""Random trainings by an OffloadedOptimizer, on a drive that is well or fails, or under Ctrl-C: the bits of the one in memory."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from ....support.engines import FailingDrive
from ....support.interrupts import ctrl_c_every
from ....support.training import Lion, Pair, assert_same, assert_same_state, backward, copied
from .. import Leaked, Wrong

SHORT = 12
SECONDS = 60

CLASSES: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    (torch.optim.AdamW, {"lr": 1e-2, "foreach": True, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    (Lion, {}),
)
Attempt = Callable[[Callable[[], object]], object]
"""Calls something while something else goes wrong, and swallows what that raises."""


class Training(Pair):
    """The same training by an optimizer in memory and by an offloaded one."""

    def __init__(self, directory: Path, random: Random) -> None:
        self._random = random
        shapes = [(random.choice([1, 7, 513, 4096, 4096, 9000]),) for _ in range(random.randint(3, 9))]
        optimizer_class, options = random.choice(CLASSES)
        super().__init__(
            directory, random.choice(["float32", "float32", "masters"]), optimizer_class, options, shapes,
            memory_budget=random.choice([0, 0, 50_000, 100_000, 1 << 40]),
            offload_gradients=random.random() < 0.5,
        )  # fmt: skip
        self.kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._late = {index for index in range(1, len(shapes)) if random.random() < 0.4}

    def go_on(self, attempt: Attempt, in_backward: bool = True) -> None:
        """Do this and that, and make a step: by ``attempt``, and where that failed again. ``in_backward``: that is one too."""
        random, optimizer = self._random, self.optimizer
        if random.random() < 0.15:
            self.kept.append((optimizer.state_dict(), copied(self.reference.state_dict())))
        if random.random() < 0.1 and self.kept and self.precision != "masters":  # whose parameters would have to be those of then
            found, expected = random.choice(self.kept)
            attempt(lambda: optimizer.load_state_dict(found))
            optimizer.load_state_dict(found)
            self.reference.load_state_dict(copied(expected))
        if random.random() < 0.1:
            self._change_a_parameter()
        missing = tuple(index for index in self._late if random.random() < 0.7)
        self.reference.zero_grad()
        backward(self.plain, self.steps, missing)
        self.reference.step()
        optimizer.zero_grad()

        def first() -> None:
            backward(self.params, self.steps, missing)
            if in_backward:
                optimizer.step()

        (attempt if in_backward else _plainly)(first)
        for _ in range(random.choice([1, 3, 10])):
            if optimizer.steps == self.steps:
                attempt(optimizer.step)
        for _ in range(5):
            if optimizer.steps == self.steps:
                with contextlib.suppress(OSError):  # of backward
                    optimizer.step()
        self.steps += 1
        assert optimizer.steps == self.steps
        assert_same(self.params, self.plain)

    def _change_a_parameter(self) -> None:
        """As when a model is loaded."""
        index = self._random.randrange(len(self.params))
        with torch.no_grad():
            for params in (self.params, self.plain):
                params[index].mul_(0.5)
            if self.precision == "masters":
                self.reference.masters[index].copy_(self.plain[index])

    def end(self) -> None:
        """Compare all states, those that were taken earlier too."""
        self.check()
        for found, expected in self.kept:
            assert_same_state(found, expected)


def _plainly(operation: Callable[[], object]) -> None:
    operation()


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

    def attempt(self, operation: Callable[[], object]) -> None:
        """Meanwhile it fails."""
        self.fail()
        try:
            operation()
        except OSError as error:
            if error.errno != errno.EIO or error.filename is None:
                raise Wrong(f"{error!r} has not the errno and the filename of the drive's error") from error
        finally:
            self.heal()


def attack(random: Random, directory: Path) -> None:
    drive = FaultyDrive(random)

    def interrupted(operation: Callable[[], object]) -> None:
        with ctrl_c_every(random.choice([0.001, 0.003])):
            try:
                operation()
                training.optimizer.state_dict()
            except (KeyboardInterrupt, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "unfinished" not in str(error):
                    raise
                torch.set_grad_enabled(True)  # which torch's own decorators may not have come to

    attempt, in_backward = random.choice([(_plainly, True), (drive.attempt, True), (interrupted, False)])
    with drive.transfers, Training(directory, random) as training:
        for _ in range(14):
            training.go_on(attempt, in_backward)
        training.end()
        if attempt == drive.attempt:
            backward(training.params, training.steps)
            drive.attempt(training.optimizer.step)
    if (directory / "states").exists():
        raise Leaked("the files are there after close()")
