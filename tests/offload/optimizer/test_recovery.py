"""After something went wrong: nothing of it is left to go wrong later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme import OffloadedOptimizer

from ...support.engines import failing

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


def test_a_gradient_that_could_not_go_out_is_added_once(params: list[torch.nn.Parameter], offloaded: Any) -> None:
    optimizer = offloaded(torch.optim.SGD, offload_gradients=True)
    before = [param.detach().clone() for param in params]
    with failing("write", 0, at_once=True):
        backward(params)
    optimizer.zero_grad()
    backward(params)
    expected = [param.detach().clone() for param in params]
    optimizer.step()
    generator = torch.Generator().manual_seed(1)
    for param, old, same in zip(params, before, expected, strict=True):
        assert torch.equal(old, same)
        assert torch.allclose(param, old - 0.1 * torch.randn(param.shape, generator=generator))


def test_a_gradient_that_could_not_go_out_counts_once_when_the_step_is_made_all_the_same(
    params: list[torch.nn.Parameter], offloaded: Any
) -> None:
    optimizer = offloaded(torch.optim.SGD, offload_gradients=True)
    before = params[0].detach().clone()
    with failing("write", len(SHAPES) - 1, at_once=True):
        backward(params)  # the last gradient is the first parameter's
    with pytest.raises(OSError, match="write of"):
        optimizer.step()
    optimizer.step()
    gradient = torch.randn(params[0].shape, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(params[0], before - 0.1 * gradient)


def test_clipped_gradients_take_no_more(params: list[torch.nn.Parameter], offloaded: Any) -> None:
    optimizer = offloaded(offload_gradients=True)
    backward(params)
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="clip after the last backward"):
        backward(params)


def test_step_in_backward_frees_every_gradient(params: list[torch.nn.Parameter], offloaded: Any) -> None:
    optimizer = offloaded(step_in_backward=True, dram_budget=4096 * 8 + 5000)
    backward(params)
    optimizer.step()
    assert [param.grad for param in params] == [None] * len(params)
