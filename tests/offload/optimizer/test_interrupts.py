"""Ctrl-C while a public method of an OffloadedOptimizer waits: it is as before, or says what is unfinished."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ...support.interrupts import ctrl_c_every, ctrl_c_in_a_wait_for
from ...support.training import Pair, backward, copied

SHAPES = [(4096,)] * 6


def pair_in(drive: Path, **options: Any) -> Pair:
    """After two steps."""
    pair = Pair(drive, shapes=SHAPES, **options)
    for _ in range(2):
        pair.zero_grad()
        pair.backward()
        pair.step_both()
    pair.zero_grad()
    return pair


CALLS: dict[str, tuple[str, dict[str, Any], Callable[[Any], object]]] = {
    "clip_grad_norm_": ("read", {"offload_gradients": True}, lambda optimizer: optimizer.clip_grad_norm_(1e6)),
    "state_dict": ("write", {"dram_budget": 1 << 40}, lambda optimizer: optimizer.state_dict()),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_interrupted_in_a_wait_can_be_made_again(drive: Path, call: str) -> None:
    operation, options, use = CALLS[call]
    with pair_in(drive, **options) as pair:
        pair.backward()
        with ctrl_c_in_a_wait_for(operation), pytest.raises(KeyboardInterrupt):
            use(pair.optimizer)
        use(pair.optimizer)
        pair.step_both()
        pair.check()


def test_a_backward_that_is_interrupted_in_a_wait_is_run_again_after_zero_grad(drive: Path) -> None:
    with pair_in(drive, offload_gradients=True) as pair:
        with ctrl_c_in_a_wait_for("write"), pytest.raises(KeyboardInterrupt):
            backward(pair.params, 2)
        pair.optimizer.zero_grad()
        pair.backward()
        pair.step_both()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dram_budget": 60_000}], ids=str)
def test_storms_of_ctrl_c_leave_states_whole_that_are_taken_and_loaded(drive: Path, options: dict[str, Any]) -> None:
    with Pair(drive, **options) as pair:
        optimizer = pair.optimizer
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
