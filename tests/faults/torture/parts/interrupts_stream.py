"""Ctrl-C at any point of building and opening a store, of streaming, calling and closing: all of it works afterwards."""

from __future__ import annotations

import random as randoms
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from deepnvme.streaming import Streaming, WeightStore, stream, streaming_of
from deepnvme.swap import TensorStore

from .. import Wrong, streams

SHORT, SECONDS = 12, 60

_points: dict[str, int] = {}


def attack(random: randoms.Random, directory: Path) -> None:
    attacked = random.choice([_build, _open, _stream, _call, _close, _restore])
    budget = random.randint(1, streams.BLOCKS) * streams.BLOCK_BYTES
    wanted = streams.output(streams.model())

    def number_of(operation: Callable[[], object]) -> int:
        """One of its points; how many there are is counted at the first try."""
        name = attacked.__name__
        if name not in _points:
            _points[name] = streams.interrupt(0, operation)[0].passed
            return 0
        return random.randint(1, _points[name])

    attacked(directory / "store", budget if random.random() < 0.5 else 0, wanted, number_of)


Number = Callable[[Callable[[], object]], int]


def _interrupted(operation: Callable[[], object], number_of: Number) -> KeyboardInterrupt | None:
    number = number_of(operation)
    return streams.interrupt(number, operation)[1] if number else None


def _build(path: Path, budget: int, wanted: torch.Tensor, number_of: Number) -> None:
    built: list[WeightStore] = []

    def build() -> None:
        if not built:
            built.append(streams.built(path))

    error = _interrupted(build, number_of)
    for store in built:
        store.close()
    built.clear()
    try:
        opened = WeightStore.open(path)
    except FileNotFoundError:
        opened = streams.built(path)  # nothing is in its way, while the traceback is alive
    with opened as store:
        store.verify()
        _works(streams.model(), store, budget, wanted)
    del error


def _open(path: Path, budget: int, wanted: torch.Tensor, number_of: Number) -> None:
    streams.built(path).close()
    opened: list[WeightStore] = []
    error = _interrupted(lambda: opened.append(WeightStore.open(path)), number_of)
    for store in opened:
        store.close()
    opened.clear()
    with WeightStore.open(path) as store:
        _works(streams.model(), store, budget, wanted)
    del error
    TensorStore(path, persist=True).close()  # nobody has it open any more


def _stream(path: Path, budget: int, wanted: torch.Tensor, number_of: Number) -> None:
    with streams.built(path) as store:
        model = streams.model()
        error = _interrupted(lambda: streaming_of(model) or stream(model, store, memory_budget=budget), number_of)
        _works_in_another_thread(model, wanted)
        found = streaming_of(model)
        if found is not None:
            found.close(restore=True)
        _has_its_weights(model, wanted)
        _works(model, store, budget, wanted)
        del error


def _call(path: Path, budget: int, wanted: torch.Tensor, number_of: Number) -> None:
    with streams.built(path) as store:
        model = streams.model()
        with stream(model, store, memory_budget=budget) as streaming:
            streams.check_output(model, wanted)

            def call() -> None:
                streams.output(model)
                streams.output(model)

            error = _interrupted(call, number_of)
            _works_in_another_thread(model, wanted)
            for _ in range(2):
                streams.check_output(model, wanted)
            if streaming.report().resident_bytes > budget:
                raise Wrong("more stays in memory than the budget")
            del error


def _close(path: Path, budget: int, wanted: torch.Tensor, number_of: Number) -> None:
    _closing(path, budget, wanted, number_of, restore=False)


def _restore(path: Path, budget: int, wanted: torch.Tensor, number_of: Number) -> None:
    _closing(path, budget, wanted, number_of, restore=True)


def _closing(path: Path, budget: int, wanted: torch.Tensor, number_of: Number, restore: bool) -> None:
    with streams.built(path) as store:
        model = streams.model()
        streaming: Streaming = stream(model, store, memory_budget=budget)
        streams.check_output(model, wanted)
        error = _interrupted(lambda: streaming.close(restore=restore), number_of)
        streaming.close(restore=restore)
        if streaming_of(model) is not None:
            raise Wrong("a closed stream has the model's forwards still")
        if restore:
            _has_its_weights(model, wanted)
            _works(model, store, budget, wanted)
        _works(streams.model(), store, budget, wanted)
        del error


def _works(model: nn.Module, store: WeightStore, budget: int, wanted: torch.Tensor) -> None:
    with stream(model, store, memory_budget=budget):
        for _ in range(2):
            streams.check_output(model, wanted)


def _works_in_another_thread(model: nn.Module, wanted: torch.Tensor) -> None:
    streams.in_another_thread(lambda: streams.check_output(model, wanted))


def _has_its_weights(model: nn.Module, wanted: torch.Tensor) -> None:
    if not all(type(weight) is nn.Parameter and weight.requires_grad for weight in model.parameters()):
        raise Wrong("the model has not its own weights again")
    streams.check_output(model, wanted)
