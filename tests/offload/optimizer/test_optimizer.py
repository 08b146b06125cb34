"""OffloadedOptimizer: what the optimizer in memory does, to the bit."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import deepnvme
from deepnvme.memory.alignment import PAGE
from deepnvme.store.data_file import DATA_NAME
from deepnvme.swap import BufferPool, OutOfBuffers

from ...support.engines import failing
from ...support.interpreters import Interpreters
from ...support.torch_versions import ALONE
from ...support.training import (
    ADAM,
    PRECISIONS,
    SHAPES,
    Lion,
    Pair,
    assert_same,
    assert_same_state,
    copied,
    give_gradients,
    in_memory,
    optimizer_in,
    parameters,
)

STEPS = 30

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "fused Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "fused Adam": (torch.optim.Adam, ADAM),
    "AdamW with amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "fused AdamW": (torch.optim.AdamW, ADAM),
    "AdamW with foreach": (torch.optim.AdamW, {"foreach": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2, "t0": 20}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "Lion": (Lion, {}),
}
FUSED_SGD = {"lr": 1e-2, "momentum": 0.9, "fused": True}
CASES = [(name, precision) for name in OPTIMIZERS for precision in PRECISIONS]
# torch's fused SGD itself rounds momenta in bfloat16 differently from run to run
OPTIMIZERS["fused SGD"] = (torch.optim.SGD, FUSED_SGD)
CASES += [("fused SGD", "float32"), ("fused SGD", "masters")]
QUICKLY = ("fused AdamW", "SGD with momentum", "Lion", "Adafactor")
"""In each precision also in a quick run, which has the others in float32."""
BUDGETS = (0, 100_000, 1 << 40)
"""No states in memory, about half, all."""


@pytest.mark.parametrize(
    ("name", "precision"),
    [case if case[0] in QUICKLY or case[1] == "float32" else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_many_steps_give_the_bits_of_the_optimizer_in_memory(name: str, precision: str, drive: Path) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    steps = STEPS if precision != "bfloat16" else 15
    shapes = [shape for shape in SHAPES if shape != (0,) or optimizer_class is not torch.optim.Adafactor]  # it divides by that
    budget = BUDGETS[(list(OPTIMIZERS).index(name) + len(precision)) % 3]
    with Pair(drive, precision, optimizer_class, options, shapes, memory_budget=budget) as pair:
        pair.step(steps)
        pair.check()


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["Adam", "fused AdamW", "Adadelta", "Adagrad", "NAdam", "Rprop", "fused SGD"])
def test_a_parameter_in_many_sub_groups_is_rounded_as_one(name: str, threads: int, drive: Path) -> None:
    torch.set_num_threads(threads)
    optimizer_class, options = OPTIMIZERS[name]
    shapes = [(100_003,), (317, 229)]  # more than torch gives to one thread
    with Pair(drive, "float32", optimizer_class, options, shapes, sub_group_size=3 * 4096 + 5) as pair:
        pair.step(4)
        pair.check()


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("name", ["Adam", "fused AdamW", "fused SGD"])
def test_parameters_in_another_order_of_memory(name: str, masters: bool, drive: Path) -> None:
    """Fused kernels take elements in the order of memory, whatever that is: all tensors of a parameter must have the same."""
    optimizer_class, options = OPTIMIZERS[name]
    dtype = torch.bfloat16 if masters else torch.float32

    def channels_last() -> list[torch.nn.Parameter]:
        conv, linear = parameters(dtype, [(8, 5, 3, 3), (300, 40)])
        params = [conv.detach().to(memory_format=torch.channels_last), linear.detach().t()]
        return [torch.nn.Parameter(param) for param in params]

    plain, params = channels_last(), channels_last()
    reference = in_memory(plain, optimizer_class, masters=masters, **options)
    with optimizer_in(drive, params, optimizer_class, master_weights=masters, **options) as optimizer:
        for step in range(4):
            for each in (plain, params):
                give_gradients(each, step)
                for param in each:
                    assert param.grad is not None
                    param.grad = torch.empty_like(param).copy_(param.grad)
            reference.step()
            optimizer.step()
        assert_same(params, plain)
        assert_same_state(optimizer.state_dict(), reference.state_dict())


class InNewPlaces(torch.optim.Optimizer):
    """Has the tensors that it keeps in other places after a step: what ``way`` says."""

    def __init__(self, params: Any, way: str, lr: float = 0.1) -> None:
        super().__init__(params, {"way": way, "lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["a"], state["b"] = torch.zeros_like(param), torch.ones_like(param)
                    if param.dim() == 2 and param.shape[0] == param.shape[1]:
                        state["c"] = param.clone()
                state["a"].lerp_(param.grad, 0.1)
                if group["way"] == "swapped":
                    state["a"], state["b"] = state["b"], state["a"]
                elif group["way"] == "shifted":
                    state["b"] = state["a"]
                    state["a"] = param.grad.clone()
                elif group["way"] == "transposed" and "c" in state:
                    state["c"] = state["c"].t()
                update = state["a"] * 0.5 + state["b"] + (state["c"].contiguous() if "c" in state else 0)
                if group["way"] == "parameter and state":
                    param.data, state["b"] = param.data - group["lr"] * update, param.data
                else:
                    param.sub_(update, alpha=group["lr"])


@pytest.mark.parametrize("memory_budget", [0, 1 << 40])
@pytest.mark.parametrize("precision", ["float32", "masters"])
@pytest.mark.parametrize("way", ["swapped", "shifted", "transposed", "parameter and state"])
def test_tensors_that_an_optimizer_puts_in_each_others_places(way: str, precision: str, memory_budget: int, drive: Path) -> None:
    shapes = [(40, 40), (500,), (7,), (1,), (70, 60)]
    with Pair(drive, precision, InNewPlaces, {"way": way}, shapes, memory_budget=memory_budget) as pair:
        pair.step(5)
        pair.check()


def test_three_blocks_are_in_memory_between_steps_and_no_copies_of_parameters(drive: Path) -> None:
    pool = BufferPool(1 << 20)
    params = parameters(shapes=[(4096,)] * 8)
    with optimizer_in(drive, params, torch.optim.AdamW, pool=pool, **ADAM) as optimizer:
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
        assert 2 * 2 * 4 * 4096 < pool.in_use <= 3 * 2 * (4 * 4096 + PAGE) * 9 // 8


# What goes with an optimizer.


Models = tuple[torch.nn.Module, torch.nn.Module]


def models(seed: int = 0) -> Models:
    """Twice the same."""

    def one() -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(40, 150), torch.nn.Tanh(), torch.nn.Linear(150, 60), torch.nn.Linear(60, 1))

    return one(), one()


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, 40, generator=random)
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def train(model: torch.nn.Module, optimizer: Any, steps: Iterable[int], after_backward: Any = lambda: None) -> list[float]:
    """With a closure if the steps are odd."""
    losses = []
    for step in steps:

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            after_backward()
            losses.append(loss.item())
            return losses[-1]

        if step % 2:
            assert optimizer.step(closure) == losses[-1]
        else:
            closure()
            optimizer.step()
    return losses


def test_states_striped_over_directories(drive: Path) -> None:
    path = [drive / "a", drive / "b"]
    with Pair(drive, shapes=[(1200, 1000)], path=path, sub_group_size=1 << 22) as pair:
        pair.step(3)
        pair.check()
        sizes = [(directory / "deepnvme-store.data").stat().st_size for directory in path]
        assert min(sizes) > 0
    assert not any(directory.exists() for directory in path)


@pytest.mark.parametrize("options", [{}, {"memory_budget": 60_000}, {"offload_gradients": True}], ids=str)
def test_groups_with_options_of_their_own_a_scheduler_clipping_and_a_group_added_midway(
    options: dict[str, Any], drive: Path
) -> None:
    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        first, _, second, _ = model.children()
        decayed = [first.weight, second.weight]
        return [{"params": decayed, "weight_decay": 0.1, "amsgrad": True}, {"params": [first.bias, second.bias], "lr": 0.1}]

    model, offloaded = models()
    plain = torch.optim.AdamW(groups(model), lr=0.02)
    with optimizer_in(drive, groups(offloaded), torch.optim.AdamW, lr=0.02, **options) as optimizer:
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (plain, optimizer)]
        norms: list[list[torch.Tensor]] = [[], []]
        for step in range(9):
            if step == 3:
                for each, its_optimizer in ((model, plain), (offloaded, optimizer)):
                    its_optimizer.add_param_group({"params": list(each[3].parameters()), "lr": 0.05})
            if step == 6:
                for its_optimizer in (plain, optimizer):
                    its_optimizer.param_groups[1]["betas"] = (0.5, 0.9)
            norm_type = 2.0 if step % 2 else float("inf")

            def clip(most: float = 0.5, kind: float = norm_type) -> None:
                params = [param for group in plain.param_groups for param in group["params"]]
                norms[0].append(torch.nn.utils.clip_grad_norm_(params, most, kind))

            def clip_offloaded(most: float = 0.5, kind: float = norm_type) -> None:
                norms[1].append(optimizer.clip_grad_norm_(most, kind))

            assert train(offloaded, optimizer, [step], clip_offloaded) == train(model, plain, [step], clip)
            for scheduler in schedulers:
                scheduler.step()
        assert norms[0] == norms[1]
        assert_same(offloaded.parameters(), model.parameters())
        assert_same_state(optimizer.state_dict(), plain.state_dict())
        assert optimizer.report().resident_bytes <= options.get("memory_budget", 0)


@pytest.mark.parametrize("options", [{}, {"offload_gradients": True}], ids=str)
@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_states_through_distributed_checkpoints(options: dict[str, bool], drive: Path) -> None:
    model, offloaded = models()
    with optimizer_in(drive / "one", model.parameters(), torch.optim.AdamW, **ADAM, **options) as optimizer:
        train(model, optimizer, range(3))
        states = get_optimizer_state_dict(model, optimizer)
        dcp.save({"model": model.state_dict(), "states": states}, checkpoint_id=drive / "saved", **ALONE)
        with optimizer_in(drive / "two", offloaded.parameters(), torch.optim.AdamW, **ADAM, **options) as other:
            found = {"model": offloaded.state_dict(), "states": get_optimizer_state_dict(offloaded, other)}
            dcp.load(found, checkpoint_id=drive / "saved", **ALONE)
            offloaded.load_state_dict(found["model"])
            set_optimizer_state_dict(offloaded, other, found["states"])
            assert train(offloaded, other, range(3, 6)) == train(model, optimizer, range(3, 6))
            assert_same(offloaded.parameters(), model.parameters())
            assert_same_state(other.state_dict(), optimizer.state_dict())


def test_a_group_that_cannot_be_added_leaves_all_as_it_was(drive: Path) -> None:
    params = parameters()
    with optimizer_in(drive, params, torch.optim.AdamW, pool=BufferPool(4 << 20)) as optimizer:
        with pytest.raises(OutOfBuffers):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, 1 << 20).t())]})
        assert len(optimizer.param_groups) == 1
        give_gradients(params, 0)
        optimizer.step()
        assert len(optimizer.state_dict()["state"]) == len(params)


@pytest.mark.parametrize("offload_gradients", [False, True])
def test_a_grad_scaler_that_overflows_skips_steps_and_needs_gradients_in_memory(offload_gradients: bool, drive: Path) -> None:
    model, offloaded = models()
    plain = torch.optim.AdamW(model.parameters(), **ADAM)
    options = {"offload_gradients": offload_gradients}
    with optimizer_in(drive, offloaded.parameters(), torch.optim.AdamW, **ADAM, **options) as optimizer:
        for each, its_optimizer in ((model, plain), (offloaded, optimizer)):
            scaler = torch.amp.GradScaler("cpu", init_scale=1e38, growth_interval=3)
            for step in range(8):
                its_optimizer.zero_grad()
                scaler.scale(loss_of(each, step)).backward()
                if offload_gradients and each is offloaded:
                    with pytest.raises(RuntimeError, match="offload_gradients takes them away"):
                        scaler.step(optimizer)
                    return
                scaler.unscale_(its_optimizer)
                torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
                scaler.step(its_optimizer)
                scaler.update()
        assert_same(offloaded.parameters(), model.parameters())
        assert 0 < optimizer.steps < 8


def test_hooks_of_it_and_of_all_optimizers_are_called_once_a_step(drive: Path) -> None:
    params = parameters()
    seen: list[Any] = []
    with optimizer_in(drive, params, torch.optim.AdamW) as optimizer, contextlib.ExitStack() as stack:
        for register in (optimizer.register_step_pre_hook, register_optimizer_step_pre_hook):
            stack.callback(register(lambda each, args, kwargs: seen.append(("before", each))).remove)
        for register in (optimizer.register_step_post_hook, register_optimizer_step_post_hook):
            stack.callback(register(lambda each, args, kwargs: seen.append(("after", each))).remove)
        optimizer.register_state_dict_post_hook(lambda each, state: {**state, "more": 1})
        optimizer.register_load_state_dict_pre_hook(lambda each, state: {k: v for k, v in state.items() if k != "more"})
        optimizer.register_load_state_dict_post_hook(lambda each: seen.append(("loaded", each)))
        give_gradients(params, 0)
        optimizer.step()
        saved = optimizer.state_dict()
        assert saved["more"] == 1
        optimizer.load_state_dict(saved)
        assert seen == [("before", optimizer)] * 2 + [("after", optimizer)] * 2 + [("loaded", optimizer)]


# States, saved and loaded.


@pytest.mark.slow
@pytest.mark.parametrize("memory_budget", BUDGETS)
def test_a_state_dict_stays_as_it_is_when_the_optimizer_goes_on(memory_budget: int, drive: Path) -> None:
    """Its tensors are mapped from files, and untouched pages of those would show what is written there later."""
    with Pair(drive, memory_budget=memory_budget) as pair:
        taken = []
        for step in range(9):
            pair.step()
            if step in (1, 2, 5):
                taken.append((pair.optimizer.state_dict(), copied(pair.reference.state_dict())))
            if step == 6:
                pair.optimizer.load_state_dict(taken[1][0])
                pair.reference.load_state_dict(copied(taken[1][1]))
        pair.check()
        for found, expected in taken[:2]:
            assert_same_state(found, expected)
    found, expected = taken[2]  # untouched until the files are gone
    assert_same_state(found, expected)


def test_a_plain_optimizer_on_the_states_of_an_offloaded_one_goes_its_own_way(drive: Path) -> None:
    with Pair(drive, memory_budget=60_000) as pair:
        pair.step(3)
        others, states = parameters(), pair.optimizer.state_dict()
        with torch.no_grad():
            for other, param in zip(others, pair.params, strict=True):
                other.copy_(param)
        second = torch.optim.AdamW(others, **ADAM)
        second.load_state_dict(states)
        for step in range(3):
            give_gradients(others, step + 20)
            second.step()
        pair.step(4)
        pair.check()


def test_the_room_of_a_state_dict_is_given_back(drive: Path) -> None:
    """To parameters that are added later."""
    shapes = [(1 << 17,)] * 8
    params = parameters(shapes=shapes)
    with optimizer_in(drive, params, torch.optim.AdamW, sub_group_size=1 << 17) as optimizer:

        def occupied_after(count: int) -> int:
            for _ in range(count):
                give_gradients(params, 0)
                optimizer.step()
            return sum(path.stat().st_size for path in drive.rglob(DATA_NAME))

        usual = occupied_after(3)
        states = [optimizer.state_dict()]
        occupied_after(2)
        states.append(optimizer.state_dict())
        most = occupied_after(2)
        assert most > usual
        states.clear()
        occupied_after(2)
        params += parameters(shapes=shapes[:4])
        optimizer.add_param_group({"params": params[8:]})
        assert occupied_after(3) == most


@pytest.mark.parametrize(("name", "budgets"), [
    ("fused AdamW", (0, 1 << 40)), ("Adafactor", (1 << 40, 30_000)), ("SGD", (0, 0)), ("NAdam", (0, 0)), ("Lion", (30_000, 0)),
])  # fmt: skip
def test_states_go_from_the_plain_optimizer_and_back(name: str, budgets: tuple[int, int], drive: Path) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    shapes = [shape for shape in SHAPES if shape != (0,)]
    straight = parameters(shapes=shapes)
    reference = optimizer_class(straight, **options)
    params = parameters(shapes=shapes)
    kinds = [("plain", 0), ("offloaded", budgets[0]), ("offloaded", budgets[1]), ("plain", 0)]
    saved = None
    for turn, (kind, budget) in enumerate(kinds):
        with contextlib.ExitStack() as stack:
            more = {**options, "lr": 7.0} if turn else options  # which is loaded over
            optimizer: Any = (
                optimizer_class(params, **more)
                if kind == "plain"
                else stack.enter_context(optimizer_in(drive, params, optimizer_class, memory_budget=budget, **more))
            )
            if saved is not None:
                optimizer.load_state_dict(saved)
            for step in range(3 * turn, 3 * turn + 3):
                give_gradients(straight, step)
                give_gradients(params, step)
                reference.step()
                optimizer.step()
            assert_same(params, straight)
            assert_same_state(optimizer.state_dict(), reference.state_dict())
            file = drive / "saved.pt"
            torch.save(optimizer.state_dict(), file)
            saved = torch.load(file)


def test_a_state_dict_from_before_the_first_step_removes_what_the_optimizer_has_put_into_its_groups(drive: Path) -> None:
    with Pair(drive, optimizer_class=Lion, options={}) as pair:
        untouched, expected = pair.optimizer.state_dict(), copied(pair.reference.state_dict())
        for turn in range(2):
            for _ in range(2):
                pair.give_gradients()
                pair.step_both()
            pair.check()
            if turn == 0:
                pair.optimizer.load_state_dict(untouched)
                pair.reference.load_state_dict(expected)


def test_training_goes_on_from_a_checkpoint_with_master_weights(drive: Path) -> None:
    """Whichever of model and optimizer is loaded first: loading the same weights again must not round the masters."""
    for model_first in (True, False):
        straight, params = parameters(torch.bfloat16), parameters(torch.bfloat16, seed=1)
        with (
            optimizer_in(drive / "a", straight, torch.optim.AdamW, master_weights=True, **ADAM) as first,
            optimizer_in(drive / "b", params, torch.optim.AdamW, master_weights=True, memory_budget=60_000, **ADAM) as second,
        ):
            for step in range(3):
                give_gradients(straight, step)
                first.step()
            give_gradients(params, 9)
            second.step()

            def load_model(params: Any = params, straight: Any = straight) -> None:
                with torch.no_grad():
                    for param, weight in zip(params, straight, strict=True):
                        param.copy_(weight)

            if model_first:
                load_model()
            second.load_state_dict(first.state_dict())
            if not model_first:
                load_model()
            for step in range(3, 6):
                for each, optimizer in ((straight, first), (params, second)):
                    give_gradients(each, step)
                    optimizer.step()
            assert_same(params, straight)


@pytest.mark.parametrize("memory_budget", BUDGETS)
def test_weights_that_others_have_changed_are_the_new_masters(memory_budget: int, drive: Path) -> None:
    """What the change leaves as it was keeps its precision. One of them has no gradient then, and its change waits."""
    with Pair(drive, "masters", memory_budget=memory_budget) as pair:
        pair.step(3)
        for index in (0, 6):
            weights = torch.randn(pair.plain[index].shape, generator=torch.Generator().manual_seed(5)).bfloat16()
            masters = pair.reference.masters[index]
            with torch.no_grad():
                pair.plain[index].copy_(weights)
                pair.params[index].copy_(weights)
                masters.copy_(torch.where(masters.bfloat16() == weights, masters, weights.float()))
        pair.step(2, lambda index: index == 6)
        pair.step(2)


def test_a_state_that_cannot_be_loaded_leaves_all_as_it_was(drive: Path) -> None:
    with Pair(drive, memory_budget=60_000) as pair:
        pair.step(2)
        optimizer, reference = pair.optimizer, pair.reference
        bad = copied(reference.state_dict())
        bad["param_groups"][0]["params"].pop()
        with pytest.raises(ValueError, match="parameter group"):
            optimizer.load_state_dict(bad)
        number = 0
        while True:
            other = copied(reference.state_dict())
            for state in other["state"].values():
                state["exp_avg"] += 1
            with failing("write", number) as engine, contextlib.suppress(OSError):
                optimizer.load_state_dict(other)
            if not engine.failed:
                break
            assert_same_state(optimizer.state_dict(), reference.state_dict())
            number += 1
        assert number > 1
        assert_same_state(optimizer.state_dict(), other)


@pytest.mark.slow
def test_memory_does_not_grow_by_the_states_that_are_saved_or_loaded(drive: Path, interpreters: Interpreters) -> None:
    interpreters.run(
        f"""
        import deepnvme, threading, time
        torch.set_num_threads(1)

        def own_memory():  # not what is mapped from files, which the system takes back when it wants to
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

        class Peak:
            def __enter__(self):
                self.before = self.peak = own_memory()
                self.going = True
                self.thread = threading.Thread(target=self.watch)
                self.thread.start()
                return self
            def watch(self):
                while self.going:
                    self.peak = max(self.peak, own_memory())
                    time.sleep(0.002)
            def __exit__(self, *_):
                self.going = False
                self.thread.join()
                self.grown = self.peak - self.before

        params = [torch.nn.Parameter(torch.ones(1 << 21)) for _ in range(8)]  # 128 MiB of states
        optimizer = deepnvme.OffloadedOptimizer(
            params, torch.optim.AdamW, path={str(drive / "states")!r}, sub_group_size=1 << 18, fused=True,
            memory_budget=16 << 20, pool=deepnvme.swap.BufferPool(64 << 20),
        )
        for param in params:
            param.grad = torch.ones_like(param)
        with Peak() as stepping:
            optimizer.step()
            optimizer.step()
        optimizer.zero_grad()
        with Peak() as saving:
            torch.save(optimizer.state_dict(), {str(drive / "saved.pt")!r})
        with Peak() as loading:
            optimizer.load_state_dict(torch.load({str(drive / "saved.pt")!r}, mmap=True))
        assert optimizer.state_dict()["state"][7]["step"] == 2
        optimizer.close()
        print(stepping.grown >> 20, saving.grown >> 20, loading.grown >> 20)
        assert stepping.grown < 16 + 24 + 64 << 20, stepping.grown
        assert saving.grown < 16 << 20, saving.grown
        assert loading.grown < 24 << 20, loading.grown
        """,
    ).check()


# What it says, and how it ends.


def test_a_report_that_adds_up(drive: Path) -> None:
    params = parameters(shapes=[(1 << 20,)])
    with optimizer_in(drive, params, torch.optim.AdamW, sub_group_size=1 << 17, **ADAM) as optimizer:
        with pytest.raises(RuntimeError, match="before the first step"):
            optimizer.report()
        for step in range(3):
            give_gradients(params, step)
            begun = time.perf_counter()
            optimizer.step()
            seconds = time.perf_counter() - begun
            report = optimizer.report()
            assert report.step == optimizer.steps == step + 1
            assert 0 < report.computing + report.waiting <= report.seconds <= seconds
            assert report.sub_groups == 8
            assert report.bytes_written == pytest.approx(2 * 4 << 20, rel=0.01)  # two states
            # of 8 sub-groups one is still in memory after the first step, and then three
            assert report.bytes_read == pytest.approx((0, 7, 5)[step] * 2 * 4 << 17, rel=0.01)
            assert max(report.reading, report.writing) <= report.seconds
            assert report.peak_bytes == pytest.approx(min(3, step + 2) * 2 * 4 << 17, rel=0.5)  # two to three sub-groups
        assert report.bytes_written_in_all == pytest.approx(3 * report.bytes_written, rel=0.01)


def test_bytes_kept_in_memory_are_neither_read_nor_written(drive: Path) -> None:
    params = parameters()
    states = 2 * 4 * sum(param.numel() for param in params)
    with optimizer_in(drive, params, torch.optim.AdamW, memory_budget=1 << 40) as optimizer:
        for step in range(4):
            give_gradients(params, step)
            optimizer.step()
            report = optimizer.report()
            assert report.bytes_read == report.bytes_written == 0
            assert report.resident_bytes > states
            assert report.peak_bytes >= report.resident_bytes


def test_closing_twice_removes_the_files_and_leaves_nothing_to_use(drive: Path) -> None:
    params = parameters()
    optimizer = optimizer_in(drive, params, torch.optim.AdamW)
    give_gradients(params, 0)
    optimizer.step()
    optimizer.close()
    optimizer.close()
    assert not (drive / "states").exists()
    uses: list[Callable[[], object]] = [
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        optimizer.__enter__,
        lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4))]}),
        lambda: optimizer.state[params[0]],
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="this optimizer is closed"):
            use()


def test_an_optimizer_that_owns_files_cannot_be_copied(drive: Path) -> None:
    with optimizer_in(drive, parameters(), torch.optim.AdamW) as optimizer:
        with pytest.raises(TypeError, match=r"use state_dict\(\)"):
            copy.deepcopy(optimizer)
        with pytest.raises(TypeError, match=r"use state_dict\(\)"):
            pickle.dumps(optimizer)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"path": None}, TypeError, "path must be a directory, or several, got None"),
        ({"path": [3]}, TypeError, "path must be a directory, .*, got 3 in it"),
        ({"path": {"a": "1GB"}}, TypeError, "path must be a directory, or several, got {'a': '1GB'}"),
        ({"path": ""}, ValueError, "path must not be empty"),
        ({"optimizer_class": "AdamW"}, TypeError, "optimizer_class must be a torch optimizer's class.* got 'AdamW'"),
        ({"sub_group_size": "1MB"}, TypeError, "sub_group_size must be a whole number of elements, got '1MB'"),
        ({"sub_group_size": 0}, ValueError, "sub_group_size must be positive, got 0"),
        ({"memory_budget": -1}, ValueError, "memory_budget must not be negative, got -1"),
        ({"optimizer_class": torch.optim.LBFGS}, ValueError, "LBFGS evaluates the loss several times a step"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(options: dict[str, Any], error: type[Exception], said: str, drive: Path) -> None:
    given: dict[str, Any] = {"optimizer_class": torch.optim.AdamW, "path": drive / "states", **options}
    with pytest.raises(error, match=said):
        deepnvme.OffloadedOptimizer(parameters(), **given)
    assert not (drive / "states").exists()


def test_paths_may_be_bytes_or_below_the_home_directory(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(drive))
    paths: Any = [os.fsencode(drive / "bytes"), "~/home"]
    with deepnvme.OffloadedOptimizer(parameters(), torch.optim.AdamW, path=paths):
        assert {"bytes", "home"} <= set(os.listdir(drive))
