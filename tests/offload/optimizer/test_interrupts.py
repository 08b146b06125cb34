"""Ctrl-C while a public method of an OffloadedOptimizer waits: it is as before, or says what is unfinished."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ...support.interrupts import ctrl_c_every, ctrl_c_in_a_wait_for
from ...support.training import ADAM, Pair, assert_same, assert_same_state, backward, copied, optimizer_in, parameters

SHAPES = [(4096,)] * 6


def both(drive: Path, **options: Any) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter], Any, Any]:
    """Parameters and their optimizer in memory, and the same offloaded, after two steps."""
    plain, params = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    reference, optimizer = torch.optim.AdamW(plain, **ADAM), optimizer_in(drive, params, **ADAM, **options)
    for step in range(2):
        for each, its in ((plain, reference), (params, optimizer)):
            its.zero_grad()
            backward(each, step)
            its.step()
    reference.zero_grad()
    optimizer.zero_grad()
    return plain, params, reference, optimizer


CALLS: dict[str, tuple[str, dict[str, Any], Callable[[Any], object]]] = {
    "clip_grad_norm_": ("read", {"offload_gradients": True}, lambda optimizer: optimizer.clip_grad_norm_(1e6)),
    "state_dict": ("write", {"dram_budget": 1 << 40}, lambda optimizer: optimizer.state_dict()),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_interrupted_in_a_wait_can_be_made_again(drive: Path, call: str) -> None:
    operation, options, use = CALLS[call]
    plain, params, reference, optimizer = both(drive, **options)
    with optimizer:
        backward(plain, 2)
        backward(params, 2)
        with ctrl_c_in_a_wait_for(operation), pytest.raises(KeyboardInterrupt):
            use(optimizer)
        use(optimizer)
        reference.step()
        optimizer.step()
        assert_same(params, plain)
        assert_same_state(optimizer.state_dict(), reference.state_dict())


def test_a_backward_that_is_interrupted_in_a_wait_is_run_again_after_zero_grad(drive: Path) -> None:
    plain, params, reference, optimizer = both(drive, offload_gradients=True)
    with optimizer:
        with ctrl_c_in_a_wait_for("write"), pytest.raises(KeyboardInterrupt):
            backward(params, 2)
        optimizer.zero_grad()
        backward(plain, 2)
        backward(params, 2)
        reference.step()
        optimizer.step()
        assert_same(params, plain)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dram_budget": 60_000}], ids=str)
def test_storms_of_ctrl_c_leave_states_whole_that_are_taken_and_loaded(drive: Path, options: dict[str, Any]) -> None:
    pair = Pair(drive, **options)
    with pair.optimizer as optimizer:
        pair.step(2)
        for number in range(30):
            states = copied(pair.reference.state_dict())
            with ctrl_c_every(0.002):
                for _ in range(5):
                    try:
                        taken = optimizer.state_dict()
                        optimizer.load_state_dict(taken if number % 2 else states)
                    except KeyboardInterrupt:
                        torch.set_grad_enabled(True)  # which torch's own decorators may not have come to
            pair.step()
        pair.check()
