"""Make an offloaded optimizer's steps. Each step is either completed for all sub-groups, or undone for all."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from deepnvme._descriptions import state_text
from deepnvme._interrupts import defer_interrupts
from deepnvme.memory.pool import BufferPool
from deepnvme.store.tensor_store import TensorStore

from .block_versions import BlockVersions
from .counted_io import CountedIO
from .gradients import GradientHooks, SubGroupGradients
from .params import ParamRanks, StepVote, over_ranks
from .pipeline import SubGroupPipeline
from .resident_sub_groups import ResidencyPolicy, ResidentBlocks
from .spare_memory import SpareMemory
from .state_dict import OffloadedStates, loaded
from .sub_group import SubGroup

_T = TypeVar("_T")


class UsabilityGuard:
    """Raises if the optimizer is closed, broken by a failed step, or used in a forked child."""

    def __init__(self) -> None:
        self._closed: Callable[[], str] | None = None
        self._users: list[None] = []  # one for each method that runs: appending and removing needs no lock
        self.broken: str | None = None
        """Why the optimizer cannot be used any more; None while it can."""
        self._process = os.getpid()

    def state(self) -> str:
        """State for ``repr``: "closed", "broken by a failed step", "of process ...", or ""."""
        broken = "" if self.broken is None else "broken by a failed step"
        return state_text(self._closed is not None, self._process) or broken

    def close(self, reason: Callable[[], str] | None = None) -> None:
        """Have all later checks but :meth:`check_process` fail. ``reason``: says why, if its user has not closed it."""
        if self._closed is None:
            self._closed = (lambda: "this optimizer is closed") if reason is None else reason

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Have :meth:`check_unused` raise in this context."""
        self._users.append(None)
        try:
            yield
        finally:
            self._users.pop()

    def check_unused(self) -> None:
        """Raise RuntimeError within :meth:`in_use`, in this thread or another."""
        if self._users:
            raise RuntimeError("a step or another method of it is running")

    def break_down(self, reason: str) -> None:
        """Record that a step has failed and cannot be undone."""
        self.broken = reason

    def repair(self) -> None:
        """Record that other states have taken the place of those that a failed step has left."""
        self.broken = None

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child."""
        if os.getpid() != self._process:
            raise RuntimeError("this optimizer is the parent process's: a forked child cannot use it")

    def check_open(self) -> None:
        """Raise RuntimeError in a forked child, or after close()."""
        self.check_process()
        if self._closed is not None:
            raise RuntimeError(self._closed())

    def check_usable(self) -> None:
        """Raise RuntimeError in a forked child, after close(), or after a step that failed and cannot be undone."""
        self.check_open()
        if self.broken is not None:
            raise RuntimeError(f"this optimizer cannot go on: {self.broken}")


class StepRunner:
    """Runs the steps of an :class:`OffloadedOptimizer`: schedules sub-groups, commits or undoes, and reports.

    Starts without parameters; :meth:`add` adds them.

    Args:
        optimizer: The OffloadedOptimizer. Its ``param_groups`` have the options (learning rate and the like) of each step.
        store: Where blocks and gradients are written.
        pool: Where memory is leased.
        residency: Decides which sub-groups stay in memory.
        offload_gradients: Whether gradients go to the drive during backward.
        in_backward: Whether sub-groups are stepped during backward.
        verbose: Whether to print a line after each step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        store: TensorStore,
        pool: BufferPool,
        residency: ResidencyPolicy,
        *,
        offload_gradients: bool,
        in_backward: bool,
        verbose: bool,
    ) -> None:
        self._optimizer, self._store, self._residency = optimizer, store, residency
        self._in_backward = in_backward
        self.sub_groups: list[SubGroup] = []
        self._pieces: dict[torch.Tensor, list[tuple[SubGroup, int]]] = {}
        self.steps = 0
        self.guard = UsabilityGuard()
        self._unfinished = False
        """Whether a step was begun and is neither committed nor undone. The next call undoes it first."""
        self._not_undone: str | None = None
        """The error of the last attempt to undo the unfinished step; None if there was no attempt."""
        self._gradients_lost = False
        self._offload_gradients = offload_gradients
        self._order_in_backward: list[SubGroup] = []
        """The sub-groups that the previous step has stepped in backward, in the order they were stepped."""
        self.io = CountedIO(store, verbose)
        self._gradients = SubGroupGradients(self.io, pool)
        self._blocks = BlockVersions(store)
        self._residents = ResidentBlocks(self.io, self._blocks, pool)
        spare = SpareMemory(pool, functools.partial(residency.needed_memory, self.sub_groups), store.put)
        self._pipeline = SubGroupPipeline(self.io, self._blocks, self._gradients, pool, spare)
        self.states = OffloadedStates(self._pieces, store, self._blocks, self._residents, self.check_between_steps)
        self._hooks = GradientHooks(self._gradient_arrived)
        self._ranks = ParamRanks(())

    @property
    def leased_bytes(self) -> int:
        """Bytes of memory that are leased for these sub-groups."""
        return self._resident_bytes + self._pipeline.leased_bytes + self._gradients.leased_bytes

    @property
    def _resident_bytes(self) -> int:
        return sum(each.resident.nbytes for each in self.sub_groups if each.resident is not None)

    def add(self, sub_groups: Sequence[SubGroup]) -> None:
        """Add sub-groups and reserve space for their blocks. Raises OSError, and adds none, if the drive has no room."""
        self._store.reserve(self._residency.drive_bytes([*self.sub_groups, *sub_groups]))
        pieces: dict[torch.Tensor, list[tuple[SubGroup, int]]] = {}
        for sub_group in sub_groups:
            for index, piece in enumerate(sub_group.pieces):
                pieces.setdefault(piece.param, []).append((sub_group, index))
        ranks = ParamRanks([*self._pieces, *pieces])
        with defer_interrupts():  # hooks are registered with torch, too: Ctrl-C must not separate the two
            self._pieces.update(pieces)
            self._ranks = ranks
            if self._in_backward or self._offload_gradients:
                self._hooks.add(pieces)
            self.sub_groups += sub_groups

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Step all sub-groups, on all ranks or on none. Blocks. See :meth:`OffloadedOptimizer.step`."""
        return self._on_all_ranks(lambda vote: self._step(closure, vote))

    def clip(self, params: Sequence[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip all gradients that are offloaded, those still in memory too, on all ranks or on none.

        Args:
            params: All parameters, each once, in the same order on all ranks.
            max_norm: The total norm to scale down to.
            norm_type: The order of the norm; may be ``inf``.

        Returns:
            The total norm before clipping, over all ranks.
        """
        return self._on_all_ranks(lambda vote: self._clip(params, max_norm, norm_type, vote))

    def zero_grad(self) -> None:
        """Undo what backward has stepped since the last step, and drop the gradients on the drive. Raises OSError."""
        with self.guard.in_use():
            self._take_all_back()
            self._gradients.clear_arrived()
            self._gradients_lost = False
            collected = self._gradients.any_collected
            self._gradients.clear()  # also if an interrupted call has left nothing but memory
            if collected:
                self.io.finish()

    def load(self, state: dict[str, Any]) -> None:
        """Replace all states and parameter groups; on any exception none is replaced.

        Warns with RuntimeWarning if parameters keep the values of a step that could not be undone.

        Args:
            state: What torch's ``load_state_dict`` passes to ``__setstate__``: "state" by parameter, and "param_groups".
        """
        given_up = 0
        with self.guard.in_use(), loaded(state, self.sub_groups, self._pipeline, self.io):
            for sub_group in self.sub_groups:
                sub_group.states_were_loaded()
            self._residency.choose(self.sub_groups)
            self._optimizer.param_groups = state["param_groups"]
            given_up = self._pipeline.give_up()
            self._remember_params()
            self.guard.repair()
            self._unfinished, reason, self._not_undone = False, self._not_undone, None
        if given_up:
            warnings.warn(
                f"{given_up} parameters are as the step left them that could not be undone ({reason}): load the model too",
                RuntimeWarning,
                stacklevel=5,
            )

    def close(self, reason: Callable[[], str] | None = None) -> None:
        """Undo what backward has stepped, then release all memory and remove the hooks. The store is not closed.

        If undoing raises OSError, nothing is closed.

        Args:
            reason: Returns what later calls say, if not the user has closed it.
        """
        self._take_all_back()
        self.guard.close(reason)
        self._hooks.remove()
        self._pipeline.close()
        self._gradients.release()
        for sub_group in self.sub_groups:
            sub_group.release_memory()

    def check_between_steps(self) -> None:
        """Raise RuntimeError if backward has stepped parameters and :meth:`step` has not ended the step yet.

        A failed step that could not be undone is undone first; raises OSError if that fails again. Raises RuntimeError also in a
        forked child, or after :meth:`close`.
        """
        self.guard.check_open()
        self._finish_undoing()
        self._check_nothing_is_stepped()

    def check_before_loading(self) -> None:
        """Do the same as :meth:`check_between_steps`, but ignore errors from undoing: loading replaces the unreadable states."""
        with contextlib.suppress(Exception):
            self._finish_undoing()
        if not self._unfinished:
            self._check_nothing_is_stepped()

    def _check_nothing_is_stepped(self) -> None:
        if self.guard.broken is None and self._pipeline.under_way:
            raise RuntimeError(
                "backward has stepped some of the parameters: call step() first, or zero_grad(), which takes that back"
            )

    # -- one step

    def _on_all_ranks(self, work: Callable[[StepVote], _T]) -> _T:
        """Return what ``work`` returns. If it fails here or on another rank, undo it on all ranks, and say so in the error.

        Args:
            work: Called with a vote, which it carries when nothing can fail any more.
        """
        self.guard.check_open()
        vote = StepVote(self._ranks)
        try:
            with self.guard.in_use():
                self.guard.check_usable()
                self._finish_undoing()
                return work(vote)
        except BaseException as error:
            try:
                with defer_interrupts():
                    self._undo(error)
                    vote.veto()
            finally:  # other ranks wait for this vote, so cast it even if a signal interrupted the lines above
                vote.veto()
            raise

    def _step(self, closure: Callable[[], Any] | None, vote: StepVote) -> Any:
        loss = None
        self.io.times.begin()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.io.times.begin()  # again: the closure may have called zero_grad(), which resets the times
        self._unfinished = True
        stepped = self._step_all(vote)
        self._unfinished = False
        self.io.step_made(self.steps, stepped, self._resident_bytes)
        return loss

    def _clip(self, params: Sequence[torch.Tensor], max_norm: float, norm_type: float, vote: StepVote) -> torch.Tensor:
        self._offload_the_rest()
        self._gradients.flush()
        norms = self._gradients.norms(params, norm_type)
        with defer_interrupts():  # the vote and the norm are collectives: all ranks have to take part in both
            vote.approve()
            return self._gradients.clip(over_ranks(params, norms, norm_type), max_norm, norm_type)

    def _step_all(self, vote: StepVote) -> int:
        """Step all sub-groups that have gradients, and commit. Returns how many were stepped, those in backward included."""
        if self._gradients_lost:
            raise RuntimeError("the gradients went with the step that failed: run backward again")
        self._offload_the_rest()
        in_backward = self._pipeline.stepped
        done = set(in_backward)
        waiting = [each for each in self.sub_groups if each not in done and self._gradients.has(each)]
        self._gradients.prepare(waiting)
        for sub_group in self._residency.beyond_budget(self.sub_groups):
            self._residents.dismiss(sub_group)
        in_memory = [each for each in waiting if each.in_memory]
        self._residents.load(in_memory)
        self._look_for_changes()
        for sub_group in self._pipeline.expect([each for each in waiting if not each.in_memory]):
            self._pipeline.step(sub_group, self._optimizer.param_groups)
        self._pipeline.drain()
        # Resident states have no other copy to undo from, so they are stepped when only the optimizer's own code can still fail.
        with defer_interrupts():
            self._step_in_memory(in_memory, vote)
            self._commit(in_backward, waiting)
        return len(in_backward) + len(waiting)

    def _step_in_memory(self, sub_groups: Sequence[SubGroup], vote: StepVote) -> None:
        to_come = sorted(sub_groups, key=lambda each: each.numel)
        # If no sub-group on the drive was stepped, nothing has shown yet that the optimizer's code can make this step. So step
        # one with a copy to undo from; the smallest, because copying takes time.
        if to_come and not self._pipeline.under_way:
            first = to_come.pop(0)
            self._pipeline.keep_copy(first)
            self._residents.step(first, self._gradients, self._optimizer.param_groups)
        vote.approve()
        for sub_group in to_come:
            try:
                self._residents.step(sub_group, self._gradients, self._optimizer.param_groups)
            except BaseException:
                self.guard.break_down(
                    f"step {self.steps + 1} failed in sub-group {sub_group.index}, which dram_budget keeps in memory only, and"
                    f" could not be undone: load a checkpoint"
                )
                raise

    def _commit(self, in_backward: Sequence[SubGroup], stepped: Sequence[SubGroup]) -> None:
        self._pipeline.commit()
        self.steps += 1  # from here on the step cannot be undone
        for sub_group in (*in_backward, *stepped):
            sub_group.pull(self._optimizer.param_groups)
        self._order_in_backward = list(in_backward)
        self._gradients.clear_arrived()
        self._gradients.clear()
        if self._in_backward:
            self._free_gradients()  # also those of resident sub-groups, which backward did not free
        self._remember_params()
        self._blocks.tidy()
        self._residency.choose(self.sub_groups)

    def _take_back(self) -> None:
        """Undo everything stepped since the last commit. With ``step_in_backward``, the gradients are lost."""
        with defer_interrupts():
            under_way = self._pipeline.under_way
            if self._in_backward and (under_way or self._gradients.any_arrived):
                self._gradients_lost = True
                self._free_gradients()
            self._unfinished = under_way
            if self._not_undone is not None:
                self._mark_changes()  # the user may have loaded a model since the last attempt
            try:
                self._pipeline.undo()
            except Exception as error:
                self._not_undone = str(error)
                raise
            finally:
                self._gradients.clear_arrived()
                self.io.finish()
                if under_way:
                    self._remember_params()
            self._unfinished, self._not_undone = False, None

    def _take_all_back(self) -> None:
        """Undo what backward has stepped, and what an earlier call could not undo. Raises OSError if that fails."""
        self.guard.check_process()
        self._unfinished = self._unfinished or self._pipeline.under_way
        self._finish_undoing()

    def _finish_undoing(self) -> None:
        """Undo a step that an earlier call began and could not undo. Raises OSError if it fails again."""
        if self._unfinished:
            try:
                self._take_back()
            except Exception as error:
                self._explain_state(error)
                raise

    def _undo(self, error: BaseException) -> None:
        """After ``error``: undo the step, release gradients' memory, and add to the error what state the optimizer is in."""
        with defer_interrupts():
            with contextlib.suppress(Exception):
                # Also if the optimizer is broken: otherwise a later call would undo the step over states loaded since.
                self._take_back()
            self._gradients.rest()
            if self._gradients.lost:
                self._gradients.clear()
                self._free_gradients()
                self._gradients_lost = True
            self._explain_state(error)

    def _explain_state(self, error: BaseException) -> None:
        """Add to an error's message, or as a note, which step the states are of and what to do."""
        said = self.guard.broken or f"the optimizer and its parameters are as after step {self.steps}"
        if self.guard.broken is None and self._unfinished:
            reason = self._not_undone or "interrupted"
            said = (
                f"step {self.steps + 1} could not be undone yet ({reason}): the states are whole on the drive, and the next call"
                " undoes it first"
            )
        if self._gradients_lost:
            said += ", the gradients are gone: run backward again"
        if isinstance(error, OSError) and error.errno is not None:
            error.strerror = f"{error.strerror}; {said}"
        elif hasattr(error, "add_note"):
            error.add_note(said)

    # -- in backward

    @torch.no_grad()
    def _gradient_arrived(self, param: torch.Tensor) -> None:
        """In backward, when a parameter's gradient is complete: offload it, or step the sub-groups that it completes."""
        self.guard.check_usable()
        try:
            with self.guard.in_use():
                self._finish_undoing()
                self._gradients_lost = False
                self.io.times.begin()
                self.io.record_ended()
                if self._offload_gradients:
                    self._gradients.take_in(param, self._pieces[param])
                else:
                    self._unfinished = True
                    self._step_what_is_complete(param)
                    self._unfinished = False
        except BaseException as error:
            if not self._offload_gradients or self._gradients.lost:
                self._undo(error)
            raise

    def _step_what_is_complete(self, param: torch.Tensor) -> None:
        self._look_for_changes()
        if not self._gradients.any_arrived:
            self._pipeline.expect([each for each in self._order_in_backward if not each.in_memory])
        for sub_group in self._gradients.record_arrived(self._pieces[param]):
            if not sub_group.in_memory:
                self._pipeline.step(sub_group, self._optimizer.param_groups)
                stepped = set(self._pipeline.stepped)
                for piece in sub_group.pieces:
                    if all(each in stepped for each, _ in self._pieces[piece.param]):
                        piece.param.grad = None

    def _offload_the_rest(self) -> None:
        """Offload gradients no hook has seen: set by hand, or of parameters that had ``requires_grad=False`` when added."""
        if self._offload_gradients:
            for param, pieces in self._pieces.items():
                if param.grad is not None:
                    with defer_interrupts():
                        self._gradients.take_in(param, pieces)

    def _look_for_changes(self) -> None:
        """Record parameters that other code changed. Only before the step itself changes any."""
        if not self._pipeline.under_way:
            self._mark_changes()

    def _mark_changes(self) -> None:
        """Have the next step update master weights whose parameters were changed since :meth:`_remember_params`."""
        for sub_group in self.sub_groups:
            sub_group.mark_stale(sub_group.changed_pieces())

    def _remember_params(self) -> None:
        """Take all parameters as unchanged by other code."""
        for sub_group in self.sub_groups:
            sub_group.remember_params()

    def _free_gradients(self) -> None:
        for param in self._pieces:
            param.grad = None
