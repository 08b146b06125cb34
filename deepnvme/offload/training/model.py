"""The blocks of a model that is trained, and its steps: each made as a whole, or undone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from deepnvme._interrupts import defer_interrupts
from deepnvme.memory.freed_memory import return_freed_memory
from deepnvme.offload.activations.buffer_copies import BufferCopies
from deepnvme.offload.activations.saved_tensor import may_share_memory
from deepnvme.states.gradients import GradientHooks
from deepnvme.states.versions import BlockVersions

from .blocks.parameter_block import ParameterBlock
from .blocks.parameter_uses import ParameterUses, ScheduledBlocks
from .blocks.tied_gradients import TiedGradients
from .blocks.trained_block import Groups, TrainedBlock
from .ranks import TrainingRanks
from .report import StepMeter

_KEPT_FREE = 64 << 20
"""Bytes of freed memory that the C library may keep between steps. It keeps gradients of blocks that are gone, in pieces."""


@dataclass(frozen=True)
class StepOptions:
    """How the steps of a model are made."""

    micro_batches: int
    """Forwards and backwards in a step."""
    max_norm: float | None
    """To clip gradients to; None to leave them as they are."""
    clip_by_previous: bool
    """Whether to clip by the norm of the gradients of the step before."""
    deferred: bool
    """Whether the end of a step leaves what it can to the next forward: blocks are stepped when they are used there, and the step
    is committed in the backward that follows."""


@dataclass
class _LeftForLater:
    """What a step has left to do in the next forward."""

    blocks: dict[TrainedBlock, None]
    """Those that are not stepped yet."""
    factor: torch.Tensor | None
    """What to multiply gradients with."""
    groups: Groups
    """The options of the step."""
    buffers: BufferCopies
    """As they were before the step."""
    previous_norm: torch.Tensor | None
    """As it was before the step."""
    stepping: TrainedBlock | None = None
    """That which is being stepped; or was, when that failed."""


class TrainedModel:
    """Steps the blocks of a model with the gradients that its backwards give.

    A block is stepped in the last backward of a step as soon as it has all of its gradients, or after it if they are clipped by a
    norm that is not known before.

    Args:
        model: The model.
        modules: Modules whose parameters come and go, each with its block. Several tiles that are tied have the same.
        tiles: Of these, the tiles of tiled layers.
        blocks: All blocks. The last one has the parameters outside of these modules, and stays in memory.
        schedule: Has blocks in memory.
        versions: Chooses where on the drive a step writes.
        meter: Is told when a step begins.
        ranks: The processes that make each step together.
        optimizer: Has the options of the optimizer in each step in its ``param_groups``.
        options: How steps are made.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[nn.Module, ParameterBlock],
        tiles: Collection[nn.Module],
        blocks: Sequence[TrainedBlock],
        schedule: ScheduledBlocks,
        versions: BlockVersions,
        meter: StepMeter,
        ranks: TrainingRanks,
        optimizer: Optimizer,
        options: StepOptions,
    ) -> None:
        self.steps = 0
        """Number of completed steps."""
        self.micro_batches = self._in_step = options.micro_batches
        self.micro_batches_run = 0
        """Micro-batches of the current step that were run."""
        self.blocks = tuple(blocks)
        self._rest = blocks[-1].parameters
        self._meter, self._ranks = meter, ranks
        self._schedule, self._versions, self._optimizer, self._options = schedule, versions, optimizer, options
        self._model, self._buffers = model, BufferCopies(model)
        self._scratch = torch.empty(max((block.scratch_bytes for block in blocks), default=0), dtype=torch.uint8, device="cpu")
        self._running = 0  # micro-batches that run now
        self._left: _LeftForLater | None = None
        self._committed_steps = 0
        self._not_undone = False
        self._norm: torch.Tensor | None = None
        self.previous_norm: torch.Tensor | None = None
        """The norm of the last completed step, which the next one is clipped by; None for its own."""
        self._block_of: dict[torch.Tensor, TrainedBlock] = {param: block for block in blocks for param in block.trained}
        self._by_parameters = {block.parameters: block for block in blocks}
        self.uses = ParameterUses(
            modules,
            tiles,
            self._by_parameters,
            schedule,
            self._forward_begins,
            self._backward_begins,
            self._backward_ends,
            self.finish_undo,
            self._failed_between_steps,
        )
        self._tied = TiedGradients(
            {module: block for module, block in modules.items() if module in tiles},
            schedule,
            self.uses.end_with_next,
            self._gradient_arrived,
        )
        self._hooks = GradientHooks(self._gradient_arrived)
        self._hooks.add(self._block_of)

    def keep_rest(self) -> None:
        """Have the parameters outside of the modules in memory from now on. Raises OSError."""
        self._schedule.cache.keep({self._rest: True})
        self.uses.begin(self._rest)

    def change_memory(self, change: Callable[[], None]) -> None:
        """Complete the last step, have no block in memory while a function is called, and go on.

        Raises OSError from the drive, and what the function raises. The last step is as it was.
        """
        with self.undone_if_it_fails():
            self.finish_deferred()
            self.uses.reset()
            self._schedule.cache.clear()
            change()
            self.uses.begin(self._rest)

    def remove_hooks(self) -> None:
        """Remove the hooks from the model."""
        self.uses.remove()
        self._tied.remove()
        self._hooks.remove()

    # -- micro-batches

    @contextlib.contextmanager
    def running(self, count: int = 1, of: int | None = None) -> Iterator[None]:
        """Run the forwards and backwards of so many micro-batches in this context.

        Args:
            count: How many.
            of: How many the step has, if not :attr:`micro_batches`. The first ones of a step decide.

        Raises:
            RuntimeError: If the step has fewer left.
            OSError: From the drive.
        """
        if self.micro_batches_run == 0:
            self._in_step = self.micro_batches if of is None else of
        if self.micro_batches_run + count > self._in_step:
            raise RuntimeError(f"all {self._in_step} micro-batches of this step were run: call step()")
        if self.micro_batches_run == 0:
            self._meter.begin()
            self._schedule.order.begin_step()
            self._buffers.take()
        self._running = count
        for block in self.blocks:
            block.begin_backwards()
        self.uses.recording = True
        try:
            yield
            self._tied.end_backward()
        finally:
            self.uses.recording = False
        self.uses.end_backward()
        self.uses.end_all()
        with torch.no_grad():
            for block in self.blocks:
                self._gradients_are_in(block)
        self.micro_batches_run += count
        self._running = 0

    def _gradient_arrived(self, param: torch.Tensor) -> None:
        block = self._block_of[param]
        if not self.uses.recording:
            raise RuntimeError("the backward has to run in micro_batch(), as the forward did")
        self.finish_deferred()
        if block.stepped or block.arrived[param] == self._running:
            raise RuntimeError("there is one backward in each micro_batch(): give micro_batches for several, or sum the losses")
        block.arrived[param] += 1
        if self._running > 1 and block.arrived[param] == 1:
            # Autograd may have given it memory that the gradient of an activation is in as well. Other backwards will add to it
            # before this one goes on from there.
            assert param.grad is not None
            if may_share_memory(param.grad):
                param.grad = param.grad.clone()
        if block.arrived.total() == self._running * len(block.trained):
            self.uses.completed(block.parameters)

    @torch.no_grad()
    def _forward_begins(self, parameters: ParameterBlock) -> None:
        if self._step_if_left(self._by_parameters[parameters]) and parameters.ranks is not None:
            self.uses.gather_again(parameters)

    def _failed_between_steps(self) -> None:
        if self._left is not None:
            # The deferred step may be half made; and whichever rank has failed, all have to decide what becomes of it.
            self._not_undone = True

    def _backward_begins(self, parameters: ParameterBlock) -> None:
        # Otherwise the gradients of other micro-batches are added when they are stored.
        if parameters not in self._tied and (parameters.ranks is not None or not self._ranks.several):
            self._by_parameters[parameters].gradients.load()

    @torch.no_grad()
    def _backward_ends(self, parameters: ParameterBlock) -> None:
        self._gradients_are_in(self._by_parameters[parameters])

    def _gradients_are_in(self, block: TrainedBlock) -> None:
        """Step a block that has all gradients of the step, or store them."""
        to_average = self._ranks.several and bool(block.trained) and not block.averaged  # also if only others have gradients
        if block.stepped or not (block.arrived or to_average) or self._tied.is_waiting_for(block.parameters):
            return
        if self._ranks.several:
            block.average_gradients(self._ranks)
            if not block.gradients.any:
                return
        last = self.micro_batches_run + self._running == self._in_step
        if last and self._options.max_norm is not None:
            block.gradients.load()
            block.gradients.measure()
        if last and (self._options.max_norm is None or self.previous_norm is not None):
            self._step_block(block, self._optimizer.param_groups, self._factor(self.previous_norm))
        else:
            block.gradients.store()
        block.arrived.clear()

    def _factor(self, norm: torch.Tensor | None) -> torch.Tensor | None:
        """Return what to multiply gradients with to clip them by a norm, as ``torch.nn.utils.clip_grad_norm_`` does."""
        max_norm = self._options.max_norm
        return None if max_norm is None or norm is None else torch.clamp(max_norm / (norm + 1e-6), max=1.0)

    def _step_block(self, block: TrainedBlock, groups: Groups, factor: torch.Tensor | None = None) -> None:
        block.gradients.load()
        if factor is not None:
            block.gradients.scale(factor)
        self.uses.begin_change(block.parameters)
        try:
            block.step(groups, self._scratch)
        finally:
            self.uses.end_change(block.parameters)
        block.gradients.drop()

    # -- the end of a step

    @torch.no_grad()
    def finish_step(self) -> None:
        """Step the blocks that were not yet, and commit the step.

        Raises:
            RuntimeError: If micro-batches are missing.
            FloatingPointError: If the next step would be clipped by a norm that is not finite.
            OSError: From the drive.
        """
        self._check_all_were_run()
        self.finish_deferred()
        norm = None if self._options.max_norm is None else self.gradient_norm()
        if self._options.clip_by_previous and norm is not None and not norm.isfinite():
            raise FloatingPointError(
                f"the norm of the gradients is {norm.item()}, by which no next step can be clipped: leave out this batch, since"
                ' the step is undone, or train with clip_by="current"'
            )
        factor = self._factor(norm if self.previous_norm is None else self.previous_norm)
        next_norm = norm if self._options.clip_by_previous else None
        waiting = self._waiting()
        groups = self._optimizer.param_groups
        if self._options.deferred:
            if self.blocks[-1] in waiting:
                self._step_block(waiting.pop(), groups, factor)
            with defer_interrupts():
                # It is committed later. What is left for then is the same on all ranks.
                self._ranks.agree_to_commit(self.steps + 1, ends=True)
                copied = [dict(group) for group in groups]
                self._left = _LeftForLater(dict.fromkeys(waiting), factor, copied, self._buffers, self.previous_norm)
                self._buffers = BufferCopies(self._model)
                self.steps += 1
                self.previous_norm = next_norm
                self._end_step()
        else:
            for block in reversed(waiting):  # the last ones' gradients are needed first by what is in memory still
                self._step_block(block, groups, factor)
            self.commit(self.steps + 1, next_norm)
        self._optimizer.step()
        return_freed_memory(_KEPT_FREE)

    def _end_step(self) -> None:
        self.micro_batches_run, self._norm = 0, None
        for block in self.blocks:
            block.gradients.forget_norms()

    @torch.no_grad()
    def finish_deferred(self) -> None:
        """Step the blocks that the last step has left for later, and commit it. Blocks; raises OSError."""
        if self._left is not None:
            for block in list(self._left.blocks):
                self._step_if_left(block)
            self.commit(self.steps, self.previous_norm)

    def _step_if_left(self, block: TrainedBlock) -> bool:
        """Step a block that the last step has left for later. Returns whether it had."""
        left = self._left
        if left is None or block not in left.blocks:
            return False
        left.stepping = block
        self._step_block(block, left.groups, left.factor)
        with defer_interrupts():
            del left.blocks[block]
            left.stepping = None
        return True

    def _check_all_were_run(self) -> None:
        wanted = self._in_step if self.micro_batches_run else self.micro_batches
        if self.micro_batches_run < wanted:
            raise RuntimeError(
                f"a step has {wanted} micro-batches, and only {self.micro_batches_run} were run: use micro_batch()"
            )

    def _waiting(self) -> list[TrainedBlock]:
        """Return the blocks that have gradients and were not stepped."""
        return [block for block in self.blocks if not block.stepped and block.gradients.any]

    def commit(self, step: int, norm: torch.Tensor | None) -> None:
        """Wait until what has changed is on the drive, and take it for the last completed step's, with this number.

        Args:
            step: The number.
            norm: What the next step is clipped by, if that is the norm of the one before.
        """
        changed = [each for block in self.blocks for each in block.to_write()]
        self._schedule.cache.flush(changed, used=True)
        with defer_interrupts():
            self._ranks.agree_to_commit(step, ends=self._left is None)
            for block in self.blocks:
                block.commit(self._optimizer.param_groups)
            if self._left is None:  # otherwise the next step may be under way
                self._end_step()
            self._left = None
            self.steps = self._committed_steps = step
            self.previous_norm = norm if self._options.clip_by_previous else None
        self._versions.tidy()

    @torch.no_grad()
    def gradient_norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients, as ``torch.nn.utils.clip_grad_norm_`` does, once all micro-batches were run.

        Raises:
            RuntimeError: If micro-batches are missing, or there are no norms, since gradients are not clipped.
            OSError: From the drive.
        """
        self._check_all_were_run()
        if self._options.max_norm is None:
            raise RuntimeError("there are no gradients any more: without max_norm, blocks are stepped during the backward")
        if self._norm is None:
            norms: dict[torch.Tensor, torch.Tensor] = {}
            for block in self._waiting():
                if not block.gradients.norms:  # the last micro-batch did not use it
                    block.gradients.load()
                    block.gradients.measure()
                    block.gradients.store()
            for block in self.blocks:
                found = block.gradients.norms
                measured = list(found.values())
                whole = measured if block.parameters.ranks is None else self._ranks.norms_of_shards(measured)
                norms.update(zip((block.trained[index] for index in found), whole, strict=True))
            in_order = [norms[param] for param in self._model.parameters() if param in norms]
            self._norm = torch.linalg.vector_norm(torch.stack(in_order))
        return self._norm

    # -- failures

    @contextlib.contextmanager
    def undone_if_it_fails(self) -> Iterator[None]:
        """Undo the step if there is an exception in this context. Undoes first what could not be undone before."""
        self.finish_undo()
        self._ranks.expect_new_failures()
        try:
            yield
        except BaseException as error:
            try:
                with defer_interrupts():
                    self._ranks.report_failure(error)
                    self.undo()
            except OSError as failed:
                if hasattr(error, "add_note"):
                    error.add_note(f"the step could not be undone yet, the next call tries it again: {failed}")
            raise

    @torch.no_grad()
    def finish_undo(self) -> None:
        """Undo a step that could not be undone when it failed. Raises OSError if it still cannot."""
        if self._not_undone or (self._left is not None and self._left.stepping is not None):
            self.undo()

    def abandon_step(self) -> None:
        """Go back to the last completed step, on all ranks, if micro-batches of another one were run. Raises OSError as undo."""
        if self.micro_batches_run:
            self._ranks.report_failure(RuntimeError("the step was undone"))
            self.undo()

    def undo(self) -> None:
        """Go back to the last completed step. Raises OSError if the drive cannot be read; to be called again then.

        If that step has left something for later, it is done now; if that fails, the step is undone as well.
        """
        self._not_undone = True
        self._tied.reset()
        self.uses.reset()
        for block in self.blocks:
            block.drop_own_gradients()
        if self.micro_batches_run or self._running:
            self._buffers.put_back()
        self._running = 0
        self._end_step()
        if not self._completed_deferred():
            self._undo_to_committed()
        self._not_undone = False

    def _completed_deferred(self) -> bool:
        """Return whether the last step has left something for later, and that could be done now."""
        if self._left is None:
            return False
        for block in self.blocks:
            if block not in self._left.blocks:
                block.gradients.drop()
            block.arrived.clear()
        with self._ranks.expecting_new_failures():
            try:
                if not self._ranks.all_agree(self._left.stepping is None):
                    return False
                self.uses.begin(self._rest)
                self.finish_deferred()
            except Exception as error:
                self._ranks.report_failure(error)
                return False  # so that step is undone
        return True

    def _undo_to_committed(self) -> None:
        for block in self.blocks:
            block.gradients.drop()
        self.uses.reset()
        self._schedule.cache.clear()
        for block in self.blocks:
            block.undo()
        if self._left is not None:
            self._left.buffers.put_back()
            self.previous_norm = self._left.previous_norm
            self._left = None
        self.steps = self._committed_steps
        self.uses.begin(self._rest)

    def check_absent(self) -> None:
        """Raise RuntimeError if other code has given values to parameters that are on the drive."""
        for block in self.blocks:
            if not block.parameters.holds:
                block.parameters.check_absent()

    def check_between_steps(self) -> None:
        """Complete the last step.

        Raises:
            RuntimeError: Within a step; if other code has changed parameters that are on the drive.
            OSError: If a failed step still cannot be undone.
        """
        with self.undone_if_it_fails():
            self.finish_deferred()
        self.check_absent()
        if self.micro_batches_run:
            raise RuntimeError("a step is under way: run its other micro-batches, and call step()")
