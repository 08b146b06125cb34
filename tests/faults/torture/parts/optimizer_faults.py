"""An OffloadedOptimizer whose drive fails, or that Ctrl-C interrupts every few milliseconds: its steps have the same bits."""

from __future__ import annotations

import errno
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

import deepnvme
from deepnvme.states.sub_group import MASTER
from deepnvme.swap import BufferPool

from ....support.engines import FailingDrive
from ....support.interrupts import ctrl_c_every
from ....support.training import Lion, assert_same, assert_same_state, backward, copied, optimizer_in, parameters, same_bits
from .. import Leaked, Wrong

SHORT = 7
SECONDS = 60

SHAPES = ((41, 300), (7,), (513,), (90, 50), (3, 5))
"""The first is cut into sub-groups, the others are two."""


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


class FaultyDrive:
    """Fails a share of the transfers: some at once, some when they are asked how they ended."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.rate = {"read": 0.0, "write": 0.0}
        self.transfers = FailingDrive(lambda operation: random.random() < self.rate[operation], lambda: random.random() < 0.2)

    def heal(self) -> None:
        """From now on all is well."""
        self.rate = {"read": 0.0, "write": 0.0}

    def fail(self) -> None:
        """Some of the transfers, or all."""
        share = self._random.choice([0.02, 0.1, 0.4, 1.0])
        which = self._random.choice([("read",), ("write",), ("read", "write")])
        self.rate = {each: share if each in which else 0.0 for each in self.rate}


def failed(operation: Callable[[], object]) -> bool:
    """Whether it has raised the drive's error."""
    try:
        operation()
    except OSError as error:
        if error.errno != errno.EIO or error.filename is None:
            raise Wrong(f"{error!r} has not the errno and the filename of the drive's error") from error
        return True
    return False


def step(world: World, drive: FaultyDrive) -> None:
    """One step, called again until it is made. After some tries the drive is well."""
    optimizer, before = world.optimizer, world.optimizer.steps
    world.backward()
    for tries in range(40):
        if tries == 5:
            drive.heal()
        if failed(optimizer.step) != (optimizer.steps == before):
            raise Wrong(f"step() has made {optimizer.steps - before} steps, and an error says otherwise")
        if optimizer.steps != before:
            break
    world.reference_step()
    optimizer.zero_grad()
    if optimizer.steps != before + 1:
        raise Wrong(f"{optimizer.steps - before} steps are said to be made instead of one")


def attack(random: Random, directory: Path) -> None:
    world = some_world(random, directory)
    if random.random() < 0.3:
        storm(world, random)
    else:
        drive = FaultyDrive(random)
        with drive.transfers:
            train(world, drive, random)
    world.optimizer.close()
    world.left_nothing()


def train(world: World, drive: FaultyDrive, random: Random) -> None:
    for _ in range(6):
        if random.random() < 0.7:
            drive.fail()
        step(world, drive)
        if random.random() < 0.3:
            drive.heal()
            new = doubled(copied(world.optimizer.state_dict()))
            drive.fail()
            if not failed(functools.partial(world.optimizer.load_state_dict, new)):
                world.reference.load_state_dict(doubled(copied(world.reference.state_dict())))
        if random.random() < 0.7:
            drive.heal()
            world.check()
    drive.fail()
    world.params_backward()
    if random.random() < 0.5:
        failed(world.optimizer.step)
    world.optimizer.close()  # what was raised is not raised again


def storm(world: World, random: Random) -> None:
    """Ctrl-C every few milliseconds: in steps, which are called again, and in all that leaves states as they are."""
    world.round(2)
    for _ in range(8):
        before = world.optimizer.steps
        world.backward()
        with ctrl_c_every(random.choice([0.001, 0.003])):
            for _ in range(10):
                try:
                    if world.optimizer.steps == before:
                        world.optimizer.step()
                    world.optimizer.state_dict()
                except KeyboardInterrupt:
                    torch.set_grad_enabled(True)  # which torch's own decorators may not have come to
        if world.optimizer.steps == before:
            world.optimizer.step()
        if world.optimizer.steps != before + 1:
            raise Wrong(f"{world.optimizer.steps - before} steps are said to be made instead of one")
        world.reference_step()
        world.optimizer.zero_grad()
    world.check()
