"""OffloadedOptimizer where something goes wrong: it is at one step or at the next, says at which, and goes on from there."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.states.sub_group import MASTER
from deepnvme.store.tensor_store import CorruptTensor
from deepnvme.swap import BufferPool, OutOfBuffers

from ...support.disks import MIB, Disk, loop_disk
from ...support.engines import FailingDrive, failing
from ...support.interpreters import Interpreters
from ...support.interrupts import ctrl_c_in_a_wait_for
from ...support.training import (
    FULL_SHAPES,
    Lion,
    Pair,
    adamw_fails,
    assert_same,
    backward,
    copied,
    give_gradients,
    optimizer_in,
    parameters,
    said_by,
    snapshot,
)


@pytest.fixture(params=["float32", "masters"])
def pair(request: pytest.FixtureRequest, drive: Path) -> Iterator[Pair]:
    with Pair(drive, request.param) as made:
        yield made


# The drive.


@pytest.mark.parametrize("precision", ["float32", "masters"])
@pytest.mark.parametrize("options", [{}, {"memory_budget": 40_000}, {"offload_gradients": True}], ids=str)
@pytest.mark.parametrize(("operation", "before"), [("write", 0), ("read", 3), ("write", 3)])
def test_whichever_transfer_fails_the_next_step_finishes_the_one_that_failed(
    drive: Path, precision: str, before: int, operation: str, options: dict[str, Any]
) -> None:
    with Pair(drive, precision, **options) as pair:
        pair.step(before)
        left, number = set(), 0
        while True:
            pair.give_gradients()
            error: OSError | None = None
            with failing(operation, number) as engine:
                try:
                    pair.optimizer.step()
                except OSError as caught:
                    error = caught
            if error is None:
                assert not engine.failed
                break
            assert error.errno == errno.EIO
            if "unfinished" in str(error):
                left.add(pair.is_unfinished(error))
            else:
                pair.is_as_before(error)
            number += 1
        in_memory = "memory_budget" in options  # all that is read: the last step has left the rest there
        assert number >= (2 if operation == "write" else 1 if before and not in_memory else 0)
        assert left or number < 2


def fail(pair: Pair) -> OSError:
    """A step of which a write fails after sub-groups were stepped."""
    pair.give_gradients()
    with failing("write", 1), pytest.raises(OSError, match=f"step {pair.steps + 1} is unfinished") as caught:
        pair.optimizer.step()
    assert caught.value.errno == errno.EIO
    return caught.value


CALLS: dict[str, Callable[[Any], object]] = {
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "state": lambda optimizer: dict(optimizer.state),
    "zero_grad": lambda optimizer: optimizer.zero_grad(),
    "add_param_group": lambda optimizer: optimizer.add_param_group({"params": []}),
    "clip_grad_norm_": lambda optimizer: optimizer.clip_grad_norm_(1.0),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_needs_a_finished_step_is_refused_until_it_is_finished(pair: Pair, call: str) -> None:
    for before in (2, 0):  # steps since it last happened
        pair.step(before)
        error = fail(pair)
        gradients = [param.grad for param in pair.params]
        with pytest.raises(RuntimeError, match=rf"step {pair.steps + 1} is unfinished, \d+ sub-groups .* or load_state_dict"):
            CALLS[call](pair.optimizer)
        assert all(param.grad is gradient for param, gradient in zip(pair.params, gradients, strict=True))
        pair.is_unfinished(error)
        CALLS[call](pair.optimizer)
        pair.optimizer.param_groups[1:] = []
    pair.step(2)
    pair.check()


@pytest.mark.parametrize("options", [{}, {"offload_gradients": True}], ids=str)
def test_a_backward_before_the_step_is_finished_is_refused_and_changes_no_gradient(drive: Path, options: dict[str, Any]) -> None:
    with Pair(drive, shapes=FULL_SHAPES, **options) as pair:
        pair.backward()
        with failing("write", 1), pytest.raises(OSError, match="step 1 is unfinished"):
            pair.optimizer.step()
        with pytest.raises(RuntimeError, match="step 1 is unfinished"):
            backward(pair.params, 1)
        pair.step_both()
        pair.zero_grad()
        pair.backward()
        pair.step_both()


def test_a_closure_is_called_once_for_a_step_that_is_finished_later(drive: Path) -> None:
    calls = 0

    def closure() -> float:
        nonlocal calls
        calls += 1
        pair.optimizer.zero_grad()
        pair.give_gradients()
        return 0.25

    with Pair(drive) as pair:
        pair.step(1)
        with failing("write", 1), pytest.raises(OSError, match="step 2 is unfinished"):
            pair.optimizer.step(closure)
        assert pair.optimizer.step(closure) == 0.25
        assert calls == 1
        pair.reference.step()
        pair.check()


def test_close_ends_an_unfinished_step_and_leaves_parameters_as_they_are(pair: Pair, drive: Path) -> None:
    pair.step(2)
    fail(pair)
    weights = snapshot(pair.params)
    with failing("read", 0, 1000), failing("write", 0, 1000):
        pair.optimizer.close()
    assert_same(pair.params, weights)
    assert not (drive / "states").exists()
    backward(pair.params, 0)  # is not refused any more


@pytest.mark.parametrize("at_once", [False, True])
def test_errors_that_were_raised_are_not_raised_again_by_close(drive: Path, at_once: bool) -> None:
    """Nor those of other reads for the same step, and of what was dropped; ``at_once``: every other read cannot be started."""
    reads = itertools.count()
    drive_fails = FailingDrive(lambda operation: operation == "read", lambda: at_once and next(reads) % 2 == 1)
    params = parameters(shapes=FULL_SHAPES)
    with optimizer_in(drive, params, offload_gradients=True) as optimizer:
        backward(params, 0)
        optimizer.step()
        optimizer.zero_grad()
        backward(params, 1)
        with drive_fails, pytest.raises(OSError, match="as after step 1"):
            optimizer.step()
        optimizer.zero_grad()
        with failing("write", 0, 1000), contextlib.suppress(OSError):
            backward(params, 1)
        optimizer.zero_grad()


@pytest.mark.parametrize("model_first", [False, True])
def test_a_checkpoint_ends_a_step_that_can_never_be_finished(pair: Pair, model_first: bool) -> None:
    pair.step(2)
    states, weights, at = copied(pair.optimizer.state_dict()), snapshot(pair.params), pair.steps
    pair.step(2)
    fail(pair)
    with failing("read", 0, 1000):
        if model_first:
            pair.copy_weights(weights)
            pair.optimizer.load_state_dict(states)
        else:
            with pytest.warns(RuntimeWarning, match="the unfinished step 5 left them: load the model too"):
                pair.optimizer.load_state_dict(states)
            pair.copy_weights(weights)
    assert_same(pair.params, weights)
    for step in range(at, 6):
        give_gradients(pair.params, step)
        pair.optimizer.step()
    for step in (4, 5):
        give_gradients(pair.plain, step)
        pair.reference.step()
    pair.check()


def test_a_load_that_fails_leaves_the_step_to_be_finished(pair: Pair) -> None:
    pair.step(2)
    states = copied(pair.optimizer.state_dict())
    error = fail(pair)
    with failing("write", 1), pytest.raises(OSError, match="write of"):
        pair.optimizer.load_state_dict(states)
    pair.is_unfinished(error)


def test_a_model_that_is_loaded_within_a_step_is_stepped_where_it_was_not_yet(drive: Path) -> None:
    """With float32 master weights, which follow it."""
    with Pair(drive, "masters", shapes=[(4096,)] * 4) as pair:  # a sub-group each
        pair.step(2)
        pair.give_gradients()
        before = snapshot(pair.params)
        with adamw_fails(3), pytest.raises(ArithmeticError):
            pair.optimizer.step()
        left = [index for index, param in enumerate(pair.params) if torch.equal(param, before[index])]
        assert len(left) == 2
        for each in (pair.params, pair.plain, pair.reference.masters):
            with torch.no_grad():
                each[left[0]].copy_(before[left[0]] + 8)
        pair.step_both()
        pair.step(1)
        pair.check()


def test_a_disk_that_is_too_small_is_said_before_training(drive: Path) -> None:
    with loop_disk(drive, "ext4", 32 * MIB) as disk:
        large = torch.nn.Parameter(torch.ones(3_000_000))
        with pytest.raises(OSError, match=r"\d+ more bytes wanted, \d+ free") as caught:
            optimizer_in(disk.path, [large])
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(disk / "states")
        assert not (disk / "states").exists()
        with Pair(disk.path) as pair:
            optimizer = pair.optimizer
            pair.step(1)
            with pytest.raises(OSError, match="bytes wanted") as caught:
                optimizer.add_param_group({"params": [large]})
            assert caught.value.errno == errno.ENOSPC
            assert len(optimizer.param_groups) == 1
            pair.step(2)
            pair.check()


def test_a_disk_that_checkpoints_fill_is_said_and_room_lets_the_step_go_on(drive: Path) -> None:
    with loop_disk(drive, "ext4", 32 * MIB) as disk, Pair(disk.path) as pair:
        optimizer = pair.optimizer
        pair.step(2)
        fill(disk, leave=32 << 10)
        states = []
        with pytest.raises(OSError, match="bytes wanted") as caught:  # noqa: PT012
            for _ in range(9):
                states.append(optimizer.state_dict())
                pair.give_gradients()
                optimizer.step()
                pair.reference.step()
                pair.steps += 1
        assert caught.value.errno == errno.ENOSPC
        assert pair.steps > 2
        states.clear()
        pair.is_unfinished(caught.value)
        pair.step(3)
        pair.check()


def fill(disk: Disk, leave: int) -> None:
    with (disk / "filler").open("wb") as file:
        for more in (MIB, 4096):
            with contextlib.suppress(OSError):
                while os.statvfs(disk.path).f_bavail * os.statvfs(disk.path).f_frsize > leave:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, more)


def test_corrupt_bytes_are_named_and_a_checkpoint_mends_them(drive: Path) -> None:
    with Pair(drive, checksum=True) as pair:
        pair.step(2)
        states, weights = copied(pair.optimizer.state_dict()), snapshot(pair.params)
        data = drive / "states" / "deepnvme-store.data"
        with data.open("r+b") as file:
            for offset in range(0, data.stat().st_size, 4096):
                file.seek(offset + 100)
                file.write(b"corrupt")
            os.fsync(file.fileno())
        with pytest.raises(CorruptTensor):  # no checkpoint is made of them
            pair.optimizer.state_dict()
        pair.give_gradients()
        for _ in range(2):
            with pytest.raises(CorruptTensor, match="step 3 is unfinished") as caught:
                pair.optimizer.step()
            assert caught.value.filename == str(data)
            assert "CRC-32" in str(caught.value)
        with pytest.warns(RuntimeWarning, match="load the model too"):
            pair.optimizer.load_state_dict(states)
        pair.copy_weights(weights)
        pair.finish()


# Interrupts, and the optimizer's own errors.


class Failing(Lion):
    """Raises in the midst of a step, at the parameter that is next when ``left`` is 0."""

    left = 1 << 30

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                Failing.left -= 1
                if Failing.left < 0:
                    raise FloatingPointError("as optimizers do")
                param.sub_(param.grad, alpha=group["lr"])
                state = self.state[param]
                state.setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                state["count"] = state.get("count", 0) + 1
            group["steps"] = group.get("steps", 0) + 1


@pytest.mark.parametrize("precision", ["float32", "masters"])
@pytest.mark.parametrize("options", [{}, {"memory_budget": 1 << 40}], ids=str)
def test_an_exception_of_the_optimizer_before_it_has_changed_a_sub_group_costs_nothing(
    drive: Path, precision: str, options: dict[str, Any]
) -> None:
    Failing.left = 1 << 30
    shapes = [(4096,)] * 3  # a sub-group each
    with Pair(drive, precision, Failing, {"lr": 1e-3}, shapes, **options) as pair:
        for stepped in range(3):
            pair.give_gradients()
            pair.reference.step()
            Failing.left = stepped
            with pytest.raises(FloatingPointError) as caught:
                pair.optimizer.step()
            said = f"{3 - stepped} of 3 sub-groups are left" if stepped else f"as after step {pair.steps}"
            assert said in said_by(caught.value)
            Failing.left = 1 << 30
            pair.optimizer.step()
            pair.steps += 1
            pair.check()


def test_a_sub_group_that_raised_midway_is_read_again_from_the_drive(drive: Path) -> None:
    """With master weights, from which its parameters come: the same bits as if nothing had happened."""
    Failing.left = 1 << 30
    with Pair(drive, "masters", Failing, {"lr": 1e-3}) as pair:
        pair.step(2)
        for left in range(7):
            pair.give_gradients()
            Failing.left = left
            with pytest.raises(FloatingPointError) as caught:
                pair.optimizer.step()
            Failing.left = 1 << 30
            if "unfinished" in said_by(caught.value):
                pair.is_unfinished(caught.value)
            else:
                pair.finish()


@pytest.mark.parametrize("precision", ["float32", "masters"])
@pytest.mark.parametrize("options", [{}, {"memory_budget": 40_000}, {"offload_gradients": True}], ids=str)
def test_ctrl_c_while_a_step_waits_leaves_it_to_be_finished(drive: Path, precision: str, options: dict[str, Any]) -> None:
    with Pair(drive, precision, **options) as pair:
        pair.step(2)
        for operation in ("write",) if "memory_budget" in options else ("read", "write"):  # all else stays in memory
            pair.give_gradients()
            with ctrl_c_in_a_wait_for(operation), pytest.raises(KeyboardInterrupt) as caught:
                pair.optimizer.step()
            (pair.is_unfinished if "unfinished" in said_by(caught.value) else pair.is_as_before)(caught.value)


@pytest.mark.parametrize(
    ("operation", "options", "call"),
    [
        ("read", {"offload_gradients": True}, lambda pair: pair.optimizer.clip_grad_norm_(1e6)),
        ("write", {"memory_budget": 1 << 40}, lambda pair: pair.optimizer.state_dict()),
        ("write", {"offload_gradients": True}, lambda pair: (pair.optimizer.zero_grad(), backward(pair.params, pair.steps))),
    ],
    ids=["clip_grad_norm_", "state_dict", "backward after zero_grad"],
)
def test_a_call_that_is_interrupted_in_a_wait_can_be_made_again(
    drive: Path, operation: str, options: dict[str, Any], call: Callable[[Pair], object]
) -> None:
    with Pair(drive, shapes=[(4096,)] * 6, **options) as pair:
        for _ in range(3):
            pair.zero_grad()
            pair.backward()
            if pair.steps < 2:
                pair.step_both()
        with ctrl_c_in_a_wait_for(operation), pytest.raises(KeyboardInterrupt):
            call(pair)
        call(pair)
        pair.step_both()
        pair.check()


def test_what_the_optimizers_own_code_may_have_changed_is_said(drive: Path) -> None:
    with Pair(drive, shapes=[(4096,)] * 3) as pair:
        pair.give_gradients()
        with adamw_fails(1), pytest.raises(ArithmeticError) as caught:
            pair.optimizer.step()
        assert "its own code may have stepped parameters of one sub-group" in said_by(caught.value)
        with failing("write", 0), pytest.raises(OSError, match="unfinished") as failed:
            pair.optimizer.step()
        assert "its own code" not in said_by(failed.value)


# Gradients, states and parameters.


def test_gradients_that_are_dropped_within_a_step_are_missed(drive: Path) -> None:
    with Pair(drive, shapes=[(4096,)] * 4) as pair:
        fail(pair)
        kept = [param.grad for param in pair.params]
        for param in pair.params:
            param.grad = None  # as model.zero_grad() does
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"the gradients of \d+ sub-groups that are left to be stepped are gone"):
                pair.optimizer.step()
        for param, gradient in zip(pair.params, kept, strict=True):
            param.grad = gradient
        pair.step_both()


def test_states_that_outgrow_the_memory_are_kept_and_no_parameter_is_stepped_twice(drive: Path) -> None:
    """Adafactor's states of such a shape are larger than those of the small one by which they are estimated."""
    pool = BufferPool(128 << 10)
    with Pair(drive, "float32", torch.optim.Adafactor, {"lr": 0.1}, [(2, 32768)], pool=pool, sub_group_size=1 << 22) as pair:
        pair.give_gradients()
        for _ in range(2):
            with pytest.raises(OutOfBuffers) as caught:
                pair.optimizer.step()
            assert "step 1 is unfinished: 0 of 1 sub-groups" in said_by(caught.value)
        pool.set_budget(100 << 20)
        pair.step_both()
        pair.step(2)


def test_master_weights_of_an_optimizer_without_other_states_are_in_its_state_dict(drive: Path) -> None:
    params = parameters(torch.bfloat16)
    options: dict[str, Any] = {"lr": 0.001, "master_weights": True}
    with optimizer_in(drive / "a", params, torch.optim.SGD, **options) as optimizer:
        give_gradients(params, 0)
        optimizer.step()
        states = copied(optimizer.state_dict())
        assert [list(state) for state in states["state"].values()] == [[MASTER]] * len(params)
    with optimizer_in(drive / "b", params, torch.optim.SGD, **options) as other:
        other.load_state_dict(states)
        for index, state in enumerate(copied(other.state_dict())["state"].values()):
            assert torch.equal(state[MASTER], states["state"][index][MASTER])
    plain = torch.optim.SGD(params, lr=0.001)
    plain.load_state_dict(states)  # which has no use for them
    plain.step()


def test_nan_gradients_missing_ones_and_frozen_parameters_do_what_they_do_in_memory(pair: Pair) -> None:
    pair.step(1)
    pair.give_gradients()
    for params in (pair.plain, pair.params):
        for param in (params[0], params[2]):
            assert param.grad is not None
            param.grad.view(-1)[::3] = torch.nan
    pair.step_both()
    for frozen in ({3}, {3}, {0, 3}, {0, 4}, {4}, set()):
        for params in (pair.plain, pair.params):
            for index, param in enumerate(params):
                param.requires_grad_(index not in frozen)
        pair.step(1, missing=frozen.__contains__)
    pair.check()


def test_a_step_without_any_gradient_changes_nothing(pair: Pair) -> None:
    pair.step(2)
    before = snapshot(pair.params)
    pair.optimizer.zero_grad()
    with pytest.warns(UserWarning, match="no parameter of this OffloadedOptimizer has a gradient") as warned:
        pair.optimizer.step()
    assert [each.filename for each in warned] == [__file__]
    pair.optimizer.step()  # that is said once
    assert_same(pair.params, before)
    assert pair.optimizer.report().bytes_written == 0
    pair.step(1)
    pair.check()


class TwoDimensional(torch.optim.SGD):
    """Says what it does not take as torch's Muon does, and looks at memory, which the device meta has not."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            for param in group["params"]:
                if param.device.type != "cpu":
                    raise RuntimeError(f"no parameters on {param.device}")
                if param.ndim != 2:
                    raise ValueError(f"only matrices, got {tuple(param.shape)}")


MATRIX = torch.nn.Parameter(torch.zeros(3, 3))
REFUSED: list[tuple[type[torch.optim.Optimizer], Any, dict[str, Any], str]] = [
    (TwoDimensional, [torch.zeros(3, 3, 3)], {}, "only matrices"),
    (torch.optim.SparseAdam, [torch.zeros(3, 3).to_sparse()], {}, "layout|dense"),
    (torch.optim.SGD, [torch.zeros(3, 3).to_sparse()], {}, "layout"),
    (torch.optim.Adam, [torch.zeros(3, 3)], {"lr": -1.0}, "Invalid learning rate: -1.0"),
    (torch.optim.Adam, [MATRIX, MATRIX], {}, r"a parameter of the shape \(3, 3\) is 2 times in its group: list it once"),
    (torch.optim.Adam, [{"params": [MATRIX]}, {"params": [MATRIX]}], {}, "more than one parameter group"),
    (torch.optim.Adam, [torch.zeros(3, dtype=torch.float64, device="meta")], {"master_weights": True}, "cannot have float32"),
    (torch.optim.Adam, [torch.zeros(1 << 22)], {"pool": BufferPool(1 << 16)}, "give a smaller sub_group_size"),
]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize(("kind", "given", "options", "said"), REFUSED, ids=[row[3] for row in REFUSED])
def test_what_cannot_be_is_refused_at_once_and_leaves_nothing(
    drive: Path, kind: Any, given: list[Any], options: dict[str, Any], said: str
) -> None:
    params = [torch.nn.Parameter(each) if type(each) is torch.Tensor else each for each in given]
    with pytest.raises((ValueError, OutOfBuffers), match=said):
        optimizer_in(drive, params, kind, **options)
    assert not (drive / "states").exists()
    good = torch.nn.Parameter(torch.zeros(5, 5))
    with optimizer_in(drive, [good], kind, lr=0.1) as optimizer:
        if not options and isinstance(params[0], torch.Tensor):
            with pytest.raises((ValueError, OutOfBuffers), match=said):
                optimizer.add_param_group({"params": params})
            assert len(optimizer.param_groups) == 1


def test_tied_weights_are_one_parameter(drive: Path) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Tanh(), torch.nn.Linear(64, 64, bias=False))
        model[2].weight = model[0].weight
        models.append(model)
    plain = torch.optim.AdamW(models[0].parameters())
    with deepnvme.OffloadedOptimizer(models[1].parameters(), torch.optim.AdamW, path=drive / "states") as optimizer:
        for step in range(3):
            for each, model in zip((plain, optimizer), models, strict=True):
                torch.manual_seed(step)
                each.zero_grad()
                model(torch.randn(4, 64)).square().sum().backward()
                each.step()
        assert_same(models[1].parameters(), models[0].parameters())


@pytest.mark.usefixtures("checked_sparse_tensors")
def test_sparse_gradients_are_stepped_whole_and_refused_where_cut_before_anything_is_stepped(drive: Path) -> None:
    def gradient() -> torch.Tensor:
        return torch.sparse_coo_tensor(torch.tensor([[1, 5]]), torch.ones(2, 41), (300, 41))

    with Pair(drive, "float32", torch.optim.Adagrad, {}, [(300, 41)], sub_group_size=1 << 22) as pair:
        for _ in range(3):
            pair.plain[0].grad, pair.params[0].grad = gradient(), gradient()
            pair.step_both()
    with Pair(drive, "float32", torch.optim.Adagrad, {}, [(4096,), (4096,), (300, 41)], memory_budget=50_000) as pair:
        pair.step(2)
        pair.give_gradients()
        pair.params[2].grad = gradient()
        with pytest.raises(TypeError, match="set sub_group_size to 12300 or more"):
            pair.optimizer.step()
        pair.check()
        assert pair.optimizer.steps == 2


@pytest.fixture
def checked_sparse_tensors() -> Iterator[None]:
    """Which torch warns of not being asked for."""
    with torch.sparse.check_sparse_tensor_invariants():
        yield


# Directories, memory, processes.


@pytest.mark.slow
def test_another_process_in_the_directory_is_refused_and_told_whose_it_is(drive: Path, interpreters: Interpreters) -> None:
    with Pair(drive):
        said = interpreters.run(
            f"""
            import deepnvme
            params = [torch.nn.Parameter(torch.ones(3))]
            try:
                deepnvme.OffloadedOptimizer(params, torch.optim.Adam, path={str(drive / "states")!r})
            except OSError as error:
                print(type(error).__name__, error)
            """
        ).check()
        assert said.startswith("StoreLocked")
        assert f"in use by the OffloadedOptimizer of process {os.getpid()} on" in said


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "masters"])
@pytest.mark.parametrize("options", [{}, {"offload_gradients": True}, {"memory_budget": 60_000}], ids=str)
def test_the_smallest_budget_that_is_taken_is_enough(drive: Path, precision: str, options: dict[str, Any]) -> None:
    low, high = 0, 1 << 22
    while high - low > 4096:
        middle = (low + high) // 2 // 4096 * 4096
        try:
            Pair(drive, precision, pool=BufferPool(middle), **options).optimizer.close()
            high = middle
        except OutOfBuffers:
            low = middle
    with Pair(drive, precision, pool=BufferPool(high), **options) as pair:
        pair.step(3)
        states = copied(pair.optimizer.state_dict())
        pair.check()
        pair.optimizer.load_state_dict(states)
        pair.step(2)
        pair.check()


@pytest.mark.slow
def test_what_a_child_does_with_its_parents_optimizer_says_so(drive: Path, interpreters: Interpreters) -> None:
    interpreters.run(
        f"""
        import os, deepnvme
        model = torch.nn.Linear(100, 100)
        torch.set_num_threads(1)
        optimizer = deepnvme.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, path={str(drive / "states")!r})
        model(torch.ones(100)).sum().backward()
        optimizer.step()
        before = model.weight.detach().clone()
        child = os.fork()
        if child == 0:
            for use in (optimizer.step, optimizer.state_dict, optimizer.zero_grad, optimizer.close):
                try:
                    use()
                except RuntimeError as error:
                    assert "forked child" in str(error), error
                else:
                    os._exit(3)
            assert torch.equal(model.weight, before)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        optimizer.step()
        optimizer.close()
        """,
    ).check()
