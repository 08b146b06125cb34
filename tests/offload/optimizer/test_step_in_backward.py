"""step_in_backward: a sub-group is stepped when its gradients are complete, and they are freed."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepnvme.memory.alignment import PAGE
from deepnvme.swap import BufferPool

from ...support import training
from ...support.engines import FailingDrive, failing
from ...support.training import ADAM, Pair, assert_same, assert_same_state, backward, copied, parameters, snapshot
from ...support.training import FULL_SHAPES as SHAPES

optimizer_in = functools.partial(training.optimizer_in, step_in_backward=True, **ADAM)
PairInBackward = functools.partial(Pair, shapes=SHAPES, step_in_backward=True)


@pytest.mark.parametrize("dram_budget", [0, 100_000, 1 << 40])
@pytest.mark.parametrize("precision", ["float32", "masters"])
def test_the_same_bits(precision: str, dram_budget: int, drive: Path) -> None:
    with PairInBackward(drive, precision, dram_budget=dram_budget) as pair:
        for step in range(8):
            pair.zero_grad()
            pair.backward((1, 3) if step > 4 else ())
            pair.step_both()
            assert pair.optimizer.steps == pair.optimizer.report().step == step + 1
            assert all(param.grad is None for param in pair.params)
        pair.check()


def test_gradients_are_freed_as_they_are_used(drive: Path) -> None:
    params = parameters(shapes=[(4096,)] * 12)
    with optimizer_in(drive, params) as optimizer:
        most = 0

        def look(_: torch.Tensor) -> None:
            nonlocal most
            most = max(most, sum(param.grad is not None for param in params))

        for param in params:
            param.register_post_accumulate_grad_hook(look)
        before = snapshot(params)
        backward(params, 0)
        assert most == 0
        assert not any(torch.equal(param, old) for param, old in zip(params, before, strict=True))
        optimizer.step()


def test_a_first_step_has_one_sub_group_under_way_beside_the_states_that_it_makes(drive: Path) -> None:
    pool = BufferPool(1 << 20)
    params = parameters(shapes=[(4096,)] * 12)
    with optimizer_in(drive, params, pool=pool) as optimizer:
        backward(params, 0)
        assert 0 < pool.in_use <= (2 * (4 * 4096 + PAGE)) * 9 // 8  # two states, and what the pool lends more
        optimizer.step()
        backward(params, 1)
        assert pool.in_use > 2 * 2 * 4 * 4096  # all three
        optimizer.step()


def test_between_backward_and_step_another_backward_and_states_are_refused(drive: Path) -> None:
    with PairInBackward(drive) as pair:
        optimizer = pair.optimizer
        pair.backward()
        pair.step_both()
        pair.reference.zero_grad()
        states = copied(optimizer.state_dict())
        pair.backward()
        uses: list[Callable[[], object]] = [
            optimizer.zero_grad,
            optimizer.state_dict,
            lambda: optimizer.state[pair.params[0]],
            lambda: optimizer.load_state_dict(states),
        ]
        for use in uses:
            with pytest.raises(RuntimeError, match=r"backward has stepped some of the parameters: call step\(\) first"):
                use()
        with pytest.raises(RuntimeError, match="one backward for each step"):
            backward(pair.params, 1)
        pair.step_both()
        pair.check()
        optimizer.load_state_dict(states)


@pytest.mark.parametrize("precision", ["float32", "masters"])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_what_fails_in_backward_is_raised_by_step_and_the_next_one_finishes_it(
    operation: str, precision: str, drive: Path
) -> None:
    with PairInBackward(drive, precision, dram_budget=30_000) as pair:
        unfinished = number = 0
        engine: FailingDrive | None = None
        while pair.steps < 3 or engine is None or engine.failed:
            step = pair.steps
            error: OSError | None = None
            with failing(operation, number if step > 1 else 1000) as engine:
                pair.backward()  # never raises the drive's errors: the rest of it would be lost
                try:
                    pair.optimizer.step()
                except OSError as caught:
                    error = caught
            if error is not None:
                said = f"step {step + 1} is unfinished"
                unfinished += said in str(error)
                assert said in str(error) or f"as after step {step}" in str(error)
                pair.optimizer.step()
            pair.reference.step()
            pair.reference.zero_grad()
            pair.steps += 1
            assert_same(pair.params, pair.plain)
            assert pair.optimizer.steps == pair.steps
            number += step > 1
        assert number > 2
        assert unfinished > 1
        pair.check()


def test_an_optimizer_that_is_dropped_goes_though_its_parameters_stay(drive: Path) -> None:
    params = parameters(shapes=[(4096,), (4096,)])
    optimizer = optimizer_in(drive, params)
    backward(params, 0)
    optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    backward(params, 1)
    assert all(param.grad is not None for param in params)


def test_a_model_whose_backward_fails_midway_goes_on_with_the_gradients_there_are(drive: Path) -> None:
    """Or from a checkpoint."""
    params = parameters(shapes=SHAPES)
    with optimizer_in(drive, params) as optimizer:
        backward(params, 0)
        optimizer.step()
        weights, states = snapshot(params), copied(optimizer.state_dict())

        def fail(_: torch.Tensor) -> None:
            raise FloatingPointError("the model's own")

        hook = params[1].register_post_accumulate_grad_hook(fail)
        with pytest.raises(FloatingPointError):
            backward(params, 1)
        with pytest.raises(RuntimeError, match="backward has stepped some of the parameters"):
            optimizer.state_dict()
        optimizer.step()
        optimizer.load_state_dict(states)
        with torch.no_grad():
            for param, weight in zip(params, weights, strict=True):
                param.copy_(weight)
        assert_same_state(optimizer.state_dict(), states)
        hook.remove()
        backward(params, 1)
        optimizer.step()


def test_the_report_is_of_the_step_from_the_first_gradient_on(drive: Path) -> None:
    params = parameters(shapes=[(4096,)] * 8)
    with optimizer_in(drive, params) as optimizer:
        optimizer.measure_limits(1 << 20)
        for step in range(3):
            begun = time.perf_counter()
            backward(params, step)
            time.sleep(0.01)
            optimizer.step()
            seconds = time.perf_counter() - begun
            report = optimizer.report()
            assert report.sub_groups == 8
            assert report.bytes_written == 8 * 2 * 4 * 4096  # two states
            assert 0.01 < report.seconds <= seconds
            assert max(report.reading, report.writing) <= report.seconds
            assert report.share_of_limit is not None


def test_clipping_is_refused(drive: Path) -> None:
    with optimizer_in(drive, parameters()) as optimizer, pytest.raises(RuntimeError, match="to clip, set it to False"):
        optimizer.clip_grad_norm_(1.0)
