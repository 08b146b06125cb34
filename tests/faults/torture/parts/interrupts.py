"""Storms of Ctrl-C over what changes state: afterwards it works, and the drive has the last commit."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random as randoms
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from deepnvme.offload import OffloadedTraining
from deepnvme.streaming import WeightStore, stream, streaming_of

from ....support.activations import training_in
from ....support.interrupts import ctrl_c_every, lost_in_finalizers
from ....support.offloaded_training import assert_same_values
from .. import Torn, Wrong, streams
from ..ways import REPEATABLE, CommittingRows

SHORT, SECONDS = 5, 60
_STORM_SECONDS = 2.0


def attack(random: randoms.Random, directory: Path) -> None:
    with lost_in_finalizers(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # a file that was just opened is closed by its finalizer
        random.choice((_saves, _saves, _saves, _stream, _activations, _training))(random, directory)


def _storm(random: randoms.Random, operation: Callable[[int], object], check: Callable[[int], object]) -> None:
    """Call ``operation`` with 1, 2, 3 and so on under Ctrl-C for two seconds; call ``check`` after each, without."""
    until = time.monotonic() + _STORM_SECONDS
    heard = 0
    for number in itertools.count(1):
        with ctrl_c_every(random.choice((0.0002, 0.001, 0.003, 0.01))) as storm:
            try:
                operation(number)
            except KeyboardInterrupt:
                torch.set_grad_enabled(True)  # which torch's own decorators may not have come to
        streams.in_another_thread(lambda number=number: check(number))  # type: ignore[misc]
        heard += storm.count
        if time.monotonic() > until:
            break
    if not heard:
        raise Wrong("no Ctrl-C was heard")


def _saves(random: randoms.Random, directory: Path) -> None:
    """What is saved or committed under Ctrl-C is there, or what was before; and the next is saved by the same object."""
    way = random.choice((*REPEATABLE, CommittingRows))
    saving = way(directory, durable=random.random() < 0.3)
    saving.save(0)
    last = 0

    def check(number: int) -> None:
        nonlocal last
        if random.random() < 0.7:
            found = saving.load()
            if found not in (last, 2 * number - 1):
                raise Torn(f"{found} is there, neither {last} nor {2 * number - 1}")
        last = 2 * number
        saving.save(last)
        if saving.load() != last or saving.leftovers():
            raise Wrong(f"the next save has left {saving.load()} and {saving.leftovers()}")

    _storm(random, lambda number: saving.save(2 * number - 1), check)


def _stream(random: randoms.Random, directory: Path) -> None:
    wanted, model = streams.output(streams.model()), streams.model()
    budget = random.randint(2, streams.BLOCKS) * streams.BLOCK_BYTES
    streams.built(directory / "store").close()
    with WeightStore.open(directory / "store") as store:
        with stream(model, store, memory_budget=budget) as streaming:

            def check(number: int) -> None:
                streams.check_output(model, wanted)
                if streaming.report().resident_bytes > budget:
                    raise Wrong("more stays in memory than the budget")

            _storm(random, lambda number: [streams.output(model) for _ in range(20)], check)
            with contextlib.suppress(KeyboardInterrupt), ctrl_c_every(random.choice((0.0005, 0.002))):
                streaming.close(restore=True)
            streaming.close(restore=True)
        if streaming_of(model) is not None:
            raise Wrong("a closed stream still has the model's forwards")
        streams.check_output(model, wanted)


def _activations(random: randoms.Random, directory: Path) -> None:
    with training_in(directory, nbytes=random.choice((1 << 14, 1 << 19))) as training:
        warnings.simplefilter("ignore", RuntimeWarning)

        def check(number: int) -> None:
            training.check_nothing_is_held()

        for _ in range(3):
            _storm(random, lambda number: training.step(), check)
            training.step()


def _training(random: randoms.Random, directory: Path) -> None:
    """Steps of OffloadedTraining: each is made as a whole or not at all, with the bits of training in memory."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(random.randint(2, 5))))
    in_memory = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(in_memory.parameters(), lr=1e-2)
    states = [copy.deepcopy(in_memory.state_dict())]
    options = {
        "micro_batches": random.choice([1, 2]),
        "activations": random.choice(["memory", "nvme"]),
        "accumulation": random.choice(["vertical", "horizontal"]),
        "memory_budget": random.choice([0, 1 << 20]),
        "max_norm": random.choice([None, 0.1]),
    }

    def batch(step: int) -> torch.Tensor:
        return torch.randn(8, 64, generator=torch.Generator().manual_seed(step))

    def loss(of: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = of(rows)
        return output.square().mean()

    def state_after(steps: int) -> dict[str, torch.Tensor]:
        while len(states) <= steps:
            parts = options["micro_batches"]
            for part in batch(len(states) - 1).chunk(parts):
                (loss(in_memory, part) / parts).backward()
            if options["max_norm"] is not None:
                torch.nn.utils.clip_grad_norm_(in_memory.parameters(), options["max_norm"])
            optimizer.step()
            optimizer.zero_grad()
            states.append(copy.deepcopy(in_memory.state_dict()))
        return states[steps]

    training = OffloadedTraining(model, torch.optim.AdamW, path=directory, lr=1e-2, **options)

    def step(_: int) -> None:
        parts = batch(training.steps).chunk(options["micro_batches"])
        training.run_micro_batches([lambda part=part: loss(model, part) / len(parts) for part in parts])
        training.step()

    def check(_: int) -> None:
        training.undo_step()  # if the storm came between the micro-batches and step()
        assert_same_values(training.state_dict()["model"], state_after(training.steps))

    _storm(random, step, check)
    before = training.steps
    step(0)
    if training.steps != before + 1:
        raise Wrong(f"{training.steps} steps after a step that was made, {before} before")
    check(0)
    training.close(restore=True)
