"""OffloadedOptimizer where something goes wrong: it is at one step or at the next, says at which, and goes on from there."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.offload.optimizer import spare_memory
from deepnvme.store.tensor_store import CorruptTensor
from deepnvme.swap import BufferPool, OutOfBuffers

from ...support.disks import MIB, Disk, loop_disk
from ...support.engines import FailingDrive, failing
from ...support.interpreters import Interpreters
from ...support.interrupts import interrupt_at
from ...support.training import (
    ADAM,
    FULL_SHAPES,
    PRECISIONS,
    InMemory,
    Lion,
    Pair,
    adamw_fails,
    assert_same,
    assert_same_state,
    backward,
    copied,
    give_gradients,
    in_memory,
    optimizer_in,
    parameters,
    snapshot,
)


@pytest.fixture(autouse=True)
def copies_on_the_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory is to spare for copies of parameters. With copies there, less can fail: see test_copies_in_memory.py."""
    monkeypatch.setattr(spare_memory, "available_memory", lambda: 0)


@pytest.fixture(params=["float32", "masters"])
def pair(request: pytest.FixtureRequest, drive: Path) -> Iterator[Pair]:
    made = Pair(drive, request.param)
    with made.optimizer:
        yield made


# The drive.


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("before", [0, 3])
def test_whichever_transfer_fails_leaves_the_step_before(pair: Pair, before: int, operation: str) -> None:
    pair.step(before)
    number = 0
    while True:
        pair.give_gradients()
        with failing(operation, number) as engine:
            try:
                pair.optimizer.step()
            except OSError as caught:
                error: OSError | None = caught
            else:
                error = None
        if error is None:
            assert not engine.failed
            break
        assert error.errno == errno.EIO
        pair.is_as_before(error)
        number += 1
    assert number >= (4 if operation == "write" else 1 if before else 0)


def fail_and_do_not_undo(pair: Pair) -> None:
    """A step whose last write fails, and all reads from then on but one: what the first sub-groups need is on the drive only."""
    pair.give_gradients()
    last = 3 if isinstance(pair.reference, InMemory) else 7  # blocks, or blocks and images of parameters
    with (
        failing("write", last),
        failing("read", 1, 1000),
        pytest.raises(OSError, match=f"step {pair.steps + 1} could not be undone yet") as caught,
    ):
        pair.optimizer.step()
    assert caught.value.errno == errno.EIO
    assert pair.optimizer.steps == pair.steps


def is_refused(pair: Pair, use: Callable[[], object]) -> None:
    """With the same error however often: nothing can be read."""
    for _ in range(3):
        with pytest.raises(OSError, match=f"step {pair.steps + 1} could not be undone yet") as caught:
            use()
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == "drive"
    assert pair.optimizer.steps == pair.steps


CALLS: dict[str, Callable[[Any], object]] = {
    "step": lambda optimizer: optimizer.step(),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "state": lambda optimizer: dict(optimizer.state),
    "zero_grad": lambda optimizer: optimizer.zero_grad(),
    "add_param_group": lambda optimizer: optimizer.add_param_group({"params": []}),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_step_that_could_not_be_undone_is_undone_by_the_next_call(pair: Pair, call: str) -> None:
    for before in (2, 0, 1):  # steps since it last happened
        pair.step(before)
        fail_and_do_not_undo(pair)
        with failing("read", 0, 1000):
            is_refused(pair, lambda: CALLS[call](pair.optimizer))
        CALLS[call](pair.optimizer)
        if call == "add_param_group":
            pair.optimizer.param_groups.pop()
        if call == "zero_grad":
            pair.give_gradients()
        if call != "step":
            assert_same(pair.params, pair.plain)
            pair.optimizer.step()
        pair.reference.step()
        pair.steps += 1
        pair.check()
    pair.step(2)
    pair.check()


@pytest.mark.slow
@pytest.mark.parametrize("reads", range(0, 9, 2))
def test_an_undoing_that_fails_again_and_again_is_finished_in_the_end(pair: Pair, reads: int) -> None:
    """Each try has other reads fail."""
    pair.step(2)
    fail_and_do_not_undo(pair)
    for first in range(reads):
        with failing("read", first % 4, 1 + first % 2), contextlib.suppress(OSError):
            pair.optimizer.state_dict()
    assert_same_state(pair.optimizer.state_dict(), pair.reference.state_dict())
    assert_same(pair.params, pair.plain)
    pair.optimizer.step()
    pair.reference.step()
    pair.steps += 1
    pair.step(2)
    pair.check()


def test_close_undoes_a_step_first_and_closes_nothing_where_it_cannot(pair: Pair, drive: Path) -> None:
    pair.step(2)
    fail_and_do_not_undo(pair)
    with failing("read", 0, 1000):
        is_refused(pair, pair.optimizer.close)
        with pytest.raises(FloatingPointError), pair.optimizer:  # which another error would hide
            raise FloatingPointError("of the training")
    assert (drive / "states").exists()
    pair.optimizer.close()
    assert_same(pair.params, pair.plain)
    assert not (drive / "states").exists()


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("options", [{"dram_budget": 1 << 40}, {"offload_gradients": True}, {"step_in_backward": True}], ids=str)
def test_errors_that_were_raised_are_not_raised_again_by_close(drive: Path, options: dict[str, Any], at_once: bool) -> None:
    """Nor those of other reads for the same step, and of what was dropped; ``at_once``: every other read cannot be started."""
    reads = itertools.count()
    drive_fails = FailingDrive(lambda operation: operation == "read", lambda: at_once and next(reads) % 2 == 1)
    params = parameters(shapes=FULL_SHAPES)
    with optimizer_in(drive, params, **options) as optimizer:
        backward(params, 0)
        optimizer.step()
        optimizer.zero_grad()
        with drive_fails, pytest.raises(OSError, match="as after step 1"):  # noqa: PT012
            backward(params, 1)
            optimizer.step()
        if "offload_gradients" in options:
            optimizer.zero_grad()
            with failing("write", 0, 1000):
                backward(params, 1)
            optimizer.zero_grad()


@pytest.mark.parametrize("model_first", [False, True])
def test_a_checkpoint_mends_what_can_never_be_read_again(pair: Pair, model_first: bool) -> None:
    def load_model() -> None:
        with torch.no_grad():
            for param, weight in zip(pair.params, weights, strict=True):
                param.copy_(weight)

    pair.step(2)
    states, weights, at = copied(pair.optimizer.state_dict()), snapshot(pair.params), pair.steps
    pair.step(2)
    fail_and_do_not_undo(pair)
    with failing("read", 0, 1000):
        if model_first:
            load_model()
            pair.optimizer.load_state_dict(states)
        else:
            with pytest.warns(RuntimeWarning, match="could not be undone .*: load the model too"):
                pair.optimizer.load_state_dict(states)
            load_model()
    assert_same(pair.params, weights)
    for step in range(at, 6):
        give_gradients(pair.params, step)
        pair.optimizer.step()
    for step in (4, 5):
        give_gradients(pair.plain, step)
        pair.reference.step()
    pair.check()


def test_a_model_that_is_loaded_before_a_step_is_undone_stays(drive: Path) -> None:
    """With float32 master weights, which follow it."""
    pair = Pair(drive, "masters")
    with pair.optimizer:
        pair.step(2)
        fail_and_do_not_undo(pair)
        reference = pair.reference
        assert isinstance(reference, InMemory)
        for params in (pair.params, pair.plain, reference.masters):
            with torch.no_grad():
                params[0].copy_(parameters(torch.bfloat16)[0] + 8)
        pair.optimizer.state_dict()
        assert_same(pair.params, pair.plain)
        pair.step(2)
        pair.check()


def test_a_disk_that_is_too_small_is_said_before_training(drive: Path) -> None:
    with loop_disk(drive, "ext4", 32 * MIB) as disk:
        large = torch.nn.Parameter(torch.ones(3_000_000))
        with pytest.raises(OSError, match=r"\d+ more bytes wanted, \d+ free") as caught:
            optimizer_in(disk.path, [large])
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(disk / "states")
        assert not (disk / "states").exists()
        pair = Pair(disk.path)
        with pair.optimizer as optimizer:
            pair.step(1)
            with pytest.raises(OSError, match="bytes wanted") as caught:
                optimizer.add_param_group({"params": [large]})
            assert caught.value.errno == errno.ENOSPC
            assert len(optimizer.param_groups) == 1
            pair.step(2)
            pair.check()


def test_a_disk_that_checkpoints_fill_leaves_the_step_before_and_room_lets_it_go_on(drive: Path) -> None:
    with loop_disk(drive, "ext4", 32 * MIB) as disk:
        pair = Pair(disk.path)
        with pair.optimizer as optimizer:
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
            pair.is_as_before(caught.value)
            pair.step(3)
            pair.check()


def fill(disk: Disk, leave: int) -> None:
    with (disk / "filler").open("wb") as file:
        for more in (MIB, 4096):
            with contextlib.suppress(OSError):
                while os.statvfs(disk.path).f_bavail * os.statvfs(disk.path).f_frsize > leave:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, more)


def test_corrupt_bytes_are_named(drive: Path) -> None:
    pair = Pair(drive, checksum=True)
    with pair.optimizer:
        pair.step(2)
        data = drive / "states" / "deepnvme-store.data"
        content = data.read_bytes()
        with data.open("r+b") as file:
            for offset in range(0, len(content), 4096):
                file.seek(offset + 100)
                file.write(b"corrupt")
            os.fsync(file.fileno())
        pair.give_gradients()
        before = snapshot(pair.params)
        with pytest.raises(CorruptTensor, match="as after step 2") as caught:
            pair.optimizer.step()
        assert caught.value.filename == str(data)
        assert "CRC-32" in str(caught.value)
        assert_same(pair.params, before)
        with data.open("r+b") as file:
            file.write(content)
            os.fsync(file.fileno())
        pair.is_as_before(caught.value)


def test_a_checkpoint_is_not_made_of_corrupt_bytes(drive: Path) -> None:
    pair = Pair(drive, checksum=True)
    with pair.optimizer:
        pair.step(2)
        data = drive / "states" / "deepnvme-store.data"
        with data.open("r+b") as file:
            for offset in range(0, data.stat().st_size, 4096):
                file.seek(offset + 100)
                file.write(b"corrupt")
            os.fsync(file.fileno())
        with pytest.raises(CorruptTensor):
            pair.optimizer.state_dict()


def test_a_directory_that_is_removed_is_missed_by_nobody(pair: Pair, drive: Path) -> None:
    pair.step(2)
    shutil.rmtree(drive / "states")
    pair.step(2)
    pair.check()


# Interrupts.


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
@pytest.mark.parametrize("before", [0, 2])
def test_an_exception_of_the_optimizer_itself_leaves_the_step_before(drive: Path, precision: str, before: int) -> None:
    Failing.left = 1 << 30
    pair = Pair(drive, precision, Failing, {"lr": 1e-3})
    with pair.optimizer:
        pair.step(before)
        for left in range(0, 7):
            pair.give_gradients()
            Failing.left = left
            with pytest.raises(FloatingPointError) as caught:
                pair.optimizer.step()
            Failing.left = 1 << 30
            pair.is_as_before(caught.value)


SUB_GROUPS = [(7,), (3000,), (9,), (4000,), (4096,)]
"""Of which the first three are one, the smallest."""


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_an_exception_of_the_optimizer_in_what_is_stepped_first_in_memory_is_undone(
    drive: Path, before: int, masters: bool
) -> None:
    """And in all of it, as long as that has not been stepped there."""
    Failing.left = 1 << 30
    dtype = torch.bfloat16 if masters else torch.float32
    plain, params = parameters(dtype, SUB_GROUPS), parameters(dtype, SUB_GROUPS)
    reference = in_memory(plain, Failing, masters=masters, lr=1e-2)
    with optimizer_in(drive, params, Failing, master_weights=masters, dram_budget=1 << 40, lr=1e-2) as optimizer:
        for step in range(before + 2):
            give_gradients(plain, step)
            give_gradients(params, step)
            if step == before:
                states = copied(reference.state_dict())
                for left in (0, 1, 2) if step else range(len(params)):
                    Failing.left = left
                    with pytest.raises(FloatingPointError):
                        optimizer.step()
                    assert optimizer.steps == step
                    assert_same(params, plain)
                    assert_same_state(optimizer.state_dict(), states)
                Failing.left = 1 << 30
            reference.step()
            optimizer.step()
            assert_same(params, plain)
        assert_same_state(optimizer.state_dict(), reference.state_dict())


def test_an_exception_of_the_optimizer_later_in_memory_is_said_and_a_checkpoint_mends_it(drive: Path) -> None:
    Failing.left = 1 << 30
    plain, params = parameters(shapes=SUB_GROUPS), parameters(shapes=SUB_GROUPS)
    reference = Failing(plain, lr=1e-2)
    with optimizer_in(drive, params, Failing, dram_budget=1 << 40, lr=1e-2) as optimizer:
        for step in range(2):
            give_gradients(plain, step)
            give_gradients(params, step)
            reference.step()
            optimizer.step()
        saved, weights = optimizer.state_dict(), snapshot(params)
        Failing.left = 4
        with pytest.raises(FloatingPointError):
            optimizer.step()
        Failing.left = 1 << 30
        with pytest.raises(RuntimeError, match="could not be undone: load a checkpoint"):
            optimizer.step()
        optimizer.load_state_dict(saved)
        with torch.no_grad():
            for param, weight in zip(params, weights, strict=True):
                param.copy_(weight)
        reference.step()
        optimizer.step()
        assert_same(params, plain)
        assert_same_state(optimizer.state_dict(), reference.state_dict())


def test_what_fails_when_all_is_done_is_said_to_be_after_the_step(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, last = 0, 0
    step = torch.optim.AdamW.step

    def counted(inner: torch.optim.Optimizer) -> None:
        nonlocal calls
        calls += 1
        step(inner)

    class Option:
        """Cannot be compared once the last sub-group is stepped."""

        def __eq__(self, other: object) -> bool:
            if calls == last > 0:
                raise FloatingPointError("of a group that cannot be compared")
            return self is other

    pair = Pair(drive)
    with pair.optimizer as optimizer:
        option = Option()
        for each in (optimizer, pair.reference):
            each.param_groups[0]["option"] = option
        with monkeypatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", counted)
            pair.step(1)
            calls, last = 0, calls - 1  # the last one was the reference's
            pair.give_gradients()
            with pytest.raises(FloatingPointError) as caught:
                optimizer.step()
            calls = 0
        assert "as after step 1" not in "".join(getattr(caught.value, "__notes__", []))
        assert optimizer.steps == 2
        pair.reference.step()
        pair.steps += 1
        pair.check()


def test_clipping_is_refused_where_a_step_is(drive: Path) -> None:
    pair = Pair(drive, offload_gradients=True, dram_budget=1 << 40)
    with pair.optimizer as optimizer:
        pair.step(2)
        pair.give_gradients()
        with adamw_fails(2), pytest.raises(ArithmeticError):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"cannot go on: step 3 failed .* and could not be undone"):
            optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="this optimizer is closed"):
        optimizer.clip_grad_norm_(1.0)


INTERRUPTED = [
    ("float32", {}),
    ("masters", {}),
    ("masters", {"dram_budget": 60_000}),
    ("float32", {"offload_gradients": True, "dram_budget": 60_000}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "options"), INTERRUPTED)
def test_ctrl_c_at_any_line_leaves_one_step_or_the_other(drive: Path, precision: str, options: dict[str, Any]) -> None:
    pair = Pair(drive, precision, **options)
    dice = random.Random(precision)
    with pair.optimizer:
        pair.step(2)
        pair.give_gradients()
        with interrupt_at(1 << 30) as lines:
            pair.optimizer.step()
        pair.reference.step()
        pair.steps += 1
        undone = 0
        for _ in range(40):
            pair.give_gradients()
            interrupt: KeyboardInterrupt | None = None
            try:
                with interrupt_at(dice.randrange(lines.passed)):
                    pair.optimizer.step()
            except KeyboardInterrupt as error:
                interrupt = error
            notes = "".join(getattr(interrupt, "__notes__", []))
            if interrupt is not None and pair.optimizer.steps == pair.steps:
                if notes:
                    undone += 1
                    pair.is_as_before(interrupt)
                    continue
                pair.optimizer.step()  # nothing had begun
            elif interrupt is not None:
                assert f"as after step {pair.steps + 1}" in notes
            pair.reference.step()
            pair.steps += 1
            assert pair.optimizer.steps == pair.steps
            assert_same(pair.params, pair.plain)
        pair.check()
    assert undone > 15


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "options"), INTERRUPTED[:2])
def test_ctrl_c_at_any_time_leaves_one_step_or_the_other(drive: Path, precision: str, options: dict[str, Any]) -> None:
    """At those too at which no line of the package begins: while it waits, and in torch."""
    pair = Pair(drive, precision, **options)
    dice = random.Random(precision)
    with pair.optimizer:
        pair.step(2)
        begun = time.perf_counter()
        pair.step(3)
        usual = (time.perf_counter() - begun) / 3
        for _ in range(20):
            pair.give_gradients()
            timer = threading.Timer(dice.uniform(0, usual), signal.raise_signal, [signal.SIGINT])
            with contextlib.suppress(KeyboardInterrupt):
                timer.start()
                pair.optimizer.step()
                timer.join()
                time.sleep(1)
            timer.join()
            torch.set_grad_enabled(True)  # which torch's own decorators may not have come to
            if pair.optimizer.steps == pair.steps:
                pair.optimizer.step()
            pair.reference.step()
            pair.steps += 1
            assert pair.optimizer.steps == pair.steps
            assert_same(pair.params, pair.plain)
        pair.check()


# Gradients and parameters.


def test_a_gradient_that_cannot_be_cut_is_refused_before_anything_is_stepped(drive: Path) -> None:
    shapes = [(4096,), (4096,), (300, 41)]
    params = parameters(shapes=shapes)
    with optimizer_in(drive, params, torch.optim.Adagrad, dram_budget=50_000) as optimizer:
        for step in range(2):
            give_gradients(params, step)
            optimizer.step()
        before, states = snapshot(params), copied(optimizer.state_dict())
        with torch.sparse.check_sparse_tensor_invariants():
            params[2].grad = torch.sparse_coo_tensor(torch.tensor([[1, 5]]), torch.ones(2, 41), (300, 41))
        with pytest.raises(TypeError, match="set sub_group_size to 12300 or more"):
            optimizer.step()
        assert_same(params, before)
        assert_same_state(optimizer.state_dict(), states)
        assert optimizer.steps == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_masters_that_would_lose_precision_are_refused(dtype: torch.dtype, drive: Path) -> None:
    param = torch.nn.Parameter(torch.zeros(3, dtype=dtype, device="meta"))  # as any device but the CPU
    with pytest.raises(ValueError, match=f"a parameter of {dtype} on meta cannot have float32 master weights"):
        optimizer_in(drive, [param], master_weights=True)
    assert not (drive / "states").exists()


def test_nan_gradients_do_what_they_do_in_memory(pair: Pair) -> None:
    pair.step(1)
    pair.give_gradients()
    for params in (pair.plain, pair.params):
        for param in (params[0], params[2]):
            assert param.grad is not None
            param.grad.view(-1)[::3] = torch.nan
    pair.reference.step()
    pair.optimizer.step()
    pair.steps += 1
    pair.step(2)
    pair.check()


def test_parameters_without_gradients_stay_as_they_are(pair: Pair) -> None:
    for step in range(6):
        for params in (pair.plain, pair.params):
            give_gradients(params, step, missing=lambda index, step=step: (index + step) % 3 == 0 or index == 4)  # type: ignore[misc]
        pair.reference.step()
        pair.optimizer.step()
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


def test_parameters_that_are_frozen_or_thawed_midway(pair: Pair) -> None:
    for params in (pair.plain, pair.params):
        params[3].requires_grad_(False)
    for step in range(6):
        frozen = {0: {3}, 1: {3}, 2: {0, 3}, 3: {0}, 4: {0}, 5: set()}[step]
        for params in (pair.plain, pair.params):
            for index, param in enumerate(params):
                param.requires_grad_(index not in frozen)
            give_gradients(params, step, missing=lambda index, frozen=frozen: index in frozen)  # type: ignore[misc]
        pair.reference.step()
        pair.optimizer.step()
    pair.check()


@pytest.mark.parametrize("options", [{}, {"offload_gradients": True}, {"dram_budget": 1 << 40}], ids=str)
@pytest.mark.parametrize(
    ("kind", "more"),
    [(torch.optim.AdamW, ADAM), (torch.optim.Adam, {}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (Lion, {})],
)
def test_a_parameter_twice_in_a_group_is_what_it_is_in_memory(drive: Path, kind: Any, more: Any, options: Any) -> None:
    """torch warns of it, and steps it twice."""

    def twice(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        return [params[1], params[0], params[1], *params[2:], params[0]]

    plain, params = parameters(), parameters()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        reference = kind(twice(plain), **more)
    with pytest.warns(UserWarning, match="duplicate parameters") as warned:
        optimizer = optimizer_in(drive, twice(params), kind, **more, **options)
    assert len(warned) == 1
    with optimizer:
        for step in range(4):
            if step == 2:
                optimizer.load_state_dict(copied(reference.state_dict()))
            give_gradients(plain, step)
            give_gradients(params, step)
            reference.step()
            optimizer.step()
            assert_same(params, plain)
        assert_same_state(optimizer.state_dict(), reference.state_dict())


def test_a_parameter_in_two_groups_is_refused(drive: Path) -> None:
    param = parameters()[0]
    with pytest.raises(ValueError, match="more than one parameter group"):
        deepnvme.OffloadedOptimizer([{"params": [param]}, {"params": [param]}], torch.optim.Adam, nvme_path=drive / "states")
    assert not (drive / "states").exists()


class TwoDimensional(torch.optim.SGD):
    """Says what it does not take as torch's Muon does, and looks at memory, which the device meta has not."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            for param in group["params"]:
                if param.device.type != "cpu":
                    raise RuntimeError(f"no parameters on {param.device}")
                if param.ndim != 2 or param.dtype != torch.float32:
                    raise ValueError(f"only matrices of float32, got {param.dtype} of {tuple(param.shape)}")


REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    ("TwoDimensional", torch.zeros(3, 3, 3), {}),
    ("TwoDimensional", torch.zeros(3, 3, dtype=torch.bfloat16), {}),
    ("Muon", torch.zeros(3, 3, 3), {}),
    ("SparseAdam", torch.zeros(3, 3, dtype=torch.complex64), {}),
    ("SparseAdam", torch.zeros(3, 3).to_sparse(), {}),
    ("SGD", torch.zeros(3, 3).to_sparse(), {}),
    ("Adam", torch.zeros(3, 3), {"lr": -1.0}),
]


@pytest.mark.parametrize(("kind", "data", "options"), REFUSED, ids=[f"{row[0]} {number}" for number, row in enumerate(REFUSED)])
def test_what_a_class_does_not_take_is_refused_at_once_as_by_the_class(
    drive: Path, kind: str, data: torch.Tensor, options: dict[str, Any]
) -> None:
    if kind == "Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    made_of = TwoDimensional if kind == "TwoDimensional" else getattr(torch.optim, kind)
    param = torch.nn.Parameter(data)
    expected: type[Exception] = ValueError
    said = "layout"
    if kind != "SGD":
        with pytest.raises((ValueError, RuntimeError)) as caught:
            made_of([param], **options)
        expected, said = type(caught.value), re.escape(str(caught.value))
    with pytest.raises(expected, match=said):
        optimizer_in(drive, [param], made_of, **options)
    assert not (drive / "states").exists()
    good = torch.nn.Parameter(torch.zeros(5, 5))
    good.grad = torch.ones(5, 5)
    with optimizer_in(drive, [good], made_of, lr=0.1) as optimizer:
        if not options:
            with pytest.raises(expected, match=said):
                optimizer.add_param_group({"params": [param]})
            assert len(optimizer.param_groups) == 1
        if kind != "SparseAdam":  # which takes only sparse gradients
            optimizer.step()
            assert good.sum().item() != 0.0


def test_what_a_class_takes_only_with_master_weights_is_taken_with_them(drive: Path) -> None:
    param = torch.nn.Parameter(torch.zeros(5, 5, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    with optimizer_in(drive, [param], TwoDimensional, master_weights=True, lr=0.5) as optimizer:
        optimizer.step()
    assert torch.equal(param, torch.full((5, 5), -0.5, dtype=torch.bfloat16))


def test_tied_weights_are_one_parameter(drive: Path) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Tanh(), torch.nn.Linear(64, 64, bias=False))
        model[2].weight = model[0].weight
        models.append(model)
    plain = torch.optim.AdamW(models[0].parameters())
    with deepnvme.OffloadedOptimizer(models[1].parameters(), torch.optim.AdamW, nvme_path=drive / "states") as optimizer:
        for step in range(3):
            for each, model in zip((plain, optimizer), models, strict=True):
                torch.manual_seed(step)
                each.zero_grad()
                model(torch.randn(4, 64)).square().sum().backward()
                each.step()
        assert_same(models[1].parameters(), models[0].parameters())


@pytest.mark.usefixtures("checked_sparse_tensors")
def test_sparse_gradients_are_stepped_whole_and_refused_where_cut(drive: Path) -> None:
    def gradient() -> torch.Tensor:
        return torch.sparse_coo_tensor(torch.tensor([[1, 5]]), torch.ones(2, 41), (300, 41))

    plain, params = parameters(shapes=[(300, 41)]), parameters(shapes=[(300, 41)])
    reference = torch.optim.Adagrad(plain)
    with deepnvme.OffloadedOptimizer(params, torch.optim.Adagrad, nvme_path=drive / "whole") as optimizer:
        for _ in range(3):
            plain[0].grad, params[0].grad = gradient(), gradient()
            reference.step()
            optimizer.step()
        assert_same(params, plain)
    with deepnvme.OffloadedOptimizer(params, torch.optim.Adagrad, nvme_path=drive / "cut", sub_group_size=4096) as optimizer:
        with pytest.raises(TypeError, match="set sub_group_size to 12300 or more"):
            optimizer.step()
        assert_same(params, plain)


@pytest.fixture
def checked_sparse_tensors() -> Iterator[None]:
    """Which torch warns of not being asked for."""
    with torch.sparse.check_sparse_tensor_invariants():
        yield


# Directories, memory, processes.


@pytest.mark.slow
def test_another_process_in_the_directory_is_refused_and_told_whose_it_is(drive: Path, interpreters: Interpreters) -> None:
    with Pair(drive).optimizer as optimizer:
        said = interpreters.run(
            f"""
            import deepnvme
            params = [torch.nn.Parameter(torch.ones(3))]
            try:
                deepnvme.OffloadedOptimizer(params, torch.optim.Adam, nvme_path={str(drive / "states")!r})
            except OSError as error:
                print(type(error).__name__, error)
            """
        ).check()
        assert said.startswith("StoreLocked")
        assert f"in use by the OffloadedOptimizer of process {os.getpid()} on" in said
        with Pair(drive).optimizer, pytest.raises(RuntimeError, match="another one was made"):
            optimizer.step()  # in this process it takes the place of the first


def test_a_budget_that_is_too_small_is_said_before_training_and_leaves_nothing(drive: Path) -> None:
    with pytest.raises(OutOfBuffers, match="give a smaller sub_group_size"):
        Pair(drive, pool=BufferPool(4096 * 10))
    assert not (drive / "states").exists()


def test_what_others_have_leased_of_the_budget_is_said_before_training(drive: Path) -> None:
    pool = BufferPool(MIB)
    with pool.lease(MIB * 7 // 8), pytest.raises(OutOfBuffers, match=f"others have leased {MIB * 7 // 8}"):
        Pair(drive, pool=pool)
    pair = Pair(drive, pool=pool)
    with pair.optimizer:
        pair.step(2)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"offload_gradients": True}, {"dram_budget": 60_000}], ids=str)
def test_a_group_is_added_if_what_others_have_not_leased_suffices(drive: Path, options: dict[str, Any]) -> None:
    """What the optimizer itself has leased is no other's."""
    pool = BufferPool(MIB * 5 // 8 if options else 320 << 10)
    pair = Pair(drive, pool=pool, **options)
    more = [torch.nn.Parameter(torch.ones(3, 5))]
    with pair.optimizer as optimizer:
        pair.step(2)
        free = pool.budget - pool.in_use
        with pool.lease(free), pytest.raises(OutOfBuffers, match="others have leased"):
            optimizer.add_param_group({"params": more})
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": more})
        assert len(optimizer.param_groups) == 2
        pair.step()
        assert_same(pair.params, pair.plain)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("options", [{}, {"offload_gradients": True}, {"dram_budget": 60_000}], ids=str)
def test_the_smallest_budget_that_is_taken_is_enough(drive: Path, precision: str, options: dict[str, Any]) -> None:
    low, high = 0, 1 << 22
    while high - low > 4096:
        middle = (low + high) // 2 // 4096 * 4096
        try:
            Pair(drive, precision, pool=BufferPool(middle), **options).optimizer.close()
            high = middle
        except OutOfBuffers:
            low = middle
    pair = Pair(drive, precision, pool=BufferPool(high), **options)
    with pair.optimizer:
        pair.step(3)
        states = copied(pair.optimizer.state_dict())
        pair.check()
        pair.optimizer.load_state_dict(states)
        pair.step(2)
        pair.check()


@pytest.mark.slow
def test_workers_of_a_data_loader_leave_the_optimizer_alone(drive: Path, interpreters: Interpreters) -> None:
    interpreters.run(
        f"""
        import os, deepnvme
        from pathlib import Path
        from torch.utils.data import DataLoader

        torch.set_num_threads(1)
        model = torch.nn.Linear(100, 100)
        optimizer = deepnvme.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, nvme_path={str(drive / "states")!r})

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                if index == 3:
                    try:
                        model.weight.grad = torch.ones(100, 100)
                        before = model.weight.detach().clone()
                        optimizer.step()
                    except RuntimeError as error:
                        assert "fork" in str(error), error
                        assert torch.equal(before, model.weight)
                    else:
                        raise AssertionError("a child has stepped its parent's states")
                return torch.full((100,), float(index))

        for _ in range(2):
            for batch in DataLoader(Data(), batch_size=2, num_workers=2):
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
        assert Path({str(drive / "states" / "deepnvme-store.data")!r}).exists()
        optimizer.state_dict()
        optimizer.close()
        assert not Path({str(drive / "states")!r}).exists()
        """,
    ).check()


@pytest.mark.slow
def test_what_a_child_does_with_its_parents_optimizer_says_so(drive: Path, interpreters: Interpreters) -> None:
    interpreters.run(
        f"""
        import os, deepnvme
        model = torch.nn.Linear(100, 100)
        torch.set_num_threads(1)
        optimizer = deepnvme.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, nvme_path={str(drive / "states")!r})
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
