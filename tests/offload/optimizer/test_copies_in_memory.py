"""Copies of parameters, to undo a step with: in memory as far as some is to spare, on the drive beyond that."""

from __future__ import annotations

import gc
import mmap
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deepnvme.memory.host import private_mapping
from deepnvme.offload.optimizer import spare_memory
from deepnvme.offload.optimizer.spare_memory import SpareMemory
from deepnvme.swap import BufferPool, OutOfBuffers

from ...support.disks import MIB
from ...support.engines import FailedTransfer, failing, transfers_are
from ...support.interrupts import interrupt_at
from ...support.patience import PATIENCE
from ...support.training import (
    ADAM,
    FULL_SHAPES,
    PRECISIONS,
    Pair,
    adamw_fails,
    assert_same,
    assert_same_state,
    backward,
    give_gradients,
    in_memory,
    optimizer_in,
    parameters,
)

NUMEL = 1 << 14
SHAPES = [(NUMEL,)] * 8
"""Each a sub-group of its own, with a copy of 64 KiB."""
COPY = 4 * NUMEL


def available(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Have the machine say that it has so much memory left."""
    monkeypatch.setattr(spare_memory, "available_memory", lambda: nbytes)


def written_nowhere(name: str, tensor: torch.Tensor) -> Any:
    raise AssertionError("nobody wants the memory")


def written_by_a_step(drive: Path, **options: Any) -> float:
    """Bytes written for each parameter in a third step of AdamW in float32."""
    params = parameters(shapes=SHAPES)
    with optimizer_in(drive, params, sub_group_size=NUMEL, **options, **ADAM) as optimizer:
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
        return optimizer.report().bytes_written / sum(param.numel() for param in params)


# How much is written.


def test_only_the_states_are_written_where_memory_has_room(drive: Path) -> None:
    assert written_by_a_step(drive) == 8


@pytest.mark.parametrize("copies", [0, 1, 3, 8])
def test_copies_take_half_of_what_the_machine_has_left(drive: Path, monkeypatch: pytest.MonkeyPatch, copies: int) -> None:
    available(monkeypatch, 2 * copies * COPY)
    assert written_by_a_step(drive) == 8 + 4 * (8 - copies) / 8


def test_copies_leave_the_pool_as_much_as_they_take(drive: Path) -> None:
    budgets = (MIB * 3 // 4, 2 * MIB, 4 * MIB)  # room for little more than three sub-groups, and for some and all of the copies
    written = []
    for budget in budgets:
        (directory := drive / str(budget)).mkdir()
        written.append(written_by_a_step(directory, pool=BufferPool(budget)))
    assert written[0] == 12
    assert 8 < written[1] < 12
    assert written[2] == 8


def test_what_others_have_of_the_budget_is_not_to_spare(drive: Path) -> None:
    pool = BufferPool(8 * MIB)
    params = parameters(shapes=SHAPES)
    with optimizer_in(drive, params, sub_group_size=NUMEL, pool=pool, **ADAM) as optimizer:
        written = []
        for step in range(4):
            give_gradients(params, step)
            if step == 2:
                with pool.lease(pool.budget - pool.in_use - MIB * 3 // 4):
                    optimizer.step()
                pool.trim()
            else:
                optimizer.step()
            written.append(optimizer.report().bytes_written / (8 * NUMEL))
    assert written[0] == written[2] == 12  # the first one makes the states in memory
    assert written[1] == written[3] == 8


def test_what_the_pool_keeps_for_others_is_not_taken(drive: Path) -> None:
    pool = BufferPool(8 * MIB)
    params = parameters(shapes=SHAPES)
    with optimizer_in(drive, params, sub_group_size=NUMEL, pool=pool, **ADAM) as optimizer:
        give_gradients(params, 0)
        optimizer.step()
        pool.lease(pool.budget - pool.in_use - MIB * 3 // 4).release()
        optimizer.step()
        assert optimizer.report().bytes_written == 12 * 8 * NUMEL


def test_residents_have_their_room_before_copies(drive: Path) -> None:
    """With step_in_backward, they come to memory when copies are there already."""
    for budget in range(2 * MIB, 6 * MIB, MIB // 2):
        params, plain = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
        reference = torch.optim.AdamW(plain, **ADAM)
        (directory := drive / str(budget)).mkdir()
        with optimizer_in(
            directory,
            params,
            sub_group_size=NUMEL,
            pool=BufferPool(budget),
            dram_budget=4 * 2 * COPY,
            step_in_backward=True,
            **ADAM,
        ) as optimizer:
            for step in range(3):
                backward(params, step)
                optimizer.step()
                reference.zero_grad()
                backward(plain, step)
                reference.step()
                assert_same(params, plain)


@pytest.mark.parametrize("options", [{}, {"step_in_backward": True}, {"offload_gradients": True}], ids=str)
def test_nothing_is_leased_for_copies_between_steps(drive: Path, options: dict[str, Any]) -> None:
    pool = BufferPool(8 * MIB)
    params = parameters(shapes=SHAPES)
    with optimizer_in(drive, params, sub_group_size=NUMEL, pool=pool, **options, **ADAM) as optimizer:
        for step in range(3):
            backward(params, step)
            optimizer.step()
            optimizer.zero_grad()
            assert pool.in_use <= 3 * (2 * COPY) * 9 // 8 + COPY
    assert pool.in_use == 0


def test_the_kernel_may_take_the_memory_between_steps(drive: Path) -> None:
    def reclaimable() -> int:
        text = Path("/proc/self/smaps_rollup").read_text()
        return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("LazyFree:"))

    params = parameters(shapes=[(1 << 20,)] * 8)
    before = reclaimable()
    with optimizer_in(drive, params, sub_group_size=1 << 20, **ADAM) as optimizer:
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
        assert reclaimable() - before >= 28 * MIB  # 32 MiB, if nobody was short of memory
    assert reclaimable() - before < 4 * MIB


def test_memory_that_cannot_be_had_sends_copies_to_the_drive(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(nbytes: int) -> mmap.mmap:
        raise OSError("none left")

    monkeypatch.setattr(spare_memory, "private_mapping", none_left)
    assert written_by_a_step(drive) == 12


def test_memory_that_must_not_be_taken_back_is_not_kept(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after mlockall."""
    monkeypatch.setattr(mmap, "MADV_FREE", -1)
    assert written_by_a_step(drive) == 8


def test_memory_is_lent_again_in_the_next_step() -> None:
    spare = SpareMemory(BufferPool(MIB), lambda: 0, written_nowhere)
    addresses = []
    for _ in range(2):
        spare.begin_step()
        copies = [spare.copy(str(number), 4096, lambda buffer: None) for number in range(3)]
        addresses.append({copy.buffer.data_ptr() for copy in copies if copy is not None and copy.buffer is not None})
        assert len(addresses[-1]) == 3
        assert spare.nbytes == 3 * 4096
        spare.take_back()
        assert spare.nbytes == 0
    assert addresses[0] == addresses[1]
    spare.release()


# Undoing.

PLACES = {"memory": 1 << 40, "both": 6 * 4096 * 4, "drive": 0}
"""Where copies are, and how much memory the machine has left for that."""


@pytest.fixture(params=PLACES)
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, drive: Path) -> Iterator[Pair]:
    available(monkeypatch, PLACES[request.param])
    made = Pair(drive)
    with made.optimizer:
        yield made


@pytest.mark.parametrize("operation", ["read", "write"])
def test_whichever_transfer_fails_leaves_the_step_before(pair: Pair, operation: str) -> None:
    pair.step(3)
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
        pair.is_as_before(error)
        number += 1
    assert number >= (4 if operation == "write" else 1)


def test_whichever_sub_group_fails_leaves_the_step_before(pair: Pair) -> None:
    pair.step(2)
    for number in range(1, 5):
        pair.give_gradients()
        with adamw_fails(number), pytest.raises(ArithmeticError) as caught:
            pair.optimizer.step()
        pair.is_as_before(caught.value)


def test_a_step_is_undone_without_the_drive_where_memory_has_the_copies(drive: Path) -> None:
    pair = Pair(drive)
    with pair.optimizer:
        pair.step(2)
        pair.give_gradients()
        with failing("write", 3), failing("read", 1, 1000), pytest.raises(OSError, match="as after step 2"):
            pair.optimizer.step()
        assert_same(pair.params, pair.plain)
        pair.reference.step()
        pair.optimizer.step()
        pair.steps += 1
        pair.check()


def test_copies_in_memory_stay_while_others_cannot_be_read(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, plain = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    reference = torch.optim.AdamW(plain, **ADAM)
    pool = BufferPool(8 * MIB)
    available(monkeypatch, 2 * 3 * COPY)  # of eight, three copies are in memory
    with optimizer_in(drive, params, sub_group_size=NUMEL, pool=pool, **ADAM) as optimizer:
        for step in range(2):
            give_gradients(params, step)
            give_gradients(plain, step)
            optimizer.step()
            reference.step()
        give_gradients(params, 2)
        give_gradients(plain, 2)
        with failing("write", 12), failing("read", 5, 1000):
            with pytest.raises(OSError, match="step 3 could not be undone yet"):
                optimizer.step()
            with pytest.raises(OSError, match="step 3 could not be undone yet"):
                optimizer.state_dict()
        optimizer.state_dict()
        assert_same(params, plain)
        assert pool.in_use <= 3 * (2 * COPY) * 9 // 8
        optimizer.step()
        reference.step()
        assert_same(params, plain)
        assert_same_state(optimizer.state_dict(), reference.state_dict())


@pytest.mark.parametrize("place", PLACES)
def test_zero_grad_undoes_what_backward_has_stepped(drive: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    available(monkeypatch, PLACES[place])
    params, plain = parameters(shapes=FULL_SHAPES), parameters(shapes=FULL_SHAPES)
    reference = in_memory(plain, torch.optim.AdamW, **ADAM)
    pool = BufferPool(8 * MIB)
    with optimizer_in(drive, params, pool=pool, step_in_backward=True, **ADAM) as optimizer:
        for step in range(3):
            backward(params, 10 + step)
            optimizer.zero_grad()
            assert_same(params, plain)
            backward(params, step)
            optimizer.step()
            reference.zero_grad()
            backward(plain, step)
            reference.step()
            assert_same(params, plain)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dram_budget", [0, 60_000, 1 << 40])
def test_the_same_bits(drive: Path, monkeypatch: pytest.MonkeyPatch, place: str, precision: str, dram_budget: int) -> None:
    available(monkeypatch, PLACES[place])
    pair = Pair(drive, precision, dram_budget=dram_budget)
    with pair.optimizer:
        pair.step(4)
        pair.check()


# Giving way.


def everything(pool: BufferPool) -> int:
    """Bytes that a request gets if nobody but those of the other leases and copies has any: nothing but a sub-group in flight."""
    return pool.budget - 3 * (3 * COPY) * 9 // 8 - COPY


class Wanted:
    """Another user of a pool, who wants most of it when the sub-group with this number is stepped; in this thread or another."""

    def __init__(self, pool: BufferPool, number: int, in_thread: bool) -> None:
        self._pool, self._number, self._in_thread = pool, number, in_thread
        self._step, self._calls = torch.optim.AdamW.step, 0
        self._mappings: list[weakref.ref[mmap.mmap]] = []
        self.error: BaseException | None = None
        self.got = 0
        self.mapped = 0
        """Bytes of mappings made for copies since this was entered that were there still when it had its memory."""

    def _map(self, nbytes: int) -> mmap.mmap:
        mapping = private_mapping(nbytes)
        self._mappings.append(weakref.ref(mapping))
        return mapping

    def __enter__(self) -> Wanted:
        self._maps = mock.patch.object(spare_memory, "private_mapping", self._map)
        self._maps.__enter__()
        self._patch = mock.patch.object(torch.optim.AdamW, "step", lambda inner: self._called(inner))
        self._patch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._patch.__exit__(*error)
        self._maps.__exit__(*error)

    def _called(self, inner: torch.optim.Optimizer) -> None:
        self._calls += 1
        if self._calls == self._number:
            if self._in_thread:
                thread = threading.Thread(target=self._use)
                thread.start()
                thread.join(PATIENCE)
                assert not thread.is_alive(), "it waits for the step"
            else:
                self._use()
        self._step(inner)

    def _use(self) -> None:
        try:
            with self._pool.lease(everything(self._pool)) as lease:
                lease.buffer.fill_(255)
                self.got = lease.nbytes
                self.mapped = sum(mapping() is not None for mapping in self._mappings) * COPY
        except MemoryError as error:
            self.error = error.with_traceback(None)  # whose frames would keep copies


@pytest.mark.parametrize("in_thread", [False, True], ids=["same thread", "other thread"])
def test_copies_go_to_the_drive_when_somebody_else_wants_the_memory(drive: Path, in_thread: bool) -> None:
    pool = BufferPool(4 * MIB)
    params, plain = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    reference = torch.optim.AdamW(plain, **ADAM)
    with optimizer_in(drive, params, sub_group_size=NUMEL, pool=pool, **ADAM) as optimizer:
        for step in range(6):
            give_gradients(params, step)
            give_gradients(plain, step)
            reference.step()
            before = optimizer.report().bytes_written_in_all if step else 0
            with Wanted(pool, 6 if step > 1 else 0, in_thread) as other:
                optimizer.step()
            assert_same(params, plain)
            report = optimizer.report()
            assert report.bytes_written == report.bytes_written_in_all - before
            if step > 1:
                assert other.error is None
                assert other.got == everything(pool)
                assert report.bytes_written >= 8 * 8 * NUMEL + 2 * COPY  # at least two copies, beside the states
        assert_same_state(optimizer.state_dict(), reference.state_dict())
    assert pool.in_use == 0


def test_the_memory_of_copies_that_gave_way_is_unmapped(drive: Path) -> None:
    pool = BufferPool(4 * MIB)
    params = parameters(shapes=SHAPES)
    with optimizer_in(drive, params, sub_group_size=NUMEL, pool=pool, **ADAM) as optimizer:
        give_gradients(params, 0)
        optimizer.step()  # the first copies in spare memory are made by the next one
        give_gradients(params, 1)
        with Wanted(pool, 8, in_thread=False) as other:
            optimizer.step()
    assert other.got == everything(pool)
    assert 0 < other.mapped <= 6 * COPY


@pytest.mark.parametrize("in_thread", [False, True], ids=["same thread", "other thread"])
@pytest.mark.parametrize("number", [1, 4, 8])
def test_a_step_is_undone_from_copies_that_have_given_way(drive: Path, number: int, in_thread: bool) -> None:
    pool = BufferPool(4 * MIB)
    params, plain = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    reference = torch.optim.AdamW(plain, **ADAM)
    with optimizer_in(drive, params, sub_group_size=NUMEL, pool=pool, **ADAM) as optimizer:
        for step in range(5):
            give_gradients(params, step)
            give_gradients(plain, step)
            if step >= 2:
                with adamw_fails(8), Wanted(pool, number, in_thread) as other, pytest.raises(ArithmeticError):
                    optimizer.step()
                assert other.got == everything(pool)
                assert_same(params, plain)
                assert_same_state(optimizer.state_dict(), reference.state_dict())
            if step >= 3:  # the drive cannot be read, too, for a while
                with (
                    adamw_fails(8),
                    Wanted(pool, number, in_thread),
                    failing("read", 7, 1000),
                    pytest.raises((ArithmeticError, OSError)),
                ):
                    optimizer.step()
                assert_same_state(optimizer.state_dict(), reference.state_dict())
                assert_same(params, plain)
            optimizer.step()
            reference.step()
            assert_same(params, plain)
        assert_same_state(optimizer.state_dict(), reference.state_dict())
    assert pool.in_use == 0


class WritesOfCopiesFail:
    """Writes of what is as large as a copy of parameters fail, and write something else."""

    def __enter__(self) -> WritesOfCopiesFail:
        self.failed = 0

        def replaced(operation: str, sound: Any) -> Any:
            def write(tensor: torch.Tensor, *arguments: Any) -> Any:
                if tensor.nbytes != COPY:
                    return sound(tensor, *arguments)
                self.failed += 1
                sound(torch.full_like(tensor, 255), *arguments).result()
                return FailedTransfer(OSError(5, "as asked for"))

            return write if operation == "write" else sound

        self._transfers = transfers_are(replaced)
        self._transfers.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._transfers.__exit__(*error)


def test_copies_that_cannot_give_way_stay_and_the_step_is_made_or_undone(drive: Path) -> None:
    """Who wants the memory is told that there is none."""
    pool = BufferPool(4 * MIB)
    params, plain = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    reference = torch.optim.AdamW(plain, **ADAM)
    with optimizer_in(drive, params, sub_group_size=NUMEL, pool=pool, **ADAM) as optimizer:
        for step in range(4):
            give_gradients(params, step)
            give_gradients(plain, step)
            if step >= 2:
                failures = WritesOfCopiesFail()
                with failures, adamw_fails(8), Wanted(pool, 7, False) as other, pytest.raises(ArithmeticError):
                    optimizer.step()
                assert failures.failed >= 2
                assert isinstance(other.error, OutOfBuffers)
                assert_same(params, plain)
                with WritesOfCopiesFail(), Wanted(pool, 7, False) as other:
                    optimizer.step()
                assert isinstance(other.error, OutOfBuffers)
            else:
                optimizer.step()
            reference.step()
            assert_same(params, plain)
        assert_same_state(optimizer.state_dict(), reference.state_dict())
    assert pool.in_use == 0


def test_memory_between_backward_and_step_is_not_the_copies(drive: Path) -> None:
    """The optimizer's own thread gets it, too, and zero_grad() undoes what backward has stepped."""
    pool = BufferPool(4 * MIB)
    params, plain = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    reference = torch.optim.AdamW(plain, **ADAM)
    with optimizer_in(drive, params, sub_group_size=NUMEL, pool=pool, step_in_backward=True, **ADAM) as optimizer:
        for step in range(4):
            for again in (True, False):
                backward(params, step)
                with pool.lease(everything(pool)) as lease:
                    lease.buffer.fill_(255)
                    if again:
                        optimizer.zero_grad()
                        assert_same(params, plain)
                    else:
                        optimizer.step()
            backward(plain, step)
            reference.step()
            reference.zero_grad()
            assert_same(params, plain)
        assert optimizer.report().bytes_written >= 8 * 8 * NUMEL + 2 * COPY
    assert pool.in_use == 0


def test_an_optimizer_dropped_within_a_step_leaves_no_memory_leased(drive: Path) -> None:
    pool = BufferPool(4 * MIB)
    params = parameters(shapes=SHAPES)
    optimizer = optimizer_in(drive, params, sub_group_size=NUMEL, pool=pool, step_in_backward=True, **ADAM)
    backward(params, 0)
    optimizer.step()
    backward(params, 1)
    assert pool.in_use > 8 * COPY
    del optimizer
    gc.collect()
    assert pool.in_use == 0


@pytest.mark.slow
def test_ctrl_c_while_copies_give_way_leaves_them_in_memory_or_on_the_drive(drive: Path) -> None:
    pool = BufferPool(4 * MIB)
    params, plain = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    reference = torch.optim.AdamW(plain, **ADAM)
    with optimizer_in(drive, params, sub_group_size=NUMEL, pool=pool, step_in_backward=True, **ADAM) as optimizer:
        number, came, step = 0, True, 0
        while came:
            backward(params, step)
            if step:
                number += 1 if number < 10 else 23
                interruption = interrupt_at(number)
                try:
                    with interruption:
                        pool.lease(everything(pool)).release()
                except KeyboardInterrupt:
                    came = True
                else:
                    came = interruption.passed >= number  # or it was lost in a finalizer
                gc.collect()  # what the traceback had
                assert pool.waiting == 0
                assert pool.in_use <= 3 * (3 * COPY) * 9 // 8 + COPY + 8 * COPY
                if number % 3 == 1:
                    optimizer.zero_grad()
                    assert_same(params, plain)
                    backward(params, step)
            optimizer.step()
            backward(plain, step)
            reference.step()
            reference.zero_grad()
            assert_same(params, plain)
            step += 1
        assert number > 100
        assert_same_state(optimizer.state_dict(), reference.state_dict())
    assert pool.in_use == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"step_in_backward": True}, {"offload_gradients": True}], ids=str)
def test_others_who_come_and_go_disturb_no_step(drive: Path, options: dict[str, Any]) -> None:
    """Threads that want the memory at any time, and steps of which every third is undone once."""
    pool = BufferPool(4 * MIB)
    params, plain = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    reference = torch.optim.AdamW(plain, **ADAM)
    ended = threading.Event()
    errors: list[BaseException] = []
    served = 0

    def come_and_go(seed: int) -> None:
        nonlocal served
        dice = random.Random(seed)
        try:
            while not ended.wait(dice.uniform(0, 0.005)):
                with pool.lease(dice.randrange(MIB, 2 * MIB), timeout=PATIENCE) as lease:
                    lease.buffer.fill_(255)
                    served += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=come_and_go, args=(seed,)) for seed in range(2)]
    with optimizer_in(drive, params, sub_group_size=NUMEL, pool=pool, **options, **ADAM) as optimizer:
        for thread in threads:
            thread.start()
        try:
            for step in range(40):
                if step % 3 == 2:
                    with adamw_fails(1 + step % 8), pytest.raises(ArithmeticError):  # noqa: PT012
                        backward(params, step)
                        optimizer.step()
                    optimizer.zero_grad()
                    assert_same(params, plain)
                backward(params, step)
                optimizer.step()
                optimizer.zero_grad()
                backward(plain, step)
                reference.step()
                reference.zero_grad()
                assert_same(params, plain)
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        assert not errors
        assert served > 40
        assert_same_state(optimizer.state_dict(), reference.state_dict())
    assert pool.in_use == 0
