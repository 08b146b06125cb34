"""Random trainings: whatever was done before, and whatever failed, the offloaded optimizer has the bits of the one in memory."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ...support.engines import failing
from ...support.examples import examples
from ...support.training import Pair, assert_same, assert_same_state, backward, copied

CLASSES: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
)
WAYS: tuple[dict[str, Any], ...] = ({}, {"offload_gradients": True}, {"step_in_backward": True})
LENGTH = 14
TRAININGS = 40


class Trainings(Pair):
    """The same training by an optimizer in memory and by an offloaded one, whose drive may fail."""

    def __init__(self, drive: Path, dice: random.Random) -> None:
        self._dice = dice
        shapes = [(dice.choice([1, 7, 513, 4096, 4096, 9000]),) for _ in range(dice.randint(3, 9))]
        self.masters = dice.random() < 0.4
        optimizer_class, options = dice.choice(CLASSES)
        budget = dice.choice([0, 50_000, 100_000, 200_000, 1 << 40])
        precision = "masters" if self.masters else "float32"
        super().__init__(drive, precision, optimizer_class, options, shapes, dram_budget=budget, **dice.choice(WAYS))
        self.kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._late = {index for index in range(1, len(shapes)) if dice.random() < 0.4}

    def step_with(self, faults: bool) -> None:
        """Make a step of both; on errors of the drive as often as it takes."""
        missing = tuple(index for index in self._late if self._dice.random() < 0.7)
        self.reference.zero_grad()
        backward(self.plain, self.steps, missing)
        self.reference.step()
        self.optimizer.zero_grad()
        if faults:
            number, times = self._dice.randrange(12), self._dice.choice([1, 1, 2, 1000])
            with failing(self._dice.choice(["read", "write"]), number, times):
                backward(self.params, self.steps, missing)
                for _ in range(self._dice.choice([1, 3])):
                    self._try_to_step()
        else:
            backward(self.params, self.steps, missing)
        while self.optimizer.steps == self.steps:
            self._try_to_step()
        self.steps += 1
        assert self.optimizer.steps == self.steps
        assert_same(self.params, self.plain)

    def _try_to_step(self) -> None:
        if self.optimizer.steps == self.steps:
            with contextlib.suppress(OSError):
                self.optimizer.step()

    def keep_states(self) -> None:
        """Take the states of both, which must stay as they are."""
        self.kept.append((self.optimizer.state_dict(), copied(self.reference.state_dict())))

    def load_states(self) -> None:
        """Go on with states that were taken earlier."""
        if self.kept and not self.masters:  # whose parameters would have to be those of then
            found, expected = self._dice.choice(self.kept)
            self.optimizer.load_state_dict(found)
            self.reference.load_state_dict(copied(expected))

    def change_a_parameter(self) -> None:
        """As when a model is loaded."""
        index = self._dice.randrange(len(self.params))
        with torch.no_grad():
            for params in (self.params, self.plain):
                params[index].mul_(0.5)
            if self.masters:
                self.reference.masters[index].copy_(self.plain[index])


@pytest.mark.slow
@pytest.mark.parametrize("faults", [False, True])
def test_random_trainings_have_the_bits_of_the_optimizer_in_memory(drive: Path, faults: bool) -> None:
    for seed in range(examples(TRAININGS)):
        dice = random.Random(f"{seed} {faults}")
        (directory := drive / str(seed)).mkdir()
        both = Trainings(directory, dice)
        with both.optimizer:
            for _ in range(LENGTH):
                if dice.random() < 0.15:
                    both.keep_states()
                if dice.random() < 0.1:
                    both.load_states()
                if dice.random() < 0.1:
                    both.change_a_parameter()
                both.step_with(faults and dice.random() < 0.5)
            assert_same_state(both.optimizer.state_dict(), both.reference.state_dict())
            for found, expected in both.kept:
                assert_same_state(found, expected)
