"""ZeRO stage 3's optimizer swappers, with transfers that fail and Ctrl-C at any point: all ends as in memory, bit for bit."""

from __future__ import annotations

import contextlib
import errno
import gc
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

from deepnvme.swap import buffer_pool

from ....integrations.deepspeed.swap_tensor.stage3 import Training
from ....support.engines import FailingDrive
from ....support.interrupts import ctrl_c_every
from .. import Leaked, Wrong

SHORT = 4
SECONDS = 120

_NUMEL = 263_000  # in fp32 little more than the least that is swapped
_MOST_REPEATS = 200


def attack(random: Random, directory: Path) -> None:
    torch.manual_seed(random.randrange(1 << 31))
    in_use = buffer_pool().in_use
    _Attack(random, directory).run()
    gc.collect()
    if buffer_pool().in_use > in_use:
        raise Leaked(f"{buffer_pool().in_use - in_use} bytes of the pool")


class _Attack:
    """One swapper, some steps of training with it, and what programs do between backward and step."""

    def __init__(self, random: Random, directory: Path) -> None:
        self._random = random
        # Apart from the calls' own, so that how transfers interleave does not change which calls are made.
        lot = Random(random.randrange(1 << 31))
        self._chance = 0.0
        self._drive = FailingDrive(lambda _: lot.random() < self._chance, lambda: lot.random() < 0.5)
        self._interrupts = random.random() < 0.6
        groups = random.choice((2, 3, 4))
        self._training = Training(
            directory,
            buffer_count=random.choice((1, 4, 7, 10, 40)),
            pipelined=random.random() < 0.5,
            numels=[_NUMEL + random.randrange(2000) for _ in range(groups)],
        )
        self._chance = random.choice((0.0, 0.05, 0.2)) if self._interrupts else random.choice((0.05, 0.2, 0.5))

    def run(self) -> None:
        with self._drive:
            self._train()
        with contextlib.suppress(OSError):  # of a write before
            self._training.swapper.flush()
        self._training.swapper.flush()
        self._training.assert_same_as_in_memory()

    def _train(self) -> None:
        for _ in range(self._random.choice((2, 3))):
            self._backward()
            for _ in range(self._random.randrange(1, 5)):
                self._random.choice((self._set_states, self._set_gradient, self._look, self._flush, self._copy_files))()
            self._step()

    def _insist(self, call: Callable[[], object], ended: Callable[[], bool] = lambda: False) -> None:
        """Repeat a call until it ends without an error, or has ended before a Ctrl-C that came late."""
        for _ in range(_MOST_REPEATS):
            storms = self._interrupts and self._random.random() < 0.7
            try:
                with ctrl_c_every(0.002) if storms else contextlib.nullcontext():
                    call()
                return
            except KeyboardInterrupt:
                if ended():
                    return
            except OSError as error:
                if error.errno != errno.EIO or error.filename is None:
                    raise Wrong(f"an error that does not say what failed: {error!r}, {error.filename!r}") from error
        raise Wrong(f"{call} did not succeed in {_MOST_REPEATS} tries")

    def _swap_in(self, number: int, following: int | None = None) -> torch.Tensor:
        parameters, swapper = self._training.parameters, self._training.swapper
        parameter = parameters[number]
        ahead = None if following is None else parameters[following]
        self._insist(lambda: swapper.swap_in_optimizer_state(parameter, ahead))
        copy = self._training.copies[number]
        if not torch.equal(parameter, copy):
            raise Wrong(f"sub-group {number} has other weights than in memory")
        if copy.grad is not None and (parameter.grad is None or not torch.equal(parameter.grad, copy.grad)):
            raise Wrong(f"sub-group {number} has another gradient than in memory")
        return parameter

    def _swapped_out(self, number: int, call: Callable[[], object]) -> None:
        parameter = self._training.parameters[number]
        self._insist(call, ended=lambda: parameter.numel() == 0)
        if parameter.numel() or parameter.grad is not None:
            raise Wrong(f"sub-group {number} is still in memory after it was swapped out")

    def _backward(self) -> None:
        training = self._training
        for number in reversed(range(len(training.parameters))):
            numel = training.numels[number]
            gradient = training.random(numel)
            training.copies[number].grad = gradient.clone()
            cut = numel // 3
            parameter = training.parameters[number]
            for start, part in ((cut, gradient[cut:]), (0, gradient[:cut])):
                self._insist(lambda: training.swapper.swap_out_gradients(parameter, [start], [part]))  # noqa: B023

    def _set_states(self) -> None:
        training, number = self._training, self._random.randrange(len(self._training.parameters))
        parameter, copy = self._swap_in(number), training.copies[number]
        value = training.random(1000)
        for tensor in (parameter, copy):
            tensor.data[77:1077] = value
        self._swapped_out(number, lambda: training.swapper.swap_out_optimizer_state(parameter))

    def _set_gradient(self) -> None:
        training, number = self._training, self._random.randrange(len(self._training.parameters))
        parameter, copy = self._swap_in(number), training.copies[number]
        for tensor in (parameter, copy):
            assert tensor.grad is not None
            tensor.grad.mul_(3)
        self._swapped_out(
            number, lambda: training.swapper.writeback_optimizer_state_and_gradients(parameter, bool(number % 2), True)
        )

    def _look(self) -> None:
        number = self._random.randrange(len(self._training.parameters))
        parameter = self._swap_in(number)
        self._swapped_out(number, lambda: self._training.swapper.release_swap_buffers(parameter))

    def _flush(self) -> None:
        self._insist(self._training.swapper.flush)

    def _copy_files(self) -> None:
        self._insist(lambda: self._training.swapper.swap_folder)

    def _step(self) -> None:
        training = self._training
        for number in range(len(training.parameters)):
            following = number + 1 if number + 1 < len(training.parameters) else None
            parameter = self._swap_in(number, following)
            training.step_one(number)
            training.copies[number].grad = None
            self._swapped_out(number, lambda: training.swapper.swap_out_optimizer_state(parameter))  # noqa: B023
