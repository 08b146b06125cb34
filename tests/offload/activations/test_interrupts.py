"""Ctrl-C under save_on_disk: at places of its code where the interpreter looks for signals, and while torch computes.

What this leaves out is at random, and longer, in tests/faults/torture.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.offload.activations import saving

from ...faults.torture.interruption import Interruption
from ...support.activations import Training, files_below, held_by, hooks_are_set, training_in
from ...support.engines import failing
from ...support.patience import PATIENCE

PACKAGE = Path(deepnvme.__file__).parent
TORCH = str(Path(torch.__file__).parent)
_NAMES = (*(f"offload/activations/{name}.py" for name in ("saving", "store", "saved_tensor")), "_interrupts.py")
OURS = {PACKAGE / name for name in _NAMES}
NOT_OURS = (TORCH, "<frozen ", pathlib.__file__, *(str(path) for path in PACKAGE.rglob("*.py") if path not in OURS))
"""The rest of the standard library is among what is interrupted: ``with`` statements of generators are there. Not pathlib, which
then leaves an iterator open, and says so."""


@pytest.fixture
def training(drive: Path) -> Iterator[Training]:
    with warnings.catch_warnings(), training_in(drive / "activations") as made:
        warnings.simplefilter("ignore", RuntimeWarning)
        made.step()
        yield made
    assert files_below(drive) == []


class Places(Interruption):
    """Interrupts at the n-th point, but not at the first of ``__exit__``: what that does not begin to do cannot be done.

    ``found``: the places of all points.
    """

    def __init__(self, number: int = 0) -> None:
        super().__init__(number, NOT_OURS)
        self.found: list[tuple[str, int, str]] = []

    def _point(self, frame: FrameType) -> None:
        ours = frame.f_code.co_filename == saving.__file__
        if ours and frame.f_code.co_name == "__exit__" and frame not in self._before:
            return
        super()._point(frame)
        if not self._number:
            self.found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))


def points_of(operation: Callable[[], object], most: int) -> list[int]:
    """One point of each line, drawn by lot, and of those as many as ``most``."""
    places = Places()
    with places:
        operation()
    random = Random(str(most))
    times: dict[tuple[str, int, str], list[int]] = {}
    for number, place in enumerate(places.found, 1):
        times.setdefault(place, []).append(number)
    numbers = [random.choice(each) for each in times.values()] + [each[0] for each in times.values()]
    assert len(times) > 10
    return sorted(random.sample(numbers, min(most, len(numbers))))


def interrupt(number: int, operation: Callable[[], object]) -> str:
    """Where it was interrupted; empty if it was not."""
    interruption = Places(number)
    try:
        with interruption:
            operation()
    except KeyboardInterrupt:
        if not interruption.where:
            raise
    return interruption.where


def check(training: Training) -> None:
    """Nothing is held; another thread does not wait for a lock; and steps are as ever."""
    assert not hooks_are_set()
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(held_by(training.activations)), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert seen, "a lock is still held"
    training.check_nothing_is_held()
    training.step()


def a_step(training: Training) -> None:
    try:
        training.step()
    except OSError as error:
        assert "cannot be read back" in str(error)  # noqa: PT017 - where a drive fails to


def a_forward_without_a_backward(training: Training) -> None:
    training.forward()


def a_nested_context(training: Training) -> None:
    with training.activations:
        training.step()


CASES: list[tuple[Callable[[Training], None], Callable[[], Any]]] = [
    (a_step, contextlib.nullcontext),
    (a_forward_without_a_backward, contextlib.nullcontext),
    (a_nested_context, contextlib.nullcontext),
    (a_step, lambda: failing("write", 3, 1 << 30)),
    (a_step, lambda: failing("read", 2, 1 << 30)),
]
NAMES = ["step", "forward without a backward", "nested context", "writes fail", "reads fail"]


@pytest.mark.parametrize(("operation", "drive_is"), CASES, ids=NAMES)
@pytest.mark.parametrize("most", [30, pytest.param(60, marks=pytest.mark.slow)])
def test_ctrl_c_anywhere_leaves_nothing_held_and_steps_as_before(
    training: Training, operation: Callable[[Training], None], drive_is: Callable[[], Any], most: int
) -> None:
    with drive_is():
        numbers = points_of(lambda: operation(training), most)
    came = 0
    for number in numbers:
        with drive_is():
            came += bool(interrupt(number, lambda: operation(training)))
        check(training)
    assert came > len(numbers) / 2  # how many there are depends on the drive


def test_ctrl_c_while_a_context_is_entered_leaves_it_or_it_is_entered(training: Training) -> None:
    def enter() -> None:
        with training.activations:
            pass

    places = Places()
    with places:
        enter()
    assert len(places.found) > 30
    for number in range(1, len(places.found) + 1):
        interrupt(number, enter)
        assert not hooks_are_set(), f"a hook stays after point {number}"
        assert held_by(training.activations) == {}
        with training.activations:
            assert len(held_by(training.activations)["contexts"]) == 1
    training.step()


def test_a_close_that_is_interrupted_is_finished_by_the_next(training: Training, drive: Path) -> None:
    def forward_and_close() -> None:
        training.forward()
        training.activations.close()

    for number in points_of(forward_and_close, 30):
        interrupt(number, forward_and_close)
        training.activations.close()
        assert files_below(drive) == []
        training.step()
        check(training)


def test_ctrl_c_while_files_are_created_leaves_none(training: Training, drive: Path) -> None:
    training.activations.close()

    def create() -> None:
        with training.activations:
            pass

    for number in points_of(create, 40):
        interrupt(number, create)
        training.activations.close()
        check(training)
        training.activations.close()
        assert files_below(drive) == []


def test_a_backward_that_was_interrupted_can_be_made_again(training: Training) -> None:
    outputs = [training.forward()]

    def backward() -> tuple[torch.Tensor, ...]:
        return training.gradients(outputs[0], retain_graph=True)

    came = 0
    for number in points_of(backward, 40):
        came += bool(interrupt(number, backward))
        training.check(backward())
        assert held_by(training.activations)["bytes in memory"] <= training.activations._memory_budget
    assert came > 10
    outputs.clear()
    check(training)


def test_a_drive_that_failed_in_an_interrupted_forward_is_tried_again_by_the_next(training: Training) -> None:
    with failing("write", 0, 1 << 30):
        numbers = points_of(training.forward, 40)
    for number in numbers:
        with failing("write", 0, 1 << 30):
            interrupt(number, training.forward)
        training.check_nothing_is_held()
        training.step()
        assert training.activations.report().bytes_read > 0


@pytest.mark.parametrize("nbytes", [1 << 14, 1 << 20])
def test_a_ctrl_c_at_any_moment_of_a_training_is_raised_and_harms_nothing(drive: Path, nbytes: int) -> None:
    """By a signal, which comes while torch computes as a rule: the Python code that runs next raises it. That must be no
    finalizer, where it would be swallowed."""
    swallowed = 0
    with warnings.catch_warnings(), training_in(drive, nbytes=nbytes) as training:
        warnings.filterwarnings("ignore", "the drive sets the pace", RuntimeWarning)
        training.step()
        begun = time.perf_counter()
        for _ in range(5):
            training.step()
        seconds = (time.perf_counter() - begun) / 5
        random = Random(nbytes)
        for _ in range(40):
            swallowed += not signalled(training, random.uniform(0, seconds))
            check(training)
    assert not swallowed
    assert files_below(drive) == []


def signalled(training: Training, after: float) -> bool:
    """Make steps until a Ctrl-C comes after so many seconds. Returns whether it was raised."""
    sent = threading.Event()

    def send() -> None:
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGINT)
        sent.set()

    thread = threading.Thread(target=send)
    try:
        thread.start()
        while not sent.is_set():
            training.step()
        training.step()
    except KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):
            thread.join()
        return True
    thread.join()
    return False
