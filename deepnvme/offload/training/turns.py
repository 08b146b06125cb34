"""Functions that take turns: each runs in a thread of its own, and one at a time."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import torch

from deepnvme._interrupts import defer_interrupts


class _Abandoned(BaseException):
    """Raised in a function that waits for a turn it will not get any more."""


class Turn:
    """Runs a function from one pause to the next.

    The function sees the autocast of the thread that makes this object. While it runs, the state of torch's default generator is
    its own.

    Args:
        function: Given this object, calls :meth:`pause`.
        seed: Of the random numbers that the function draws.
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
        """Run the function until it pauses or ends. Raises what it raises."""
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
        """Let the others run. Called by the function, also by hooks of a backward that it runs."""
        self._random_state = torch.get_rng_state()
        self._paused.put(None)
        self._wait()

    def abandon(self) -> None:
        """End the function: where it pauses, or at its next pause if it runs. Blocks until it has ended. Idempotent."""
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
    """Return a context in which CPU tensors are cast as they are now."""
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.autocast("cpu", dtype, enabled) if enabled else contextlib.nullcontext()


def take_turns(turns: Sequence[Turn]) -> None:
    """Run functions in turns, each from one pause to the next, until all have ended. Blocks.

    Raises:
        BaseException: What the first of them raises. The others are ended at their pauses before it is raised.
    """
    with _ended(turns):
        while waiting := [turn for turn in turns if not turn.done]:
            for turn in waiting:
                turn.go_on()


@contextlib.contextmanager
def _ended(turns: Sequence[Turn]) -> Iterator[None]:
    """End the functions at the end of this context."""
    try:
        try:
            yield
        finally:
            _end(turns)
    except BaseException:  # Ctrl-C, possibly before anything was ended
        _end(turns)
        raise


def _end(turns: Sequence[Turn]) -> None:
    with defer_interrupts():
        for turn in turns:
            turn.abandon()
