"""Steps of an offloaded optimizer, as one state machine. A step is never undone: stepped sub-groups stay stepped.

The phases, and the methods that lead from one to another:

    IDLE        -- step()                                    -->  STEPPING
    STEPPING    -- _commit()                                 -->  IDLE
    STEPPING    -- _fail(), if nothing was stepped           -->  IDLE
    STEPPING    -- _fail()                                   -->  UNFINISHED
    UNFINISHED  -- step(), which goes on with the same step  -->  STEPPING
    UNFINISHED  -- load()                                    -->  IDLE

With DTensors, _fail() always leads to UNFINISHED: another rank may have stepped something. An OSError in backward changes no
phase: it is kept, and step() or clip() raises it.

Invariants:

1. ``_stepped`` has the sub-groups whose parameters and states are those of step ``steps + 1``. All others are at ``steps``.
2. A sub-group is added to ``_stepped`` while interrupts are still deferred for its step, so that none is stepped twice.
3. ``steps`` counts up in ``_commit`` alone: when every sub-group that has a gradient is stepped and written, on all ranks.
4. While the phase is UNFINISHED, ``_remaining`` has the sub-groups still to be stepped, with the pieces that had gradients.
   Backward, ``zero_grad`` and ``clip`` are then refused, so that these gradients stay, and so is ``state_dict``.
"""

from __future__ import annotations

import enum
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from deepnvme._interrupts import defer_interrupts
from deepnvme.memory.pool import BufferPool
from deepnvme.store.tensor_store import TensorStore
from deepnvme.telemetry.callers import stack_level

from .counted_io import CountedIO
from .gradients import GradientHooks, SubGroupGradients, pieces_of
from .params import ParamRanks, combine_shard_norms
from .pipeline import SubGroupPipeline
from .report import StepReport
from .residency import ResidencyPolicy
from .state_dict import OffloadedStates, loaded
from .sub_group import SubGroup
from .usability import UsabilityGuard
from .versions import BlockVersions


class OptimizerPhase(enum.Enum):
    """State of an optimizer with regard to its steps."""

    IDLE = "idle"
    """All parameters and states are those of the last step."""
    STEPPING = "stepping"
    """A step is under way: :meth:`OptimizerStep.step` runs."""
    UNFINISHED = "unfinished"
    """A step has failed after sub-groups were stepped, on this rank or perhaps on another. The next step() finishes it."""


class OptimizerStep:
    """Makes the steps of an :class:`deepnvme.OffloadedOptimizer`.

    Starts without parameters; :meth:`add` adds them.

    Args:
        optimizer: The OffloadedOptimizer. Its ``param_groups`` have the options (learning rate and the like) of each step.
        store: The store that blocks and gradients are written to.
        pool: The buffer pool that memory is leased from.
        residency: Decides which sub-groups stay in memory.
        offload_gradients: Whether gradients go to the drive during backward.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        store: TensorStore,
        pool: BufferPool,
        residency: ResidencyPolicy,
        *,
        offload_gradients: bool,
    ) -> None:
        self._optimizer, self._store, self._residency = optimizer, store, residency
        self._offload_gradients = offload_gradients
        self.phase = OptimizerPhase.IDLE
        self.steps = 0
        self._stepped: dict[SubGroup, None] = {}
        self._remaining: dict[SubGroup, set[int]] | None = None
        self._partly_stepped = False
        """Whether the optimizer's own code has raised in this step, perhaps after it had changed parameters."""
        self._loss: Any = None
        """Return value of the closure in the current step."""
        self._backward_error: OSError | None = None
        """The first OSError of the current backward, which continues despite it. :meth:`step` or :meth:`clip` raises it later."""
        self.sub_groups: list[SubGroup] = []
        self._pieces: dict[torch.Tensor, list[tuple[SubGroup, int]]] = {}
        self.guard = UsabilityGuard("optimizer")
        self.io = CountedIO(store)
        self._gradients = SubGroupGradients(self.io, pool)
        self._versions = BlockVersions(store)
        self._pipeline = SubGroupPipeline(self.io, self._versions, self._gradients, residency.planner, pool)
        self.states = OffloadedStates(self._pieces, self._versions, self.check_idle, self._pipeline.write_resident)
        self._hooks = GradientHooks(self._gradient_arrived)
        self._refusals: list[RemovableHandle] = []
        self._ranks = ParamRanks(())

    def add(self, sub_groups: Sequence[SubGroup]) -> None:
        """Add sub-groups and reserve space for their blocks. Raises OSError, and adds none, if the drive has no room."""
        self._residency.choose([*self.sub_groups, *sub_groups])
        self._store.reserve(self._residency.drive_bytes([*self.sub_groups, *sub_groups]))
        pieces = pieces_of(sub_groups)
        ranks = ParamRanks([*self._pieces, *pieces])
        with defer_interrupts():  # hooks are registered with torch, too: Ctrl-C must not separate the two
            self._pieces.update(pieces)
            self._ranks = ranks
            if self._offload_gradients:
                self._hooks.add(pieces)
            self.sub_groups += sub_groups

    # -- one step

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Step all sub-groups that have gradients, or finish the unfinished step. See :meth:`OffloadedOptimizer.step`."""
        self.guard.check_open()
        try:
            self._on_all_ranks(lambda: self._step_all(closure), lambda _: self._commit(), self._fail)
            return self._loss
        finally:
            self._loss = self._loss if self.phase is OptimizerPhase.UNFINISHED else None

    def _on_all_ranks(
        self,
        work: Callable[[], Any],
        succeed: Callable[[Any], Any],
        fail: Callable[[BaseException], None] = lambda error: None,
    ) -> Any:
        """Call ``work`` on all ranks, and wait for all. If it fails on any rank, raise on all; else call ``succeed``.

        Args:
            work: Called first. It may be interrupted.
            succeed: Called with the result of ``work`` if it succeeds on all ranks. The result of ``succeed`` is returned.
            fail: Otherwise called with the error: that of ``work``, or a RuntimeError that names another rank.
        """
        error: BaseException | None = None
        done: Any = None
        with self.guard.in_use():
            try:
                done = work()
            except BaseException as raised:
                error = raised
            with defer_interrupts():  # what follows is a collective: all ranks have to take part
                try:
                    failed = self._ranks.failed(here=error is not None)
                except RuntimeError as gone:
                    error = error or gone
                else:
                    if error is None and failed is not None:
                        error = RuntimeError(f"rank {failed} failed in this step, and says why")
                if error is None:
                    return succeed(done)
                fail(error)
        try:
            raise error
        finally:
            del error  # whose traceback has this frame

    def _step_all(self, closure: Callable[[], Any] | None) -> None:
        """Run the optimizer on all sub-groups that this step has not updated yet, and wait until their states are written."""
        goes_on = self.phase is not OptimizerPhase.IDLE  # a second Ctrl-C may have come before _fail() was called
        if goes_on:
            self._check_gradients_are_there()
            self._pipeline.write_again()
        else:
            self._versions.tidy()
            self._loss = None
            self.io.times.begin()
            if closure is not None:
                with torch.enable_grad():
                    self._loss = closure()
                self.io.times.begin()  # again: the closure may have called zero_grad(), which resets the times
        self._raise_backward_error()
        self._offload_the_rest()
        self._gradients.prepare(self._left())
        self._mark_changes()
        self.phase = OptimizerPhase.STEPPING
        order = self._pipeline.best_order(self._left())
        self._pipeline.expect(order)
        for sub_group in order:
            self._step_one(sub_group)
        self._pipeline.drain()

    def _step_one(self, sub_group: SubGroup) -> None:
        """Step a sub-group, and start writing its states. Waits for its block and gradients."""
        inputs = self._pipeline.load(sub_group)
        with defer_interrupts():
            self._partly_stepped = True
            self._pipeline.step(sub_group, inputs, self._optimizer.param_groups)
            self._partly_stepped = False
            self._stepped[sub_group] = None  # whatever comes now, it is not stepped again
            self._pipeline.write_behind(sub_group)

    def _left(self) -> list[SubGroup]:
        """Return the sub-groups that are not stepped yet and have gradients, or had them when the step failed."""
        wanted = self._remaining if self._remaining is not None else filter(self._gradients.has, self.sub_groups)
        return [each for each in wanted if each not in self._stepped]

    def _check_gradients_are_there(self) -> None:
        """Raise RuntimeError if gradients that the unfinished step needs were dropped, for example by ``model.zero_grad()``."""
        left = [(each, pieces) for each, pieces in (self._remaining or {}).items() if each not in self._stepped]
        gone = sum(not pieces <= self._gradients.pieces_with_gradients(each) for each, pieces in left)
        if gone:
            raise RuntimeError(f"the gradients of {gone} sub-groups that are left to be stepped are gone: call load_state_dict()")

    def _commit(self) -> None:
        """End a completed step: drop gradients, make the report. Called with interrupts deferred."""
        self.steps += 1
        for sub_group in self._stepped:
            sub_group.pull(self._optimizer.param_groups)
        self._pipeline.commit()
        stepped = len(self._stepped)
        self._end()
        self._gradients.clear()
        times, fields = self.io.times, self.io.end_step(self.steps)
        self.io.keep_report(
            StepReport(
                **fields,
                computing=times.computing.seconds,
                waiting=times.waiting.seconds,
                bytes_written_in_all=self.io.bytes_written_in_all,
                resident_bytes=self._pipeline.resident_bytes,
                sub_groups=stepped,
            )
        )

    def _fail(self, error: BaseException) -> None:
        """Set the phase after an error, and add to the error how far the step came and what to do."""
        self._pipeline.end_uses()
        if self.phase is OptimizerPhase.STEPPING:  # before, what other code has changed is not marked yet
            self._remember_params()  # a change from here on is other code's: a model may be loaded
        if self._stepped or self._ranks.several:
            if self._remaining is None:
                self._remaining = {each: self._gradients.pieces_with_gradients(each) for each in self._left()}
            self.phase = OptimizerPhase.UNFINISHED
            self._refuse_backward()
            left = len(self._left())
            said = (
                f"step {self.steps + 1} is unfinished: {left} of {left + len(self._stepped)} sub-groups are left to be stepped."
                f" Call step(){' on all ranks' if self._ranks.several else ''} to finish it, or load_state_dict()"
            )
        else:
            self.phase = OptimizerPhase.IDLE
            self.io.finish()
            said = f"the optimizer and its parameters are as after step {self.steps}"
        if self._partly_stepped:
            said += ", but its own code may have stepped parameters of one sub-group"
        self._partly_stepped = False
        if isinstance(error, OSError) and error.errno is not None:
            if said not in str(error.strerror):  # said already, if a closure has run backward
                error.strerror = f"{error.strerror}; {said}"
        elif hasattr(error, "add_note") and said not in getattr(error, "__notes__", ()):
            error.add_note(said)

    def _end(self) -> None:
        """Clear what belongs to the current step, allow backward again, and set the phase to IDLE."""
        self._stepped.clear()
        self._remaining = self._backward_error = None
        self.phase = OptimizerPhase.IDLE
        self._allow_backward()
        self._remember_params()

    # -- calls that are refused during a step

    def check_idle(self) -> None:
        """Raise RuntimeError if a step is unfinished, after :meth:`close`, or in a forked child."""
        self.guard.check_open()
        if self.phase is not OptimizerPhase.IDLE:
            raise RuntimeError(self._unfinished())

    def _unfinished(self) -> str:
        """Return the message of the RuntimeError for calls that an unfinished step refuses."""
        return (
            f"step {self.steps + 1} is unfinished, {len(self._left())} sub-groups are left to be stepped: call step() to finish"
            " it first, or load_state_dict()"
        )

    def _refuse_backward(self) -> None:
        """Add hooks by which backward raises before it changes the gradients that the unfinished step needs."""
        if not self._refusals:
            refuse = weakref.WeakMethod(self._raise_unfinished)  # parameters hold the hooks, and may outlive the optimizer
            hook = lambda gradient: (method := refuse()) and method()  # noqa: E731
            self._refusals = [
                param.register_hook(hook)  # type: ignore[no-untyped-call]
                for param in self._pieces
                if param.requires_grad
            ]

    def _raise_unfinished(self) -> None:
        raise RuntimeError(self._unfinished())

    def _allow_backward(self) -> None:
        for handle in self._refusals:
            handle.remove()
        self._refusals = []

    # -- between steps

    def clip(self, params: Sequence[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip all offloaded gradients, even those still in memory, on all ranks or on none.

        Args:
            params: All parameters, each once, in the same order on all ranks.
            max_norm: The total norm to scale down to.
            norm_type: The order of the norm; may be ``inf``.

        Returns:
            The total norm before clipping, over all ranks.
        """
        self.check_idle()

        def norms() -> list[torch.Tensor | None]:
            """Return the norms of this rank's gradients. Blocks."""
            self._raise_backward_error()
            self._offload_the_rest()
            self._gradients.flush()
            return self._gradients.norms(params, norm_type)

        def clip(norms: list[torch.Tensor | None]) -> torch.Tensor:
            """Combine the norms of all ranks, which is another collective, and clip by them."""
            return self._gradients.clip(combine_shard_norms(params, norms, norm_type), max_norm, norm_type)

        total: torch.Tensor = self._on_all_ranks(norms, clip)
        return total

    def zero_grad(self) -> None:
        """Drop the gradients on the drive. Raises RuntimeError if a step is unfinished."""
        self.check_idle()
        with self.guard.in_use():
            self._backward_error = None
            collected = self._gradients.any_collected
            self._gradients.clear()  # also if an interrupted call has left nothing but memory
            if collected:
                self.io.finish()

    def load(self, state: dict[str, Any]) -> None:
        """Replace all states and parameter groups or, on any exception, none. An unfinished step is abandoned.

        Warns with RuntimeWarning if parameters keep values of the unfinished step.

        Args:
            state: What torch's ``load_state_dict`` passes to ``__setstate__``: "state" by parameter, and "param_groups".
        """
        self.guard.check_open()
        stepped: set[torch.Tensor] = set()
        with self.guard.in_use(), loaded(state, self.sub_groups, self._pipeline, self.io):
            for sub_group in self._stepped:
                changed = sub_group.changed_pieces()
                stepped |= {piece.param for index, piece in enumerate(sub_group.pieces) if index not in changed}
            self._optimizer.param_groups = state["param_groups"]
            self._end()
            self.io.finish()
        if stepped:
            warnings.warn(
                f"{len(stepped)} parameters are as the unfinished step {self.steps + 1} left them: load the model too",
                RuntimeWarning,
                stacklevel=stack_level(),
            )

    def close(self, reason: Callable[[], str] | None = None) -> None:
        """Release all memory and remove the hooks. The store is not closed.

        Args:
            reason: Returns the message of the RuntimeError that later calls raise; None for the standard message.
        """
        self.guard.check_process()
        self.guard.close(reason)
        self._hooks.remove()
        self._allow_backward()
        self._pipeline.clear()
        self._gradients.release()

    # -- in backward

    @torch.no_grad()
    def _gradient_arrived(self, param: torch.Tensor) -> None:
        """Offload a parameter's gradient. A hook that backward calls per parameter.

        After an OSError, gradients not yet offloaded stay in ``param.grad``; step() then uses them.
        """
        self.guard.check_open()
        with self.guard.in_use():
            self.io.times.begin()
            self.io.record_ended()
            try:
                self._gradients.take_in(param, self._pieces[param])
            except OSError as error:
                self._backward_error = self._backward_error or error.with_traceback(None)

    def _raise_backward_error(self) -> None:
        error, self._backward_error = self._backward_error, None
        if error is not None:
            raise error

    def _offload_the_rest(self) -> None:
        """Offload gradients that no hook has seen: set by hand, or of parameters that had ``requires_grad=False`` when added."""
        if self._offload_gradients:
            for param, pieces in self._pieces.items():
                if param.grad is not None:
                    with defer_interrupts():
                        self._gradients.take_in(param, pieces)

    def _mark_changes(self) -> None:
        """Mark parameters that other code has changed since :meth:`_remember_params`: the step updates their master weights."""
        for sub_group in self.sub_groups:
            sub_group.mark_stale(sub_group.changed_pieces())

    def _remember_params(self) -> None:
        """Record the current version of each parameter, so that :meth:`_mark_changes` finds changes made by other code."""
        for sub_group in self.sub_groups:
            sub_group.remember_params()
