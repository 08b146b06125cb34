"""Small trainings that an optimizer in memory and an offloaded one both do, to be compared bit by bit."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import deepnvme
from deepnvme.states.sub_group import MASTER

ADAM: dict[str, Any] = {"lr": 1e-2, "fused": True}
SHAPES = ((41, 300), (7,), (), (0,), (3, 5, 2, 2), (1,), (513,))
"""One that is cut into sub-groups of 4096 elements, a scalar, one without elements, one of one element."""
FULL_SHAPES = ((41, 300), (7,), (513,), (90, 90), (3, 5), (4099,))
"""Gradients of all of them come from :func:`backward`."""


class Lion(torch.optim.Optimizer):
    """An optimizer that torch does not have. Makes new state tensors in each step, and counts the steps in its groups."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                average = self.state[param].get("average", torch.zeros_like(param))
                update = torch.sign(average * group["betas"][0] + param.grad * (1 - group["betas"][0]))
                param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] / group["count"])
                self.state[param]["average"] = average * group["betas"][1] + param.grad * (1 - group["betas"][1])
        return loss


def parameters(
    dtype: torch.dtype = torch.float32, shapes: Iterable[Sequence[int]] = SHAPES, seed: int = 0
) -> list[torch.nn.Parameter]:
    """The same ones whenever they are asked for."""
    random = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(tuple(shape), generator=random).to(dtype)) for shape in shapes]


def give_gradients(params: Iterable[torch.Tensor], step: int, missing: Callable[[int], bool] = lambda index: False) -> None:
    """The gradients of that step."""
    random = torch.Generator().manual_seed(1000 + step)
    for index, param in enumerate(params):
        gradient = torch.randn(param.shape, generator=random).to(param.dtype)
        param.grad = None if missing(index) else gradient


class InMemory:
    """What ``OffloadedOptimizer(..., master_weights=True)`` is compared with: the optimizer on float32 copies."""

    def __init__(self, params: Sequence[torch.nn.Parameter], optimizer_class: type[torch.optim.Optimizer], **options: Any):
        self.params = params
        self.masters = [
            torch.nn.Parameter(param.detach().float()) if param.dtype in (torch.bfloat16, torch.float16) else param
            for param in params
        ]
        self.optimizer = optimizer_class(self.masters, **options)

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            if param.grad is not None:
                master.grad = param.grad.float()
        self.optimizer.step()
        for param, master in zip(self.params, self.masters, strict=True):
            if param.grad is not None and master is not param:
                param.copy_(master)
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


def in_memory(
    params: Sequence[torch.nn.Parameter], optimizer_class: Any, *, masters: bool = False, **options: Any
) -> InMemory | torch.optim.Optimizer:
    """What an offloaded optimizer is compared with."""
    made: InMemory | torch.optim.Optimizer = (InMemory if masters else _plain)(params, optimizer_class, **options)
    return made


def _plain(params: Sequence[torch.nn.Parameter], optimizer_class: Any, **options: Any) -> Any:
    return optimizer_class(params, **options)


def optimizer_in(
    drive: Path, params: Any, optimizer_class: Any = torch.optim.AdamW, **options: Any
) -> deepnvme.OffloadedOptimizer:
    """One of many small sub-groups."""
    options = {"path": drive / "states", "sub_group_size": 4096, **options}
    return deepnvme.OffloadedOptimizer(params, optimizer_class, **options)


def backward(params: Sequence[torch.nn.Parameter], step: int, missing: tuple[int, ...] = ()) -> None:
    """Gradients that autograd makes, in its order."""
    random = torch.Generator().manual_seed(step)
    factors = [torch.randn(param.shape, generator=random).to(param.dtype) for param in params]
    parts = [(param * factor).sum() for param, factor in zip(params, factors, strict=True)]
    torch.stack([part for index, part in enumerate(parts) if index not in missing]).sum().backward()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit are the same: NaN is NaN, and 0.0 is not -0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat_a, flat_b = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
    return torch.equal(flat_a, flat_b)


def assert_same(params: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> None:
    for index, (one, other) in enumerate(zip(params, others, strict=True)):
        assert same_bits(one, other), f"parameter {index} of shape {tuple(one.shape)} differs"


def assert_same_state(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Two results of state_dict(), but for master weights."""
    assert found["param_groups"] == expected["param_groups"], f"{found['param_groups']} is not {expected['param_groups']}"
    assert {number for number, state in found["state"].items() if set(state) != {MASTER}} == set(expected["state"])
    for number, state in expected["state"].items():
        values = {key: value for key, value in found["state"][number].items() if key != MASTER}
        assert set(values) == set(state), f"parameter {number}"
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert same_bits(values[key], value), f"{key} of parameter {number} differs"
            else:
                assert values[key] == value, f"{key} of parameter {number} differs"


@contextlib.contextmanager
def adamw_fails(number: int) -> Iterator[None]:
    """Meanwhile the step of torch's AdamW that is the ``number``-th raises ArithmeticError instead: one sub-group's."""
    step, calls = torch.optim.AdamW.step, 0

    def counted(optimizer: torch.optim.Optimizer) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            raise ArithmeticError("as asked for")
        step(optimizer)

    with mock.patch.object(torch.optim.AdamW, "step", counted):
        yield


def snapshot(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [param.detach().clone() for param in params]


def copied(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """One that stays as it is when the optimizer goes on."""
    import copy

    return copy.deepcopy(dict(state_dict))


PRECISIONS = {"float32": (torch.float32, False), "bfloat16": (torch.bfloat16, False), "masters": (torch.bfloat16, True)}


class Pair:
    """An offloaded optimizer, and the one in memory that it has to be the same as. The end of its context closes it.

    ``options`` are those of the optimizer's class, ``more`` those of OffloadedOptimizer.
    """

    def __init__(
        self,
        drive: Path,
        precision: str = "float32",
        optimizer_class: Any = torch.optim.AdamW,
        options: Any = ADAM,
        shapes: Iterable[Sequence[int]] = SHAPES,
        **more: Any,
    ) -> None:
        dtype, masters = PRECISIONS[precision]
        self.plain, self.params = parameters(dtype, shapes), parameters(dtype, shapes)
        self.reference: Any = in_memory(self.plain, optimizer_class, masters=masters, **options)
        self.optimizer = optimizer_in(drive, self.params, optimizer_class, master_weights=masters, **more, **options)
        self.precision, self.steps = precision, 0

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.optimizer.close()

    def give_gradients(self, missing: Callable[[int], bool] = lambda index: False) -> None:
        """Those of the next step, to both."""
        give_gradients(self.plain, self.steps, missing)
        give_gradients(self.params, self.steps, missing)

    def backward(self, missing: tuple[int, ...] = ()) -> None:
        """Run that of the next step in both."""
        backward(self.plain, self.steps, missing)
        backward(self.params, self.steps, missing)

    def step_both(self) -> None:
        """With the gradients that there are."""
        self.reference.step()
        self.optimizer.step()
        self.steps += 1
        assert_same(self.params, self.plain)

    def step(self, count: int = 1, missing: Callable[[int], bool] = lambda index: False) -> None:
        for _ in range(count):
            self.give_gradients(missing)
            self.step_both()

    def zero_grad(self) -> None:
        self.reference.zero_grad()
        self.optimizer.zero_grad()

    def copy_weights(self, weights: Iterable[torch.Tensor]) -> None:
        """Into the offloaded optimizer's parameters, as loading a model does."""
        with torch.no_grad():
            for param, weight in zip(self.params, weights, strict=True):
                param.copy_(weight)

    def check(self) -> None:
        assert_same(self.params, self.plain)
        assert_same_state(self.optimizer.state_dict(), self.reference.state_dict())

    def is_as_before(self, error: BaseException) -> None:
        """At the step before, which the error says; and the step can be made yet."""
        assert f"as after step {self.steps}" in said_by(error)
        assert self.optimizer.steps == self.steps
        self.check()
        self.finish()

    def is_unfinished(self, error: BaseException) -> int:
        """Within a step, which the error says; the next call finishes it. Returns how many sub-groups were left."""
        found = re.search(rf"step {self.steps + 1} is unfinished: (\d+) of (\d+) sub-groups are left", said_by(error))
        assert found is not None, said_by(error)
        assert self.optimizer.steps == self.steps
        self.finish()
        return int(found[1])

    def finish(self) -> None:
        """Make the step, or what is left of it."""
        self.step_both()
        assert self.optimizer.steps == self.steps
        self.check()


def said_by(error: BaseException) -> str:
    """An error's message, and its notes."""
    return str(error) + "".join(getattr(error, "__notes__", []))
