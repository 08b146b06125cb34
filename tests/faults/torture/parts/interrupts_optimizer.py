"""Ctrl-C at any point of an OffloadedOptimizer: it is at the state before or at the one after, and goes on from there."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch

import deepnvme
from deepnvme.offload.optimizer.sub_group import MASTER
from deepnvme.swap import BufferPool

from ....support.training import Lion, assert_same, assert_same_state, backward, copied, optimizer_in, parameters, same_bits
from .. import Leaked, Wrong
from ..interruption import Interruption, interrupted

SHORT = 12
SECONDS = 60

SHAPES = ((41, 300), (7,), (513,), (90, 50), (3, 5))
"""The first is cut into sub-groups, the others are two."""
TORCH = str(Path(torch.__file__).parent)

Interrupt = Callable[[Callable[[], object]], Interruption]
"""Runs an operation, with Ctrl-C in it."""


class World:
    """An optimizer on the drive, and one in memory that does the same undisturbed."""

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype = torch.float32,
        masters: bool = False,
        optimizer_class: Any = torch.optim.AdamW,
        options: dict[str, Any] | None = None,
        budget: int = 32 << 20,
        **more: Any,
    ) -> None:
        self.directory = directory
        self.dtype, self.masters = dtype, masters
        self.optimizer_class, self.options, self.more = optimizer_class, options or {}, more
        self.in_backward = more.get("step_in_backward", False)
        self.plain, self.params = parameters(dtype, SHAPES), parameters(dtype, SHAPES)
        self.copies = [self._master_of(param) for param in self.plain]
        self.reference = optimizer_class(self._groups(self.copies), **self.options)
        self.pool = BufferPool(budget)
        self.backwards = 0
        self.optimizer = self.make()

    def make(self) -> deepnvme.OffloadedOptimizer:
        """The optimizer on the drive."""
        groups, options = self._groups(self.params), {**self.options, **self.more}
        return optimizer_in(self.directory, groups, self.optimizer_class, master_weights=self.masters, pool=self.pool, **options)

    def backward(self) -> None:
        """For both."""
        self.backward_of_the_other()
        self.params_backward()
        self.backwards += 1

    def backward_of_the_other(self) -> None:
        """Only for the one in memory."""
        backward(self.plain, self.backwards)

    def params_backward(self) -> None:
        """Only for the one on the drive."""
        backward(self.params, self.backwards)

    def reference_step(self) -> None:
        """Only the one in memory."""
        with torch.no_grad():
            for param, copy in zip(self.plain, self.copies, strict=True):
                copy.grad = param.grad if copy is param or param.grad is None else param.grad.float()
            self.reference.step()
            for param, copy in zip(self.plain, self.copies, strict=True):
                if copy is not param and param.grad is not None:
                    param.copy_(copy)
                param.grad = None

    def round(self, count: int = 1) -> None:
        """Steps that nothing disturbs."""
        for _ in range(count):
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.reference_step()

    def check(self) -> None:
        """Parameters and states are the same."""
        assert_same(self.params, self.plain)
        assert_same_state(self.optimizer.state_dict(), self.reference.state_dict())
        for param, copy in zip(self.params, self.copies, strict=True):
            if copy.dtype != param.dtype and MASTER in self.optimizer.state.get(param, {}):
                assert same_bits(self.optimizer.state[param][MASTER], copy), "a master weight differs"

    def finish(self) -> None:
        """It goes on, and leaves nothing."""
        self.round(2)
        self.check()
        self.optimizer.close()
        self.left_nothing()

    def left_nothing(self) -> None:
        if (self.directory / "states").exists():
            raise Leaked("the files are there after close()")
        del self.optimizer
        gc.collect()
        if self.pool.in_use:
            raise Leaked(f"{self.pool.in_use} bytes of the pool are in use after close()")

    # What is interrupted.

    def step(self, interrupt: Interrupt) -> Interruption:
        self.backward()
        return self.step_after_backward(interrupt)

    def step_after_backward(self, interrupt: Interrupt) -> Interruption:
        """Gradients are there already."""
        before = self.optimizer.steps
        found = interrupt(self.optimizer.step)
        if self.optimizer.steps == before:
            if self.in_backward:
                self.optimizer.zero_grad()
                assert_same(self.params, self.plain)
                self.backwards -= 1
                self.params_backward()
                self.backwards += 1
            else:
                assert_same(self.params, self.plain)
            self.optimizer.step()
        if self.optimizer.steps != before + 1:
            raise Wrong(f"{self.optimizer.steps} steps are said to be made, after {before} and one more")
        self.optimizer.zero_grad()
        self.reference_step()
        assert_same(self.params, self.plain)
        return found

    def backwards_(self, interrupt: Interrupt) -> Interruption:
        found = interrupt(self.params_backward)
        self.optimizer.zero_grad()
        assert_same(self.params, self.plain)
        self.round()
        return found

    def backward_and_step(self, interrupt: Interrupt) -> Interruption:
        """What had its gradient is stepped, the rest is not."""
        self.backward_of_the_other()
        found = interrupt(self.params_backward)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.backwards += 1
        for param, plain in zip(self.params, self.plain, strict=True):
            if same_bits(param, plain):
                plain.grad = None
        self.reference_step()
        assert_same(self.params, self.plain)
        return found

    def zero_grad(self, interrupt: Interrupt) -> Interruption:
        self.params_backward()
        found = interrupt(self.optimizer.zero_grad)
        self.optimizer.zero_grad()
        assert_same(self.params, self.plain)
        if any(param.grad is not None for param in self.params):
            raise Wrong("a gradient is left after zero_grad()")
        return found

    def clip(self, interrupt: Interrupt) -> Interruption:
        self.backward()
        found = interrupt(lambda: self.optimizer.clip_grad_norm_(1e9))
        self.optimizer.clip_grad_norm_(1e9)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.reference_step()
        return found

    def state_dict(self, interrupt: Interrupt) -> Interruption:
        found = interrupt(lambda: self.optimizer.state_dict())
        self.check()
        return found

    def load_state_dict(self, interrupt: Interrupt) -> Interruption:
        old = copied(self.optimizer.state_dict())
        new = doubled(copied(old))
        found = interrupt(lambda: self.optimizer.load_state_dict(new))
        assert_same(self.params, self.plain)
        is_new = next(iter(self.optimizer.param_groups))["lr"] == new["param_groups"][0]["lr"]
        assert_same_state(without_masters(self.optimizer.state_dict()), without_masters(new if is_new else old))
        if is_new:
            self.reference.load_state_dict(doubled(copied(self.reference.state_dict())))
        return found

    def add_param_group(self, interrupt: Interrupt) -> Interruption:
        before = len(self.params)
        plain, param = (parameters(self.dtype, [(33, 200)], seed=before)[0] for _ in range(2))
        found = interrupt(lambda: self.optimizer.add_param_group({"params": [param], "lr": 3e-3}))
        if len(self.optimizer.param_groups) == len(self.reference.param_groups):
            self.optimizer.add_param_group({"params": [param], "lr": 3e-3})
        self.plain.append(plain)
        self.params.append(param)
        self.copies.append(self._master_of(plain))
        self.reference.add_param_group({"params": [self.copies[-1]], "lr": 3e-3})
        return found

    def close(self, interrupt: Interrupt) -> Interruption:
        if self.in_backward:
            self.params_backward()
        found = interrupt(self.optimizer.close)
        self.optimizer.close()
        assert_same(self.params, self.plain)
        for param in self.params:
            param.grad = None
        self._anew()
        return found

    def construct(self, interrupt: Interrupt) -> Interruption:
        self.optimizer.close()
        made: list[deepnvme.OffloadedOptimizer] = []
        found = interrupt(lambda: made.append(self.make()))
        if made:
            made[0].close()
        self._anew()
        return found

    def _anew(self) -> None:
        """Both begin again, with the parameters that there are."""
        self.optimizer = self.make()
        for param, copy in zip(self.plain, self.copies, strict=True):
            with torch.no_grad():
                copy.copy_(param)
        self.reference = self.optimizer_class(self._groups(self.copies), **self.options)

    def _master_of(self, param: torch.nn.Parameter) -> torch.nn.Parameter:
        return torch.nn.Parameter(param.detach().float()) if self.masters and param.dtype != torch.float32 else param

    def _groups(self, params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "lr": 5e-3}]


def doubled(state: dict[str, Any]) -> dict[str, Any]:
    """Another state of the same parameters."""
    for values in state["state"].values():
        for key, value in values.items():
            if key != MASTER and isinstance(value, torch.Tensor):
                values[key] = value * 2
    for group in state["param_groups"]:
        group["lr"] = group["lr"] / 2
    return state


def without_masters(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "param_groups": state["param_groups"],
        "state": {
            number: {key: value for key, value in values.items() if key != MASTER} for number, values in state["state"].items()
        },
    }


OPERATIONS: tuple[str, ...] = (
    "step",
    "backwards_",
    "backward_and_step",
    "zero_grad",
    "clip",
    "state_dict",
    "load_state_dict",
    "add_param_group",
    "construct",
    "close",
)


def interrupt_at(number: int, skip: tuple[str, ...] = ()) -> Interrupt:
    """Ctrl-C at that point."""

    def interrupt(operation: Callable[[], object]) -> Interruption:
        grad = torch.is_grad_enabled()
        try:
            return interrupted(number, operation, skip)
        finally:
            torch.set_grad_enabled(grad)  # which torch's own decorators may not have come to

    return interrupt


def operations_of(world: World) -> Iterator[str]:
    """Those that it has. With ``step_in_backward`` a backward is interrupted as a whole; Lion counts steps of a group, also if
    only some of it, or nothing, is stepped."""
    left_out = {"clip", "backward_and_step"} if world.in_backward else set()
    if world.optimizer_class is Lion:
        left_out.add("backward_and_step")
    return (name for name in OPERATIONS if name not in left_out)


def some_world(random: Random, directory: Path) -> World:
    """Of any options."""
    mode = random.choice(["", "", "offload_gradients", "step_in_backward"])
    masters = random.random() < 0.5
    kind, options = random.choice(
        [
            (torch.optim.AdamW, {"fused": True}),
            (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
            (torch.optim.SGD, {"momentum": 0.9}),
            (Lion, {}),
        ]
    )
    return World(
        directory,
        dtype=torch.bfloat16 if masters else random.choice([torch.float32, torch.bfloat16]),
        masters=masters,
        optimizer_class=kind,
        options=options,
        dram_budget=random.choice([0, 0, 60_000, 1 << 40]),
        checksum=random.random() < 0.3,
        **({mode: True} if mode else {}),
    )


def attack(random: Random, directory: Path) -> None:
    world = some_world(random, directory)
    world.round(random.randrange(4))
    for _ in range(4):
        name = random.choice(list(operations_of(world)))
        operation = getattr(world, name)
        skip = random.choice([(), (TORCH,)])
        points = operation(interrupt_at(0, skip)).passed
        check_after(world, name, interrupt_at(1 + random.randrange(max(points, 1)), skip))
    world.finish()


def check_after(world: World, name: str, interrupt: Interrupt) -> Interruption:
    """Do it with this interrupt, and see whether training goes on the same."""
    done: list[Interruption] = []

    def noted(operation: Callable[[], object]) -> Interruption:
        done.append(interrupt(operation))
        return done[-1]

    try:
        getattr(world, name)(noted)
        world.round()
        world.check()
    except Exception as error:
        where = done[-1].where if done else "a point that let an exception out"
        raise Wrong(f"after Ctrl-C in {name}, at {where}: {type(error).__name__}: {error}") from error
    return done[-1]
