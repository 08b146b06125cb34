"""Micro-batches of a step: division of a batch, and running them side by side, so that each block is read once for all."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from deepnvme._interrupts import defer_interrupts

from .blocks.parameter_block import ParameterBlock
from .step import TrainingStep


class MicroBatch(NamedTuple):
    """Arguments for the model's forward on one micro-batch, and the fraction of the batch that it is."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    share: float
    """Rows of the micro-batch divided by rows of the whole batch: the weight of its loss."""


def micro_batches_of(args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> list[MicroBatch]:
    """Divide a model's arguments into ``count`` micro-batches: tensors are cut along their first dimension, others repeated.

    Raises ValueError if the tensors' first dimensions differ, or are smaller than ``count``.
    """
    if count == 1:
        return [MicroBatch(args, kwargs, 1)]
    rows = {each.shape[0] for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.dim()}
    if len(rows) != 1 or min(rows) < count:
        raise ValueError(f"the first dimensions of the tensors must be equal, and at least {count}: got {sorted(rows)}")
    (row_count,) = rows
    found = []
    begin = 0
    for number in range(count):
        end = row_count * (number + 1) // count

        def cut(value: Any, begin: int = begin, end: int = end) -> Any:
            return value[begin:end] if isinstance(value, torch.Tensor) and value.dim() else value

        share = (end - begin) / row_count
        found.append(MicroBatch([cut(each) for each in args], {name: cut(each) for name, each in kwargs.items()}, share))
        begin = end
    return found


def draw_seeds(count: int) -> list[int]:
    """Draw a random seed for each micro-batch from torch's default generator.

    With a seed each, micro-batches draw the same random numbers whether they run one after the other or side by side.
    """
    return torch.randint(1 << 62, (count,), device="cpu").tolist()


class _Abandoned(BaseException):
    """Ends a paused function that will not be continued."""


class Turn:
    """Runs a function in a thread, from one pause to the next.

    The function runs under the autocast settings of the thread that constructs this object. Each function has its own state of
    torch's default generator, which is set while the function runs.

    Args:
        function: Called with this object. It calls :meth:`pause` to let other functions run.
        seed: Seed of the random numbers that the function draws.
    """

    def __init__(self, function: Callable[[Turn], None], seed: int) -> None:
        self.done = False
        """Whether the function has ended."""
        self._random_state = torch.Generator().manual_seed(seed).get_state()
        self._function = function
        self._go_on: SimpleQueue[bool] = SimpleQueue()
        self._paused: SimpleQueue[None] = SimpleQueue()
        self._error: BaseException | None = None
        self._started = False
        self._autocast = _autocast()
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._run,), daemon=True)

    def go_on(self) -> None:
        """Run the function until it pauses or ends. Raises the exceptions of the function."""
        if not self._started:
            with defer_interrupts():
                self._thread.start()
                self._started = True
        self._go_on.put(True)
        self._paused.get()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def pause(self) -> None:
        """Let the other functions run. Called by the function itself, or by hooks of a backward that it runs."""
        self._random_state = torch.get_rng_state()
        self._paused.put(None)
        self._wait()

    def abandon(self) -> None:
        """End the function at its current pause or, if it runs, at its next one. Blocks until it has ended. Idempotent."""
        if self._started:
            self._go_on.put(False)
            self._thread.join()

    def _wait(self) -> None:
        if not self._go_on.get():
            self._go_on.put(False)  # to those that the function would call on its way out
            raise _Abandoned
        torch.set_rng_state(self._random_state)

    def _run(self) -> None:
        try:
            with self._autocast:
                self._wait()
                self._function(self)
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.done = True
            self._paused.put(None)


def _autocast() -> contextlib.AbstractContextManager[object]:
    """Return a context with the CPU autocast settings of the calling thread."""
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.autocast("cpu", dtype, enabled) if enabled else contextlib.nullcontext()


def take_turns(turns: Sequence[Turn]) -> None:
    """Run functions in turns, each from one pause to the next, until all have ended. Blocks.

    Raises:
        BaseException: The first exception that a function raises. The other functions are ended at their pauses first.
    """
    try:
        try:
            while waiting := [turn for turn in turns if not turn.done]:
                for turn in waiting:
                    turn.go_on()
        finally:
            _end(turns)
    except BaseException:  # Ctrl-C, possibly before anything was ended
        _end(turns)
        raise


def _end(turns: Sequence[Turn]) -> None:
    with defer_interrupts():
        for turn in turns:
            turn.abandon()


class SideBySide:
    """Runs the micro-batches of a step side by side: all use a block before the next block is used (vertical accumulation).

    Each micro-batch runs in a thread, which waits for its turn whenever its forward or backward is about to use another block.
    Gradients are summed in the same order as if the micro-batches ran one after the other.

    Args:
        trained: The model with its blocks.
        saved_tensors: Returns a context under which a forward and its backward run.
    """

    def __init__(self, trained: TrainingStep, saved_tensors: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        self._trained, self._saved_tensors = trained, saved_tensors
        self._own = threading.local()

    def run(self, forwards: Sequence[Callable[[], torch.Tensor]], seeds: Sequence[int]) -> list[torch.Tensor]:
        """Run forward and backward of each micro-batch. Blocks.

        Args:
            forwards: For each micro-batch, a function that runs the forward and returns the loss.
            seeds: For each micro-batch, the seed of its random numbers.

        Returns:
            The losses, detached.

        Raises:
                OSError: If the drive cannot be read or written.
        """
        losses: list[torch.Tensor] = [torch.empty(0)] * len(forwards)

        def function(index: int) -> Callable[[Turn], None]:
            def run(turn: Turn) -> None:
                self._own.place = _Place(turn)
                with self._trained.uses.one_thread.helping(), self._saved_tensors():
                    loss = forwards[index]()
                    losses[index] = loss.detach()
                    loss.backward()  # type: ignore[no-untyped-call]

            return run

        turns = [Turn(function(index), seed) for index, seed in enumerate(seeds)]
        with (
            torch.random.fork_rng(devices=()),
            self._trained.running(len(forwards), in_step=len(forwards)),
            self._trained.uses.calling_before_use(self._before_use),
        ):
            take_turns(turns)
        return losses

    def _before_use(self, block: ParameterBlock, in_backward: bool) -> None:
        """If this micro-batch is about to use another block, first let the other micro-batches use the current block."""
        place: _Place = self._own.place
        if place.goes_on_to(block, in_backward):
            place.turn.pause()


class _Place:
    """Progress of one micro-batch through the blocks."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self._last_in_forward: ParameterBlock | None = None
        self._in_backward: set[ParameterBlock] = set()

    def goes_on_to(self, block: ParameterBlock, in_backward: bool) -> bool:
        """Record a use of a block, and return whether other micro-batches should run before it.

        They should not if a backward begins with the block that the forward ended with: the backward then continues at once, so
        that the tensors that the forward saved for this block are not kept while other micro-batches run.
        """
        if not in_backward:
            self._last_in_forward = block
            return True
        if block in self._in_backward:
            return False
        first = not self._in_backward
        self._in_backward.add(block)
        return not (first and block is self._last_in_forward)
