"""Ctrl-C at points throughout streaming, calling and closing: the model is streamed or has its own weights, and works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from deepnvme.streaming import Streaming, WeightStore, stream, streaming_of
from deepnvme.streaming.placeholder import Placeholder
from tests.faults.torture.interruption import Interruption, interrupted

from ..support.models import WIDTH

TORCH = (str(Path(torch.__file__).parent),)
POINTS = 25
"""Of each operation; the torture has them all in time."""


def made() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.LayerNorm(WIDTH))


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.ones(2, WIDTH))
        return result


@pytest.fixture
def store(drive: Path) -> Iterator[WeightStore]:
    with WeightStore.build(made(), drive / "store", blocks=["0", "1", "2", "3"]) as store:
        yield store


def has_its_own_weights(model: nn.Module) -> bool:
    return all(type(weight) is nn.Parameter and weight.requires_grad for weight in model.parameters())


def attempts(operation: Callable[[], object], again: Callable[[], Callable[[], object]]) -> Iterator[Interruption]:
    """``operation`` is run whole, to count its points, and what ``again`` makes is interrupted at each of some of them."""
    points = interrupted(0, operation, TORCH).passed
    assert points
    for number in range(1, points + 1, max(points // POINTS, 1)):
        yield interrupted(number, again(), TORCH)


def test_streaming_that_is_interrupted_has_begun_or_the_model_is_as_it_was(store: WeightStore) -> None:
    model, wanted = made(), output(made())

    def begin() -> None:
        stream(model, store, memory_budget=1 << 20)

    begun = 0
    for _ in attempts(lambda: stream(made(), store), lambda: begin):
        found = streaming_of(model)
        assert torch.equal(output(model), wanted)
        if found is not None:
            begun += 1
            found.close(restore=True)
        assert has_its_own_weights(model)
        with stream(model, store):
            assert torch.equal(output(model), wanted)
            streaming_of(model).close(restore=True)  # type: ignore[union-attr]
    assert begun < POINTS


@pytest.mark.parametrize("restore", [False, True])
def test_closing_that_is_interrupted_may_be_repeated(store: WeightStore, restore: bool) -> None:
    wanted = output(made())
    streams: list[Streaming] = []
    model = made()

    def another() -> Callable[[], None]:
        nonlocal model
        model = made()
        streams.append(stream(model, store))
        output(model)
        return lambda: streams[-1].close(restore=restore)

    for _ in attempts(another(), another):
        streams[-1].close(restore=restore)
        assert streaming_of(model) is None
        if restore:
            assert has_its_own_weights(model)
            assert torch.equal(output(model), wanted)


@pytest.mark.parametrize("restore", [False, ["0.weight"]], ids=["nothing", "one weight"])
def test_what_is_to_be_restored_may_be_more_after_an_interrupt(store: WeightStore, restore: bool | list[str]) -> None:
    model, wanted = made(), output(made())
    streams: list[Streaming] = []

    def another() -> Callable[[], None]:
        nonlocal model
        model = made()
        streams.append(stream(model, store))
        return lambda: streams[-1].close(restore=restore)

    ended = 0
    for interruption in attempts(another(), another):
        streams[-1].close(restore=True)
        if not isinstance(model[4].weight, Placeholder) and has_its_own_weights(model):
            assert torch.equal(output(model), wanted), interruption.where
        else:
            ended += bool(interruption.where)  # closing has fewer points where it does not wait for the drive
    assert ended < 3, "by an interrupt when all had been done"


def test_a_restored_model_requires_grad_as_before(store: WeightStore) -> None:
    model = made()
    for weight in model[1].parameters():
        weight.requires_grad_(False)
    with stream(model, store) as streaming:
        assert not any(weight.requires_grad for weight in model.parameters())
        streaming.close(restore=True)
    assert [weight.requires_grad for weight in model.parameters()] == [True, True, False, False, *[True] * 6]


def test_a_call_that_is_interrupted_leaves_a_stream_that_works(store: WeightStore) -> None:
    model, wanted = made(), output(made())
    budget = 2 * max(extent.nbytes for extent in store.extents.values())
    with stream(model, store, memory_budget=budget) as streaming:
        output(model)
        for _ in attempts(lambda: output(model), lambda: lambda: output(model)):
            for _ in range(2):
                assert torch.equal(output(model), wanted)
            assert streaming.report().resident_bytes <= budget
