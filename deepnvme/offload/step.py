"""Make an offloaded optimizer's steps. Each step is either completed for all sub-groups, or undone for all."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from deepnvme._interrupts import defer_interrupts
from deepnvme.memory.pool import BufferPool
from deepnvme.store.tensor_store import TensorStore

from .backward_hooks import GradientHooks, GradientTracker
from .block_versions import BlockVersions
from .distributed import ParamRanks, StepVote, over_ranks
from .gradients import OffloadedGradients
from .io_stats import IOStats
from .param_versions import ParamVersionTracker
from .pipeline import SubGroupPipeline
from .residency import RING, ResidencyPolicy
from .resident_blocks import ResidentBlocks
from .state_dict import OffloadedStates
from .state_loading import loaded
from .step_gradients import StepGradients
from .step_report import StepReporter
from .sub_group import SubGroup


class UsabilityGuard:
    """Raises if the optimizer is closed, broken by a failed step, or used in a forked child."""

    def __init__(self) -> None:
        self.closed = False
        self.broken: str | None = None
        """Why the optimizer cannot be used any more; None while it can."""
        self._process = os.getpid()

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child."""
        if os.getpid() != self._process:
            raise RuntimeError("this optimizer is the parent process's: a forked child cannot use it")

    def check_open(self) -> None:
        """Raise RuntimeError in a forked child, or after close()."""
        self.check_process()
        if self.closed:
            raise RuntimeError("this optimizer is closed")

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
        places: Decides which sub-groups stay in memory.
        offload_gradients: Whether gradients go to the drive during backward.
        in_backward: Whether sub-groups are stepped during backward.
        verbose: Whether to print a line after each step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        store: TensorStore,
        pool: BufferPool,
        places: ResidencyPolicy,
        *,
        offload_gradients: bool,
        in_backward: bool,
        verbose: bool,
    ) -> None:
        self._optimizer, self._store, self._places = optimizer, store, places
        self._in_backward = in_backward
        self.sub_groups: list[SubGroup] = []
        self._pieces: dict[torch.Tensor, list[tuple[SubGroup, int]]] = {}
        self.steps = 0
        self.standing = UsabilityGuard()
        self._unfinished = False
        """Whether a step was begun and is neither committed nor undone. The next call undoes it first."""
        self._not_undone: str | None = None
        """The error of the last attempt to undo the unfinished step; None if there was no attempt."""
        self._gradients_lost = False
        self._traffic = IOStats(store)
        self._blocks = BlockVersions(store)
        self.offloaded = OffloadedGradients(self._traffic, pool) if offload_gradients else None
        self._gradients = StepGradients(pool, self.offloaded)
        self._residents = ResidentBlocks(self._traffic, self._blocks, pool)
        self.states = OffloadedStates(self._pieces, store, self._blocks, self._residents, self.check_between_steps)
        self._sweep = SubGroupPipeline(self._traffic, self._blocks, self._gradients, pool, RING)
        self.reports = StepReporter(self._traffic, verbose)
        self._arrivals = GradientTracker(self._pieces)
        self._changes = ParamVersionTracker(self._pieces)
        self._hooks = GradientHooks(self._gradient_arrived)
        self._ranks = ParamRanks(())

    def add(self, sub_groups: Sequence[SubGroup]) -> None:
        """Add sub-groups and reserve space for their blocks. Raises OSError, and adds none, if the drive has no room."""
        self._store.reserve(self._places.drive_bytes([*self.sub_groups, *sub_groups]))
        pieces: dict[torch.Tensor, list[tuple[SubGroup, int]]] = {}
        for sub_group in sub_groups:
            for index, piece in enumerate(sub_group.pieces):
                pieces.setdefault(piece.param, []).append((sub_group, index))
        ranks = ParamRanks([*self._pieces, *pieces])
        with defer_interrupts():  # hooks are registered with torch, too: Ctrl-C must not separate the two
            self._pieces.update(pieces)
            self._ranks = ranks
            if self._in_backward or self.offloaded is not None:
                self._hooks.add(pieces)
            self.sub_groups += sub_groups

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Make one step: see :meth:`OffloadedOptimizer.step`."""
        self.standing.check_open()
        vote = StepVote(self._ranks)
        loss = None
        try:
            self.standing.check_usable()
            self._finish_undoing()
            self._traffic.begin()
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
                self._traffic.begin()  # again: the closure may have called zero_grad(), which resets the times
            self._unfinished = True
            stepped = self._step_all(vote)
            self._unfinished = False
            resident = sum(each.resident.nbytes for each in self.sub_groups if each.resident is not None)
            self.reports.step_made(self.steps, stepped, resident)
        except BaseException as error:
            try:
                with defer_interrupts():
                    self._undo(error)
                    vote.object()
            finally:  # other ranks wait for this vote, so cast it even if a signal interrupted the lines above
                vote.object()
            raise
        return loss

    def zero_grad(self) -> None:
        """Undo what backward has stepped since the last step, and drop the gradients on the drive. Raises OSError."""
        self.standing.check_process()
        self._unfinished = self._unfinished or self._sweep.under_way
        self._finish_undoing()
        self._arrivals.clear()
        self._gradients_lost = False
        if self.offloaded is not None and self.offloaded:
            self.offloaded.clear()
            self._traffic.finish()

    def clip(
        self, offloaded: OffloadedGradients, params: Sequence[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip all gradients, those on the drive and those still in memory, on all ranks or on none.

        Args:
            offloaded: The gradients on the drive.
            params: All parameters, each once, in the same order on all ranks.
            max_norm: The total norm to scale down to.
            norm_type: The order of the norm; may be ``inf``.

        Returns:
            The total norm before clipping, over all ranks.
        """
        self.standing.check_open()
        vote = StepVote(self._ranks)
        try:
            self.standing.check_usable()
            self._finish_undoing()
            self._offload_the_rest()
            offloaded.flush()
            norms = offloaded.norms(params, norm_type)
            with defer_interrupts():  # the vote and the norm are collectives: all ranks have to take part in both
                vote.carry()
                return offloaded.clip(over_ranks(params, norms, norm_type), max_norm, norm_type)
        except BaseException as error:
            try:
                with defer_interrupts():
                    self._undo(error)
                    vote.object()
            finally:  # other ranks wait for this vote, so cast it even if a signal interrupted the lines above
                vote.object()
            raise

    def load(self, state: dict[str, Any]) -> None:
        """Replace all states and parameter groups; on any exception none is replaced.

        Warns with RuntimeWarning if parameters keep the values of a step that could not be undone.

        Args:
            state: What torch's ``load_state_dict`` passes to ``__setstate__``: "state" by parameter, and "param_groups".
        """
        given_up = 0
        with loaded(state, self.sub_groups, self._sweep, self._traffic):
            for sub_group in self.sub_groups:
                sub_group.stale.clear()
                sub_group.in_memory = None
                self._residents.drop(sub_group)
            self._places.choose(self.sub_groups)
            self._optimizer.param_groups = state["param_groups"]
            self._changes.remember()
            given_up = self._sweep.give_up()
            self.standing.broken = None
            self._unfinished, reason, self._not_undone = False, self._not_undone, None
        if given_up:
            warnings.warn(
                f"{given_up} parameters are as the step left them that could not be undone ({reason}): load the model too",
                RuntimeWarning,
                stacklevel=5,
            )

    def close(self) -> None:
        """Undo what backward has stepped, then release all memory and remove the hooks. The store is not closed.

        If undoing raises OSError, nothing is closed.
        """
        self.standing.check_process()
        self._unfinished = self._unfinished or self._sweep.under_way
        self._finish_undoing()
        self.standing.closed = True
        self._hooks.remove()
        self._sweep.release()
        self._gradients.release()
        if self.offloaded is not None:
            self.offloaded.clear()
        for sub_group in self.sub_groups:
            self._residents.drop(sub_group)

    def check_between_steps(self) -> None:
        """Raise RuntimeError if backward has stepped parameters and :meth:`step` has not ended the step yet.

        A failed step that could not be undone is undone first; raises OSError if that fails again.
        """
        self._finish_undoing()
        self._check_nothing_is_stepped()

    def check_before_loading(self) -> None:
        """Do the same as :meth:`check_between_steps`, but ignore errors from undoing: loading replaces the unreadable states."""
        with contextlib.suppress(Exception):
            self._finish_undoing()
        if not self._unfinished:
            self._check_nothing_is_stepped()

    def _check_nothing_is_stepped(self) -> None:
        if self.standing.broken is None and self._sweep.under_way:
            raise RuntimeError(
                "backward has stepped some of the parameters: call step() first, or zero_grad(), which takes that back"
            )

    # -- one step

    def _step_all(self, vote: StepVote) -> int:
        """Step all sub-groups that have gradients, and commit. Returns how many were stepped, those in backward included."""
        if self._gradients_lost:
            raise RuntimeError("the gradients went with the step that failed: run backward again")
        self._offload_the_rest()
        stepped = set(self._arrivals.stepped)
        waiting = [each for each in self.sub_groups if each not in stepped and self._gradients.has(each)]
        self._gradients.prepare(waiting)
        for sub_group in self._places.beyond_budget(self.sub_groups):
            self._residents.dismiss(sub_group)
        in_memory = [each for each in waiting if each.in_memory]
        self._residents.load(in_memory)
        self._look_for_changes()
        on_drive = self._sweep.kept_first([each for each in waiting if not each.in_memory])
        self._sweep.expect(on_drive)
        for sub_group in on_drive:
            self._sweep.step(sub_group, self._optimizer.param_groups)
        self._sweep.drain()
        # Resident states have no other copy to undo from, so they are stepped when only the optimizer's own code can still fail.
        with defer_interrupts():
            self._step_in_memory(in_memory, vote)
            self._commit(waiting)
        return len(stepped) + len(waiting)

    def _step_in_memory(self, sub_groups: Sequence[SubGroup], vote: StepVote) -> None:
        to_come = sorted(sub_groups, key=lambda each: each.numel)
        # If no sub-group on the drive was stepped, nothing has shown yet that the optimizer's code can make this step. So step
        # one with a copy to undo from; the smallest, because copying takes time.
        if to_come and not self._sweep.under_way:
            first = to_come.pop(0)
            self._sweep.keep_copy(first)
            self._step_resident(first)
        vote.carry()
        for sub_group in to_come:
            try:
                self._step_resident(sub_group)
            except BaseException:
                self.standing.broken = (
                    f"step {self.steps + 1} failed in sub-group {sub_group.index}, which dram_budget keeps in memory only, and"
                    f" could not be undone: load a checkpoint"
                )
                raise

    def _step_resident(self, sub_group: SubGroup) -> None:
        with self._traffic.spending("computing"):
            self._residents.step(sub_group, self._gradients.of(sub_group), self._optimizer.param_groups)

    def _commit(self, stepped: Sequence[SubGroup]) -> None:
        self._sweep.commit()
        self.steps += 1  # from here on the step cannot be undone
        for sub_group in (*self._arrivals.stepped, *stepped):
            sub_group.pull(self._optimizer.param_groups)
        self._arrivals.commit()
        if self.offloaded is not None:
            self.offloaded.clear()
        if self._in_backward:
            self._free_gradients()  # also those of resident sub-groups, which backward did not free
        self._changes.remember()
        self._blocks.tidy()
        self._places.choose(self.sub_groups)

    def _take_back(self) -> None:
        """Undo everything stepped since the last commit. With ``step_in_backward``, the gradients are lost."""
        with defer_interrupts():
            under_way = self._sweep.under_way
            if self._in_backward and (under_way or self._arrivals):
                self._gradients_lost = True
                self._free_gradients()
            self._unfinished = under_way
            if self._not_undone is not None:
                self._changes.look()  # the user may have loaded a model since the last attempt
            try:
                self._sweep.undo()
            except Exception as error:
                self._not_undone = str(error)
                raise
            finally:
                self._arrivals.clear()
                self._traffic.finish()
                if under_way:
                    self._changes.remember()
            self._unfinished, self._not_undone = False, None

    def _finish_undoing(self) -> None:
        """Undo a step that an earlier call began and could not undo. Raises OSError if it fails again."""
        if self._unfinished:
            try:
                self._take_back()
            except Exception as error:
                self._say_where_it_is(error)
                raise

    def _undo(self, error: BaseException) -> None:
        """After ``error``: undo the step, release gradients' memory, and add to the error what state the optimizer is in."""
        with defer_interrupts():
            with contextlib.suppress(Exception):
                # Also if the optimizer is broken: otherwise a later call would undo the step over states loaded since.
                self._take_back()
            if self.offloaded is not None:
                self.offloaded.rest()
                if self.offloaded.lost:
                    self.offloaded.clear()
                    self._free_gradients()
                    self._gradients_lost = True
            self._say_where_it_is(error)

    def _say_where_it_is(self, error: BaseException) -> None:
        """Add to an error's message, or as a note, which step the states are of and what to do."""
        said = self.standing.broken or f"the optimizer and its parameters are as after step {self.steps}"
        if self.standing.broken is None and self._unfinished:
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
        self.standing.check_usable()
        try:
            self._finish_undoing()
            self._gradients_lost = False
            self._traffic.begin()
            self._traffic.look()
            if self.offloaded is not None:
                self.offloaded.take_in(param, self._pieces[param])
            else:
                self._unfinished = True
                self._step_what_is_complete(param)
                self._unfinished = False
        except BaseException as error:
            if self.offloaded is None or self.offloaded.lost:
                self._undo(error)
            raise

    def _step_what_is_complete(self, param: torch.Tensor) -> None:
        self._look_for_changes()
        if not self._arrivals:
            before = [each for each in self._arrivals.stepped_before if not each.in_memory]
            self._sweep.expect(self._sweep.kept_first(before))
        for sub_group in self._arrivals.add(param):
            if not sub_group.in_memory:
                self._sweep.step(sub_group, self._optimizer.param_groups)
                self._arrivals.stepped.append(sub_group)
                self._arrivals.free_gradients(sub_group)

    def _offload_the_rest(self) -> None:
        """Offload gradients no hook has seen: set by hand, or of parameters that had ``requires_grad=False`` when added."""
        if self.offloaded is not None:
            for param, pieces in self._pieces.items():
                if param.grad is not None:
                    with defer_interrupts():
                        self.offloaded.take_in(param, pieces)

    def _look_for_changes(self) -> None:
        """Record parameters that other code changed. Only before the step itself changes any."""
        if not self._sweep.under_way:
            self._changes.look()

    def _free_gradients(self) -> None:
        for param in self._pieces:
            param.grad = None
