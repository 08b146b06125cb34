"""A model in training as blocks, and its steps.

Invariants:

1. A step is made as a whole or not at all. It writes new versions beside those of the last completed step, and :meth:`commit`
   makes all of them valid at once, by changes in memory that no error can interrupt.
2. ``_phase`` is CHANGING exactly while a step is changed: while micro-batches run, blocks are stepped, or a step is undone. So a
   call that finds it CHANGING knows that an earlier one has failed, wherever it was interrupted, and undoes the step first.
3. A block is stepped once in a step, by the last backward that gives it gradients, or after it if gradients are clipped.

::

         running             running ends              finish_step             commit
    IDLE -------> CHANGING ----------------> STEPPING -------------> CHANGING --------> IDLE
                     |    <----------------                             |
                     |         running                                  |
                     +------------- undo, after any exception ----------+-------------> IDLE
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from deepnvme._interrupts import defer_interrupts
from deepnvme.memory.host import trim_heap
from deepnvme.offload.activations.report import ActivationReport
from deepnvme.offload.activations.saved_tensor import may_share_memory
from deepnvme.states.gradients import GradientHooks
from deepnvme.states.partition import SubGroupPlanner
from deepnvme.telemetry.drive_wear import WriteEstimate

from .blocks.blocks_on_drive import BlocksOnDrive
from .blocks.parameter_block import ParameterBlock
from .blocks.parameter_uses import ParameterUses
from .blocks.trained_block import TrainedBlock
from .model_partition import ModelPartition
from .ranks import TrainingRanks
from .report import TrainingReport

_KEPT_FREE = 64 << 20
"""Most bytes of freed memory that the C library may keep between steps. It would keep pieces of freed gradients."""


class TrainingPhase(enum.Enum):
    """State of a training with regard to its steps."""

    IDLE = enum.auto()
    """The last step is complete, and no other step has begun."""
    STEPPING = enum.auto()
    """Some micro-batches of a step were run, and none runs now."""
    CHANGING = enum.auto()
    """A step is being changed. If a call finds this phase when it begins, the step has failed and must still be undone."""


class TrainingStep:
    """Steps the blocks of a model with the gradients of its backwards.

    Args:
        model: The model.
        partition: The modules whose parameters are in memory only while in use.
        blocks: All blocks. The last one has the parameters outside of these modules, and stays in memory.
        drive: Store and cache of the blocks.
        ranks: The processes that make each step together.
        optimizer: Its ``param_groups`` have the optimizer's options for each step.
        micro_batches: Number of micro-batches in a step: forwards, each with its backward.
        max_norm: Total norm to clip gradients to; None for no clipping.
    """

    def __init__(
        self,
        model: nn.Module,
        partition: ModelPartition,
        blocks: Sequence[TrainedBlock],
        drive: BlocksOnDrive,
        ranks: TrainingRanks,
        optimizer: Optimizer,
        micro_batches: int,
        max_norm: float | None,
    ) -> None:
        self.steps = 0
        """Number of completed steps."""
        self.micro_batches = self._in_step = micro_batches
        self.micro_batches_run = 0
        """Number of micro-batches of the current step that were run."""
        self.model, self.blocks, self.drive, self.ranks, self.optimizer = model, tuple(blocks), drive, ranks, optimizer
        self._rest = blocks[-1].parameters
        self._max_norm = max_norm
        self._put_buffers_back: Callable[[], None] | None = None  # within a step
        self._scratch = torch.empty(max((block.scratch_bytes for block in blocks), default=0), dtype=torch.uint8, device="cpu")
        self._phase = TrainingPhase.IDLE
        self._running = 0  # micro-batches that run now
        self._norm: torch.Tensor | None = None
        self._waits = (0.0, 0.0)  # as _waited() has returned them when the step began
        self._block_of: dict[torch.Tensor, TrainedBlock] = {param: block for block in blocks for param in block.trained}
        self._by_parameters = {block.parameters: block for block in blocks}
        self.blocks_of_modules = dict(zip(partition.modules, self._by_parameters, strict=False))
        """The block of each module whose parameters are in memory only while in use."""
        self.uses = ParameterUses(
            self.blocks_of_modules,
            self._by_parameters,
            drive,
            self._backward_begins,
            self._backward_ends,
            self.finish_undo,
        )
        self._hooks = GradientHooks(self._gradient_arrived)
        self._hooks.add(self._block_of)

    def keep_rest(self) -> None:
        """Keep the parameters that belong to no module's block in memory from now on. Raises OSError."""
        self.drive.cache.keep({self._rest: True})
        self.uses.begin(self._rest)

    def remove_hooks(self) -> None:
        """Remove the hooks from the model."""
        self.uses.remove()
        self._hooks.remove()

    # -- micro-batches

    @contextlib.contextmanager
    def running(self, count: int = 1, in_step: int | None = None) -> Iterator[None]:
        """Run the forwards and backwards of ``count`` micro-batches in this context.

        Steps the blocks whose gradients are complete. After an exception, the caller must undo the step.

        Args:
            count: Number of micro-batches in this context.
            in_step: Number of micro-batches in the step; None for :attr:`micro_batches`. Only the first call in a step sets it.

        Raises:
            RuntimeError: If the step has fewer micro-batches left.
            OSError: If the drive cannot be read or written.
        """
        if self.micro_batches_run == 0:
            self._in_step = self.micro_batches if in_step is None else in_step
        if self.micro_batches_run + count > self._in_step:
            raise RuntimeError(f"all {self._in_step} micro-batches of this step were run: call step()")
        begins = self._phase is TrainingPhase.IDLE
        if begins:
            self._rest.check_in_place()
        self._phase = TrainingPhase.CHANGING
        if begins:
            self.drive.begin_step()
            self._waits = self._waited()
            self._put_buffers_back = _copy_buffers(self.model)
        self._running = count
        for block in self.blocks:
            block.begin_backwards()
        self.uses.recording = True
        try:
            yield
        finally:
            self.uses.recording = False
        self.uses.end_backward()
        self.uses.end_all()
        torch.clear_autocast_cache()  # autocast around several steps would go on with casts of earlier weights, and keep all
        with torch.no_grad():
            for block in self.blocks:
                self._step_or_store(block)
        self.micro_batches_run += count
        self._running = 0
        self._phase = TrainingPhase.STEPPING

    def _gradient_arrived(self, param: torch.Tensor) -> None:
        """Count a gradient that a backward has accumulated in ``param.grad``.

        When all gradients of a block have arrived, the block's use in the backward ends as soon as another block is used.

        Raises RuntimeError in a backward outside of a micro-batch, and in a second backward of one.
        """
        block = self._block_of[param]
        if not self.uses.recording:
            raise RuntimeError("the backward has to run in micro_batch(), as the forward did")
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

    def _backward_begins(self, parameters: ParameterBlock) -> None:
        """Read the gradients that earlier micro-batches have stored for a block, so that the block's backward adds to them.

        Gradients that must first be averaged over the ranks are added when they are stored again instead.
        """
        if parameters.ranks is not None or not self.ranks.several:
            self._by_parameters[parameters].gradients.load()

    @torch.no_grad()
    def _backward_ends(self, parameters: ParameterBlock) -> None:
        """Step a block whose backward has ended. If further micro-batches or clipping come first, store its gradients instead."""
        self._step_or_store(self._by_parameters[parameters])

    def _step_or_store(self, block: TrainedBlock) -> None:
        """Step a block if all micro-batches of the step have run, or store its gradients. Averages them over the ranks."""
        to_average = self.ranks.several and bool(block.trained) and not block.averaged  # also if only others have gradients
        if block.stepped or not (block.arrived or to_average):
            return
        if self.ranks.several:
            block.average_gradients(self.ranks)
            if not block.gradients.any:
                return
        if self.micro_batches_run + self._running < self._in_step:
            block.gradients.store()
        elif self._max_norm is None:
            self._step_block(block)
        else:
            block.gradients.load()
            block.gradients.measure()
            block.gradients.store()
        block.arrived.clear()

    def _step_block(self, block: TrainedBlock, factor: torch.Tensor | None = None) -> None:
        """Step a block with its gradients, multiplied by ``factor`` unless that is None. Raises OSError."""
        block.gradients.load()
        if factor is not None:
            block.gradients.scale(factor)
        self.uses.begin_change(block.parameters)
        try:
            block.step(self.optimizer.param_groups, self._scratch)
        finally:
            self.uses.end_change(block.parameters)
        block.gradients.drop()

    # -- the end of a step

    @torch.no_grad()
    def finish_step(self) -> None:
        """Step the blocks that are not stepped yet, and commit the step.

        Raises:
            RuntimeError: If micro-batches are missing.
            OSError: If the drive cannot be read or written.
        """
        self._check_all_were_run()
        self._phase = TrainingPhase.CHANGING
        factor = None
        if self._max_norm is not None:  # as torch.nn.utils.clip_grad_norm_ does
            factor = torch.clamp(self._max_norm / (self.gradient_norm() + 1e-6), max=1.0)
        for block in reversed(self._waiting()):  # the last ones' gradients are needed first by what is in memory still
            self._step_block(block, factor)
        self.commit(self.steps + 1)
        self.optimizer.step()
        trim_heap(_KEPT_FREE)

    def _check_all_were_run(self) -> None:
        wanted = self._in_step if self.micro_batches_run else self.micro_batches
        if self.micro_batches_run < wanted:
            raise RuntimeError(
                f"a step has {wanted} micro-batches, and only {self.micro_batches_run} were run: use micro_batch()"
            )

    def _waiting(self) -> list[TrainedBlock]:
        """Return the blocks that have gradients and are not stepped yet."""
        return [block for block in self.blocks if not block.stepped and block.gradients.any]

    def commit(self, step: int) -> None:
        """Wait until all changed blocks are on the drive, then make their newest versions the last completed step.

        Args:
            step: The number of that step.
        """
        changed = [each for block in self.blocks for each in block.to_write()]
        self.drive.cache.flush(changed, used=True)
        with defer_interrupts():
            self.ranks.agree_to_commit(step)
            for block in self.blocks:
                block.commit(self.optimizer.param_groups)
            self.steps = step
            self._put_buffers_back = None
            self._end_step()
            self._phase = TrainingPhase.IDLE
        self.drive.versions.tidy()

    def _end_step(self) -> None:
        """Forget the micro-batches of the step that has ended, and the norms of their gradients."""
        self.micro_batches_run, self._running, self._norm = 0, 0, None
        for block in self.blocks:
            block.gradients.forget_norms()

    @torch.no_grad()
    def gradient_norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients, as ``torch.nn.utils.clip_grad_norm_`` does. Call after the last micro-batch.

        Raises:
            RuntimeError: If micro-batches are missing; or without ``max_norm``, since gradients are then not kept for a norm.
            OSError: If the drive cannot be read or written.
        """
        self._check_all_were_run()
        if self._max_norm is None:
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
                whole = measured if block.parameters.ranks is None else self.ranks.norms_of_shards(measured)
                norms.update(zip((block.trained[index] for index in found), whole, strict=True))
            in_order = [norms[param] for param in self.model.parameters() if param in norms]
            self._norm = torch.linalg.vector_norm(torch.stack(in_order))
        return self._norm

    # -- what a step costs

    def report(self, activations: ActivationReport | None) -> TrainingReport:
        """Return the report of the step that ends now."""
        waiting, waiting_to_write = (now - before for now, before in zip(self._waited(), self._waits, strict=True))
        return TrainingReport(
            **self.drive.io.end_step(self.steps),
            waiting=waiting,
            waiting_to_write=waiting_to_write,
            activations=activations,
        )

    def _waited(self) -> tuple[float, float]:
        """Return the seconds waited for the drive until now, and of these for writes."""
        return self.drive.cache.seconds_waited, self.drive.cache.seconds_waited_to_write

    def estimate_writes(self, planner: SubGroupPlanner) -> WriteEstimate:
        """Return how many bytes each step writes if all parameters get a gradient."""
        trained = [block for block in self.blocks if block.trained]
        states = sum(planner.block_bytes(each.sub_group) for block in trained for each in block.states)
        each_step = states + sum(block.parameters.nbytes for block in trained)
        # Each backward but the last one adds to gradients on the drive, and those that are clipped wait for their norm there.
        stores = self.micro_batches - 1 + (self._max_norm is not None)
        return WriteEstimate(
            bytes_per_step=each_step,
            most_bytes_per_step=each_step + stores * sum(block.gradients.block.nbytes for block in trained),
            bytes_once=sum(part.nbytes for block in self.blocks for part in block.parameters.parts),
        )

    # -- failures

    @contextlib.contextmanager
    def undone_if_it_fails(self) -> Iterator[None]:
        """Undo the step on an exception in this context. A failed step that could not be undone before is undone first."""
        self.finish_undo()
        self.ranks.expect_new_failures()
        try:
            yield
        except BaseException as error:
            with defer_interrupts():  # the others wait for it
                self.ranks.report_failure()
            try:
                self.undo()
            except OSError as failed:
                if hasattr(error, "add_note"):
                    error.add_note(f"the step could not be undone yet, the next call tries it again: {failed}")
            raise

    @torch.no_grad()
    def finish_undo(self) -> None:
        """Undo a step that could not be undone when it failed. Raises OSError if it still cannot."""
        if self._phase is TrainingPhase.CHANGING:
            self.undo()

    def abandon_step(self) -> None:
        """Go back to the last completed step, on all ranks, if micro-batches of a new step were run. Raises OSError like undo."""
        if self.micro_batches_run:
            self.ranks.report_failure()
            self.undo()

    def undo(self) -> None:
        """Go back to the last completed step. Waits for transfers.

        Raises OSError if the drive cannot be read. After that, or after an interrupt, the next call undoes the rest.
        """
        self._phase = TrainingPhase.CHANGING
        if self._put_buffers_back is not None:
            self._put_buffers_back()
        self._end_step()
        self.uses.reset()
        for block in self.blocks:
            block.drop_own_gradients()
            block.gradients.drop()
        self.drive.cache.clear()
        for block in self.blocks:
            block.undo()
        self.uses.begin(self._rest)
        self._phase = TrainingPhase.IDLE

    def check_absent(self) -> None:
        """Raise RuntimeError if other code has given values to parameters on the drive, or other memory to those in memory."""
        for block in self.blocks:
            if block.parameters.holds:
                block.parameters.check_in_place()
            else:
                block.parameters.check_absent()

    def write_rest(self) -> None:
        """Write the parameters outside of all modules' blocks, with their values in memory, as part of the last step. Blocks.

        Raises:
            RuntimeError: With several processes, since each may have changed the parameters differently.
            OSError: If the drive cannot be written. The parameters then have the values of the last step again.
        """
        if self.ranks.several:
            raise RuntimeError(
                "parameters that stay in memory were changed between steps: with several processes, load_state_dict() a"
                " state_dict() that has the values"
            )
        with self.undone_if_it_fails():
            self._by_parameters[self._rest].write_values()
            self.commit(self.steps)

    def check_between_steps(self) -> None:
        """Undo a failed step if that was not possible before, and check that no step is under way.

        Raises:
            RuntimeError: Within a step; or if other code has changed parameters that are on the drive.
            OSError: If a failed step still cannot be undone.
        """
        self.finish_undo()
        self.check_absent()
        if self.micro_batches_run:
            raise RuntimeError("a step is under way: run its other micro-batches, and call step()")


def _copy_buffers(module: nn.Module) -> Callable[[], None]:
    """Copy the buffers of a module, such as the statistics of a BatchNorm, and of all modules in it, before a forward.

    All are copied, since version counters do not tell of all changes: those of a BatchNorm do not.

    Returns:
        A function that gives the buffers their content back.
    """
    copies = [
        (each, name, buffer, buffer.detach().clone())
        for each in module.modules()
        for name, buffer in each._buffers.items()
        if buffer is not None
    ]

    def put_back() -> None:
        """Give the buffers the content that they had when they were copied."""
        for each, name, buffer, content in copies:
            buffer.data.copy_(content)  # without a new version: a backward that has saved the buffer need not raise
            each._buffers[name] = buffer

    return put_back
