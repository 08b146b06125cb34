"""offload_gradients: gradients leave memory during backward, and the step has the bits of one with them in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.swap import BufferPool
from deepnvme.swap.gradients import OPEN

from .training import (
    InMemory,
    assert_same,
    assert_same_state,
    failing,
    give_gradients,
    parameters,
    snapshot,
)

ADAM: dict[str, Any] = {"lr": 1e-2, "fused": True}
SHAPES = [(41, 300), (7,), (513,), (90, 90), (3, 5), (4099,)]


def optimizer_in(drive: Path, params: Any, **options: Any) -> deepnvme.OffloadedOptimizer:
    return deepnvme.OffloadedOptimizer(
        params,
        torch.optim.AdamW,
        nvme_path=drive / "states",
        sub_group_size=4096,
        offload_gradients=True,
        **ADAM,
        **options,
    )


def backward(params: list[torch.nn.Parameter], step: int, missing: tuple[int, ...] = ()) -> None:
    """Gradients that autograd makes, in its order."""
    random = torch.Generator().manual_seed(step)
    factors = [torch.randn(param.shape, generator=random).to(param.dtype) for param in params]
    parts = [(param * factor).sum() for param, factor in zip(params, factors, strict=True)]
    torch.stack([part for index, part in enumerate(parts) if index not in missing]).sum().backward()


@pytest.mark.parametrize("dram_budget", [0, 150_000, 1 << 40])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "masters"])
def test_the_same_bits_with_several_backwards_and_clipping(precision: str, dram_budget: int, drive: Path) -> None:
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    plain, params = parameters(dtype, SHAPES), parameters(dtype, SHAPES)
    masters = precision == "masters"
    reference = InMemory(plain, torch.optim.AdamW, **ADAM) if masters else torch.optim.AdamW(plain, **ADAM)
    with optimizer_in(drive, params, master_weights=masters, dram_budget=dram_budget) as optimizer:
        for step in range(8):
            optimizer.zero_grad()
            for param in plain:
                param.grad = None
            for number in range(1 + step % 3):
                missing = (1, 3) if number == 0 and step > 4 else ()
                backward(plain, 10 * step + number, missing)
                backward(params, 10 * step + number, missing)
                assert all(param.grad is None for param in params)
            if step % 2:
                # several backwards make norms of cut parameters from their pieces, which may round otherwise
                norms = torch.nn.utils.clip_grad_norm_(plain, 1e6 if step % 3 else 5.0), optimizer.clip_grad_norm_(
                    1e6 if step % 3 else 5.0
                )
                torch.testing.assert_close(norms[1], norms[0], rtol=0 if step % 3 == 0 else 1e-6, atol=0)
            reference.step()
            optimizer.step()
            assert_same(params, plain)
        expected = reference.optimizer if isinstance(reference, InMemory) else reference
        assert_same_state(optimizer.state_dict(), expected.state_dict())


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_norms_are_those_in_memory(norm_type: float, drive: Path) -> None:
    plain, params = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    with optimizer_in(drive, params) as optimizer:
        backward(plain, 0)
        backward(params, 0)
        expected = torch.nn.utils.get_total_norm([p.grad for p in plain if p.grad is not None], norm_type)
        torch.testing.assert_close(optimizer.clip_grad_norm_(1.0, norm_type), expected, rtol=1e-5, atol=0)
        # they are scaled when they are used
        torch.testing.assert_close(optimizer.clip_grad_norm_(1.0, norm_type), torch.tensor(1.0), rtol=1e-5, atol=0)


def test_a_norm_without_gradients_is_zero(drive: Path) -> None:
    with optimizer_in(drive, parameters()) as optimizer:
        assert optimizer.clip_grad_norm_(1.0) == 0


def test_gradients_given_by_hand_and_of_parameters_thawed_later_count(drive: Path) -> None:
    plain, params = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    for each in (plain, params):
        each[3].requires_grad_(False)
    reference = torch.optim.AdamW(plain, **ADAM)
    with optimizer_in(drive, params) as optimizer:
        for each in (plain, params):
            each[3].requires_grad_(True)
            backward(each, 0)
            assert each[0].grad is None or each is plain
            each[2].grad = torch.ones(513)
        plain[2].grad = torch.ones(513) + gradient_of(plain[2], 0)
        expected = torch.nn.utils.clip_grad_norm_(plain, 3.0)
        assert optimizer.clip_grad_norm_(3.0) == expected
        reference.step()
        optimizer.step()
        assert_same(params, plain)


def gradient_of(param: torch.nn.Parameter, step: int) -> torch.Tensor:
    params = parameters(shapes=SHAPES)
    backward(params, step)
    gradient = next(each.grad for each in params if each.shape == param.shape)
    assert gradient is not None
    return gradient


def test_zero_grad_drops_them(drive: Path) -> None:
    plain, params = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    reference = torch.optim.AdamW(plain, **ADAM)
    with optimizer_in(drive, params) as optimizer:
        backward(params, 5)
        optimizer.clip_grad_norm_(0.1)
        optimizer.zero_grad()
        backward(plain, 0)
        backward(params, 0)
        reference.step()
        optimizer.step()
        assert_same(params, plain)


def test_a_step_that_fails_keeps_them_for_the_next_try(drive: Path) -> None:
    plain, params = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    reference = torch.optim.AdamW(plain, **ADAM)
    with optimizer_in(drive, params, dram_budget=60_000) as optimizer:
        number = 0
        for step in range(40):
            backward(plain, step)
            backward(params, step)
            torch.nn.utils.clip_grad_norm_(plain, 2.0)
            optimizer.clip_grad_norm_(2.0)
            before = snapshot(params)
            with failing(optimizer, ("read", "write")[step % 2], number) as engine:
                error: OSError | None = None
                try:
                    optimizer.step()
                except OSError as caught:
                    error = caught
            if engine.failed:
                assert error is not None
                assert f"as after step {step}" in str(error)
                assert_same(params, before)
                optimizer.step()
            elif step % 2:
                break
            reference.step()
            reference.zero_grad()
            optimizer.zero_grad()
            assert_same(params, plain)
            number += step % 2
        assert number > 4


@pytest.mark.parametrize("during", ["backward", "clipping"])
def test_what_fails_on_its_way_out_is_told_and_a_new_backward_mends_it(during: str, drive: Path) -> None:
    plain, params = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    reference = torch.optim.AdamW(plain, **ADAM)
    with optimizer_in(drive, params) as optimizer:
        with failing(optimizer, "write", 1):
            backward(params, 0)
            if during == "clipping":
                with pytest.raises(OSError):  # noqa: PT011
                    optimizer.clip_grad_norm_(1.0)
        with pytest.raises(OSError, match="as after step 0"):
            optimizer.step()
        assert_same(params, plain)
        optimizer.zero_grad()
        backward(plain, 1)
        backward(params, 1)
        reference.step()
        optimizer.step()
        assert_same(params, plain)


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
        assert 0 < most <= OPEN * 4096 * 4 * 9 // 8
        optimizer.step()


def test_sparse_gradients_are_refused(drive: Path) -> None:
    embedding = torch.nn.Embedding(50, 8, sparse=True)
    with optimizer_in(drive, embedding.parameters()) as optimizer:
        with torch.sparse.check_sparse_tensor_invariants(), pytest.raises(TypeError, match="set offload_gradients to False"):
            embedding(torch.tensor([1, 2])).sum().backward()
        del optimizer


def test_without_hooks_left_when_it_is_closed(drive: Path) -> None:
    params = parameters()
    optimizer_in(drive, params).close()
    backward(params, 0)
    assert all(param.grad is not None for param in params if param.numel())
    give_gradients(params, 0)
