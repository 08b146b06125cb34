"""Ctrl-C in an OffloadedOptimizer: at places of its code where the interpreter looks for signals.

What this leaves out is at random, and longer, in tests/faults/torture: all places, the code of torch, the store's.
"""

from __future__ import annotations

import contextlib
import sysconfig
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.offload.optimizer import gradients
from deepnvme.offload.optimizer.pipeline import SubGroupPipeline
from deepnvme.transfer import block_cache, monitor

from ...faults.torture.interruption import Interruption
from ...faults.torture.interruption import all_but as all_but_modules
from ...faults.torture.parts.interrupts_optimizer import TORCH, World, check_after, interrupt_at
from ...support.engines import failing
from ...support.training import ADAM, assert_same, assert_same_state, backward, copied, give_gradients, optimizer_in, parameters

pytestmark = pytest.mark.slow

PACKAGE = Path(deepnvme.__file__).parent
OURS = {path for part in ("offload/optimizer", "transfer") for path in (PACKAGE / part).glob("*.py")}
NOT_OURS = (
    "<frozen ",  # the checks of abstract classes, which remember their answers
    TORCH,
    sysconfig.get_paths()["stdlib"],
    *(str(path) for path in PACKAGE.rglob("*.py") if path not in OURS),
)


class PlaceRecorder(Interruption):
    """Records the places of all points, and interrupts at none."""

    def __init__(self, skip: tuple[str, ...] = NOT_OURS) -> None:
        super().__init__(0, skip)
        self.found: list[tuple[str, int, str]] = []

    def _point(self, frame: FrameType) -> None:
        super()._point(frame)
        self.found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))


class SinceUndoing(Interruption):
    """Counts points from when a failed step begins to be undone: how many come before depends on the drive."""

    _begun = False

    def _point(self, frame: FrameType) -> None:
        self._begun = self._begun or frame.f_code.co_name == "_undo"
        if self._begun:
            super()._point(frame)


def one_point_for_each_place(operation: Callable[..., Any], random: Random) -> list[int]:
    """Numbers of points: of each line the first time, and one of the other times."""
    places = PlaceRecorder()

    def note(interrupted: Callable[[], object]) -> Interruption:
        with places:
            interrupted()
        return places

    operation(note)
    times: dict[tuple[str, int, str], list[int]] = {}
    for number, place in enumerate(places.found, 1):
        times.setdefault(place, []).append(number)
    return sorted({random.choice(numbers) for numbers in times.values()})


WORLDS: dict[str, dict[str, Any]] = {
    "part in memory": {"dtype": torch.bfloat16, "masters": True, "dram_budget": 60_000},
    "gradients": {"offload_gradients": True, "checksum": True},
    "in backward": {"dtype": torch.bfloat16, "masters": True, "step_in_backward": True, "dram_budget": 60_000},
    "all in memory": {"dram_budget": 1 << 40},
    "copies in memory": {},
    "copies on the drive": {"budget": 200_000},
}

CASES = [  # and how many places at most: all of the short ones, some of the others
    ("gradients", "zero_grad", 30),
    ("in backward", "zero_grad", 16),
    ("gradients", "backwards_", 16),
    ("gradients", "clip", 16),
    ("part in memory", "step", 16),
    ("gradients", "step", 16),
    ("all in memory", "step", 12),
    ("in backward", "step", 12),
    ("copies in memory", "step", 12),
    ("copies on the drive", "step", 12),
    ("in backward", "backwards_", 10),
    ("part in memory", "state_dict", 8),
    ("part in memory", "load_state_dict", 10),
]


@pytest.mark.parametrize(("kind", "operation", "most"), CASES)
def test_ctrl_c_anywhere_leaves_the_state_before_or_the_one_after(drive: Path, kind: str, operation: str, most: int) -> None:
    world = World(drive, options={"fused": True}, **WORLDS[kind])
    world.round(2)
    random = Random(f"{kind} {operation}")
    numbers = one_point_for_each_place(getattr(world, operation), random)
    assert len(numbers) > 5
    numbers = random.sample(numbers, min(most, len(numbers)))
    came = 0
    for number in numbers:
        came += bool(check_after(world, operation, interrupt_at(number, NOT_OURS)).where)
    assert came > len(numbers) / 2  # some points are there only in the first step, or where memory was not yet leased
    world.finish()


def all_but(*names: str) -> tuple[str, ...]:
    """Have only these modules interrupted."""
    wanted = {PACKAGE / f"{name}.py" for name in names}
    return (TORCH, sysconfig.get_paths()["stdlib"], *(str(path) for path in PACKAGE.rglob("*.py") if path not in wanted))


@pytest.mark.parametrize("kind", ["gradients", "in backward"])
def test_a_group_is_added_whole_or_not_at_all(drive: Path, kind: str) -> None:
    skip = all_but("offload/optimizer/optimizer", "offload/optimizer/step", "offload/optimizer/gradients")
    number = 0
    came = True
    while came:
        number += 3 if number > 20 else 1  # the last are where hooks are given to torch, with Ctrl-C held back
        world = World(drive, options={"fused": True}, **WORLDS[kind])
        came = bool(check_after(world, "add_param_group", interrupt_at(number, skip)).where)
        world.finish()
    assert number > 10


def test_a_backward_that_is_interrupted_has_taken_each_gradient_once_or_not(drive: Path) -> None:
    world = World(drive, options={"fused": True}, **WORLDS["gradients"])
    world.round()
    skip = all_but("offload/optimizer/gradients")
    points = world.backwards_(interrupt_at(0, skip)).passed
    for number in range(1, points + 1, 5):
        check_after(world, "backward_and_step", interrupt_at(number, skip))
    world.finish()


@pytest.mark.parametrize("kind", ["part in memory", "gradients"])
def test_ctrl_c_before_a_failed_step_is_undone(drive: Path, kind: str) -> None:
    """The next call undoes it."""
    world = World(drive, options={"fused": True}, **WORLDS[kind])
    world.round(2)
    skip = all_but("offload/optimizer/step", "_interrupts")
    world.backward()
    for number in (*range(1, 17, 2), *range(20, 60, 10)):  # before signals are deferred, and meanwhile
        interruption = SinceUndoing(number, skip)
        with failing("write", 2), pytest.raises(KeyboardInterrupt), interruption:
            world.optimizer.step()
        assert interruption.where
        assert world.optimizer.steps == world.backwards - 1
        if number % 4 != 1:
            assert_same_state(world.optimizer.state_dict(), world.reference.state_dict())
            assert_same(world.params, world.plain)
        world.optimizer.step()
        world.optimizer.zero_grad()
        world.reference_step()
        world.check()
        world.backward()
    world.optimizer.zero_grad()
    world.reference_step()
    world.optimizer.close()


def clipping(drive: Path) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter], torch.optim.Optimizer, Any]:
    """Six parameters, the same again, and optimizers of the two: in memory, and offloaded with gradients."""
    plain, params = parameters(shapes=[(4096,)] * 6), parameters(shapes=[(4096,)] * 6)
    options: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9}
    return plain, params, torch.optim.SGD(plain, **options), optimizer_in(
        drive, params, torch.optim.SGD, offload_gradients=True, **options
    )


def test_a_clipped_gradient_is_scaled_once_if_its_use_is_interrupted_where_it_ends(drive: Path) -> None:
    plain, params, reference, optimizer = clipping(drive)

    class WhereItEnds(Interruption):
        def _point(self, frame: FrameType) -> None:
            if frame.f_code.co_name == "reject":
                super()._point(frame)

    with optimizer:
        for step in range(8):
            for each in (reference, optimizer):
                each.zero_grad()
            backward(plain, step)
            backward(params, step)
            torch.nn.utils.clip_grad_norm_(plain, 0.5)
            optimizer.clip_grad_norm_(0.5)
            with contextlib.suppress(KeyboardInterrupt), WhereItEnds(step + 1, all_but_modules(gradients, block_cache, monitor)):
                optimizer.step()
            if optimizer.steps == step:
                optimizer.step()
            reference.step()
            assert_same(params, plain)


def test_clipped_gradients_are_dropped_by_the_next_call_if_dropping_them_was_interrupted(
    drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, params, reference, optimizer = clipping(drive)
    with optimizer:
        backward(params, 0)
        optimizer.clip_grad_norm_(0.5)
        with monkeypatch.context() as patch:
            patch.setattr(block_cache.BlockCache, "drain", interrupt)
            with pytest.raises(KeyboardInterrupt):
                optimizer.zero_grad()
        optimizer.zero_grad()
        backward(params, 1)
        optimizer.step()
        backward(plain, 1)
        reference.step()
        assert_same(params, plain)


@pytest.mark.parametrize("where", ["before anything is dropped", "while transfers are waited for"])
def test_states_that_could_not_be_loaded_are_not_stepped_if_giving_them_up_is_interrupted(
    drive: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    plain, params = parameters(shapes=[(4096,)] * 6), parameters(shapes=[(4096,)] * 6)
    reference = torch.optim.AdamW(plain, **ADAM)
    with optimizer_in(drive, params, torch.optim.AdamW, **ADAM) as optimizer:
        for step in range(2):
            for each, its in ((params, optimizer), (plain, reference)):
                give_gradients(each, step)
                its.step()
        other = copied(reference.state_dict())
        for state in other["state"].values():
            state["exp_avg"].mul_(100)
        calls, abandon = 0, SubGroupPipeline.abandon

        def interrupted_later(self: SubGroupPipeline) -> None:
            nonlocal calls
            calls += 1
            with monkeypatch.context() as patch:
                if calls > 1:  # the first is before anything is loaded
                    if where == "before anything is dropped":
                        interrupt()
                    patch.setattr(block_cache.BlockCache, "drain", interrupt)
                abandon(self)

        with monkeypatch.context() as patch:
            patch.setattr(SubGroupPipeline, "abandon", interrupted_later)
            with failing("write", 3, 1), pytest.raises(KeyboardInterrupt):
                optimizer.load_state_dict(other)
        for each, its in ((params, optimizer), (plain, reference)):
            give_gradients(each, 2)
            its.step()
        assert_same(params, plain)


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
