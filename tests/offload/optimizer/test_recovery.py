"""After something went wrong: nothing of it is left to go wrong later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme import OffloadedOptimizer
from deepnvme.states.sub_group import MASTER
from deepnvme.swap import BufferPool, OutOfBuffers

from ...support.engines import failing
from ...support.training import Pair, adamw_fails, copied, said_by, snapshot

SHAPES = [(4096,), (4096,), (4096,), (3, 5)]


@pytest.fixture
def params() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


@pytest.fixture
def offloaded(params: list[torch.nn.Parameter], drive: Path) -> Iterator[Any]:
    """Makes optimizers of the parameters; all are closed."""
    made: list[OffloadedOptimizer] = []

    def make(optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW, **more: Any) -> OffloadedOptimizer:
        options = {"nvme_path": drive / str(len(made)), "sub_group_size": 4096, "lr": 0.1, **more}
        made.append(OffloadedOptimizer(params, optimizer_class, **options))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.close()


def backward(params: list[torch.nn.Parameter], seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    torch.stack([(param * torch.randn(param.shape, generator=generator)).sum() for param in params]).sum().backward()


def test_states_that_outgrow_the_memory_are_kept_and_no_parameter_is_stepped_twice(drive: Path) -> None:
    """Adafactor's states of such a shape are larger than those of the small one by which they are estimated."""
    pool = BufferPool(128 << 10)
    with Pair(drive, "float32", torch.optim.Adafactor, {"lr": 0.1}, [(2, 32768)], pool=pool, sub_group_size=1 << 22) as pair:
        for step in range(3):
            pair.give_gradients()
            for _ in range(2 if step == 0 else 0):
                with pytest.raises(OutOfBuffers) as caught:
                    pair.optimizer.step()
                assert "step 1 is unfinished: 0 of 1 sub-groups" in said_by(caught.value)
            pool.set_budget(100 << 20)
            pair.step_both()
            assert pair.optimizer.steps == step + 1


def test_gradients_that_are_dropped_within_a_step_are_missed(params: list[torch.nn.Parameter], offloaded: Any) -> None:
    optimizer = offloaded()
    backward(params)
    with failing("write", 1), pytest.raises(OSError, match="step 1 is unfinished"):
        optimizer.step()
    kept = params[-1].grad, params[0].grad
    params[-1].grad = params[0].grad = None  # as model.zero_grad() does
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"the gradients of \d+ sub-groups that are left to be stepped are gone"):
            optimizer.step()
    params[-1].grad, params[0].grad = kept
    optimizer.step()
    assert optimizer.steps == 1


def test_a_backward_goes_on_after_a_load_that_ended_a_step(params: list[torch.nn.Parameter], offloaded: Any) -> None:
    optimizer = offloaded(step_in_backward=True)
    backward(params)
    optimizer.step()
    states, weights = copied(optimizer.state_dict()), snapshot(params)
    with failing("write", 1), pytest.raises(OSError, match="step 2 is unfinished"):  # noqa: PT012
        backward(params, 2)
        optimizer.step()
    with pytest.warns(RuntimeWarning, match="load the model too") as warned:
        optimizer.load_state_dict(states)
    assert warned[0].filename == __file__
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    assert [param.grad for param in params] == [None] * len(params)
    backward(params, 3)
    optimizer.step()
    assert optimizer.steps == 2


def test_what_the_optimizers_own_code_may_have_changed_is_said(params: list[torch.nn.Parameter], offloaded: Any) -> None:
    optimizer = offloaded()
    backward(params)
    with adamw_fails(1), pytest.raises(ArithmeticError) as caught:
        optimizer.step()
    assert "its own code may have stepped parameters of one sub-group" in said_by(caught.value)
    with failing("write", 0), pytest.raises(OSError, match="unfinished") as failed:
        optimizer.step()
    assert "its own code" not in said_by(failed.value)


def test_master_weights_of_an_optimizer_without_other_states_are_in_its_state_dict(drive: Path) -> None:
    params = [torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()) for shape in SHAPES]
    options: dict[str, Any] = {"lr": 0.001, "master_weights": True}
    with OffloadedOptimizer(params, torch.optim.SGD, nvme_path=drive / "a", **options) as optimizer:
        backward(params)
        optimizer.step()
        states = copied(optimizer.state_dict())
        assert [list(states["state"][index]) for index in range(len(SHAPES))] == [[MASTER]] * len(SHAPES)
    with OffloadedOptimizer(params, torch.optim.SGD, nvme_path=drive / "b", **options) as other:
        other.load_state_dict(states)
        for index, state in enumerate(copied(other.state_dict())["state"].values()):
            assert torch.equal(state[MASTER], states["state"][index][MASTER])
    plain = torch.optim.SGD(params, lr=0.001)
    plain.load_state_dict(states)  # which has no use for them
    plain.step()
