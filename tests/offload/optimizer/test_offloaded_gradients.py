"""offload_gradients: gradients leave memory during backward, and the step has the bits of one with them in memory."""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path

import pytest
import torch

from deepnvme.states.gradients import GRADIENTS_IN_FLIGHT
from deepnvme.swap import BufferPool

from ...support import training
from ...support.engines import failing
from ...support.training import (
    ADAM,
    Pair,
    assert_same,
    backward,
    parameters,
)
from ...support.training import FULL_SHAPES as SHAPES

optimizer_in = functools.partial(training.optimizer_in, offload_gradients=True, **ADAM)
PairOffloading = functools.partial(Pair, shapes=SHAPES, offload_gradients=True)


@pytest.mark.parametrize("memory_budget", [0, 150_000, 1 << 40])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "masters"])
def test_the_same_bits_with_several_backwards_and_clipping(precision: str, memory_budget: int, drive: Path) -> None:
    with PairOffloading(drive, precision, memory_budget=memory_budget) as pair:
        for step in range(6):
            pair.zero_grad()
            for number in range(1 + step % 3):
                missing = (1, 3) if number == 0 and step > 3 else ()
                for params in (pair.plain, pair.params):
                    backward(params, 10 * step + number, missing)
                assert all(param.grad is None for param in pair.params)
            if step % 2:
                # several backwards make norms of cut parameters from their pieces, which may round otherwise
                most = 1e6 if step % 3 else 5.0
                norms = torch.nn.utils.clip_grad_norm_(pair.plain, most), pair.optimizer.clip_grad_norm_(most)
                torch.testing.assert_close(norms[1], norms[0], rtol=0 if step % 3 == 0 else 1e-6, atol=0)
            pair.step_both()
        pair.check()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_norms_are_those_in_memory(norm_type: float, drive: Path) -> None:
    with PairOffloading(drive) as pair:
        pair.backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in pair.plain if p.grad is not None], norm_type)
        torch.testing.assert_close(pair.optimizer.clip_grad_norm_(1.0, norm_type), expected, rtol=1e-5, atol=0)
        # they are scaled when they are used
        torch.testing.assert_close(pair.optimizer.clip_grad_norm_(1.0, norm_type), torch.tensor(1.0), rtol=1e-5, atol=0)


def test_gradients_given_by_hand_and_of_parameters_thawed_later_count(drive: Path) -> None:
    plain, params = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    for each in (plain, params):
        each[3].requires_grad_(False)
    reference = torch.optim.AdamW(plain, **ADAM)
    with optimizer_in(drive, params) as optimizer:
        for each in (plain, params):
            each[3].requires_grad_(True)
            backward(each, 0)
        assert params[0].grad is None
        assert plain[2].grad is not None
        params[2].grad = torch.ones(513)  # is one more backward's
        plain[2].grad += 1
        assert optimizer.clip_grad_norm_(3.0) == torch.nn.utils.clip_grad_norm_(plain, 3.0)
        reference.step()
        optimizer.step()
        assert_same(params, plain)


def test_after_clipping_only_zero_grad_lets_gradients_come(drive: Path) -> None:
    with PairOffloading(drive) as pair:
        backward(pair.params, 5)
        pair.optimizer.clip_grad_norm_(0.1)
        for use in (lambda: backward(pair.params, 6), pair.optimizer.step):
            with pytest.raises(RuntimeError, match=r"were clipped, and others have come: call zero_grad\(\)"):
                use()
        pair.optimizer.zero_grad()
        pair.backward()
        pair.step_both()


def test_a_step_that_fails_keeps_them_for_the_next_try(drive: Path) -> None:
    with PairOffloading(drive, memory_budget=60_000) as pair:
        number = 0
        for step in range(40):
            pair.backward()
            torch.nn.utils.clip_grad_norm_(pair.plain, 2.0)
            pair.optimizer.clip_grad_norm_(2.0)
            error: OSError | None = None
            with failing(("read", "write")[step % 2], number) as engine:
                try:
                    pair.optimizer.step()
                except OSError as caught:
                    error = caught
            if engine.failed:
                assert error is not None
                assert f"as after step {step}" in str(error) or f"step {step + 1} is unfinished" in str(error)
                pair.optimizer.step()
            elif step % 2:
                break
            pair.reference.step()
            pair.steps += 1
            assert_same(pair.params, pair.plain)
            pair.zero_grad()
            number += step % 2
        assert number > 4


@pytest.mark.parametrize("during", ["backward", "clipping"])
def test_a_write_that_fails_in_backward_is_told_by_what_comes_next_and_no_gradient_is_lost(during: str, drive: Path) -> None:
    with PairOffloading(drive) as pair:
        number = failed = 1
        while failed:
            with failing("write", number, 3) as engine:
                pair.backward()
            failed = engine.failed
            if failed:
                with pytest.raises(OSError, match="write of"):
                    _ = pair.optimizer.clip_grad_norm_(1e6) if during == "clipping" else pair.optimizer.step()
                assert pair.optimizer.steps == pair.steps
            if during == "clipping":
                pair.optimizer.clip_grad_norm_(1e6)
            pair.step_both()
            pair.zero_grad()
            assert pair.optimizer.steps == pair.steps
            number += 1
        assert number > 3


def test_a_write_that_fails_in_backward_loses_no_change_of_a_parameter_by_other_code(drive: Path) -> None:
    with PairOffloading(drive, "masters") as pair:
        pair.backward()
        pair.step_both()
        pair.zero_grad()
        with torch.no_grad():
            for params in (pair.plain, pair.params):
                params[1].mul_(0.5)
            pair.reference.masters[1].copy_(pair.plain[1])
        backward(pair.plain, 7)
        with failing("write", first=0, count=1 << 30):
            backward(pair.params, 7)
            with pytest.raises(OSError, match="as after step 1"):
                pair.optimizer.step()
        pair.step_both()
        pair.check()


def test_few_are_in_memory_at_a_time(drive: Path) -> None:
    params = parameters(shapes=[(4096,)] * 24)
    pool = BufferPool(1 << 20)
    with optimizer_in(drive, params, pool=pool) as optimizer:
        most = 0

        def look(_: torch.Tensor) -> None:
            nonlocal most
            most = max(most, pool.in_use)

        for param in params:
            param.register_post_accumulate_grad_hook(look)
        for step in range(2):
            backward(params, step)
        assert 0 < most <= GRADIENTS_IN_FLIGHT * 4096 * 4 * 9 // 8
        optimizer.step()


def test_gradients_are_told_of_in_the_report(drive: Path) -> None:
    params = parameters(shapes=[(4096,)] * 8)
    numel = 8 * 4096
    with optimizer_in(drive, params) as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            begun = time.perf_counter()
            backward(params, step)
            optimizer.step()
            seconds = time.perf_counter() - begun
            report = optimizer.report()
            assert report.bytes_written == (1 + 2) * 4 * numel  # gradients, and two states
            # Gradients and states still in memory are not read: on a slow drive, one sub-group's states are, on a fast one three.
            least, most = (8 * 4 * 4096 + states * 2 * 4 * 4096 for states in ((0, 0), (7, 7), (5, 7))[step])
            assert least - GRADIENTS_IN_FLIGHT * 4 * 4096 <= report.bytes_read <= most
            assert 0 < report.computing + report.waiting <= report.seconds <= seconds
            assert max(report.reading, report.writing) <= report.seconds


def test_backwards_of_several_threads_take_turns(drive: Path) -> None:
    """As each device has a thread of its own in backward."""
    with PairOffloading(drive, shapes=[(4096,)] * 8) as pair:
        for _ in range(20):
            pair.zero_grad()
            for half in (pair.plain[:4], pair.plain[4:]):
                backward(half, pair.steps)
            threads = [threading.Thread(target=backward, args=(half, pair.steps)) for half in (pair.params[:4], pair.params[4:])]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            pair.step_both()


def test_sparse_gradients_are_refused(drive: Path) -> None:
    embedding = torch.nn.Embedding(50, 8, sparse=True)
    with optimizer_in(drive, embedding.parameters()) as optimizer:
        with torch.sparse.check_sparse_tensor_invariants(), pytest.raises(TypeError, match="set offload_gradients to False"):
            embedding(torch.tensor([1, 2])).sum().backward()
        del optimizer


def test_one_that_is_closed_leaves_no_hooks(drive: Path) -> None:
    params = parameters()
    with optimizer_in(drive, params) as optimizer:
        assert optimizer.clip_grad_norm_(1.0) == 0  # as there are none
    backward(params, 0)
    assert all(param.grad is not None for param in params if param.numel())
