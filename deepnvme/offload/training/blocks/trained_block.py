"""One block of a model in training: its parameters, its optimizer states and its gradients, each a block on the drive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepnvme.offload.training.ranks import TrainingRanks
from deepnvme.states.counted_io import StoredBlock
from deepnvme.states.state_dict import block_tensors_of
from deepnvme.states.sub_group import SubGroup, lay_out
from deepnvme.states.sub_group_states import SubGroupStates
from deepnvme.states.versions import block_name

from .blocks_on_drive import BlocksOnDrive
from .parameter_block import ParameterBlock

Groups = Sequence[dict[str, Any]]


class BlockGradients:
    """The gradients of a block's parameters, summed over the backwards of a step: in ``param.grad``, or in a block of their own.

    Args:
        name: Identifies the block in the store.
        params: The parameters that require gradients.
        drive: Store and cache of the block.
    """

    def __init__(self, name: str, params: Sequence[nn.Parameter], drive: BlocksOnDrive) -> None:
        self._params, self._drive = tuple(params), drive
        self._layout = lay_out([(index, "", param.detach()) for index, param in enumerate(params)])
        self.block = StoredBlock(name, self._layout.nbytes)
        """The gradients' block. Its content is new in each step."""
        self.block.stored = False
        self._present: set[int] = set()  # indices of the parameters whose gradient the block has
        self._in_use = False
        self.norms: dict[int, torch.Tensor] = {}
        """2-norms of the gradients by index of the parameter, from :meth:`measure` until :meth:`forget_norms`."""

    @property
    def any(self) -> bool:
        """Whether any parameter has a gradient."""
        return bool(self._present) or any(param.grad is not None for param in self._params)

    def load(self) -> None:
        """Read the stored sums, add ``param.grad`` to them, and make them ``param.grad``. Blocks. Raises OSError."""
        if self._in_use or not self._present:
            return
        self._drive.acquire(self.block)
        self._in_use = True
        for section in self._layout.sections:
            if section.piece in self._present:
                self._add(self._params[section.piece], section.of(self.block.content))

    def _add(self, param: nn.Parameter, total: torch.Tensor) -> None:
        if param.grad is not None:  # of a parameter that no saved tensor has looked at before its gradient arrived
            total.add_(param.grad)
        param.grad = total

    def store(self) -> None:
        """Move the gradients from ``param.grad`` to the gradients' block, which the cache may write. Raises OSError."""
        arrived = {index for index, param in enumerate(self._params) if param.grad is not None}
        if not arrived:
            return
        if self._present:
            self.load()
        else:
            self._drive.create(self.block)
            self._in_use = True
        for section in self._layout.sections:
            param = self._params[section.piece]
            if section.piece in arrived - self._present:
                assert param.grad is not None
                section.of(self.block.content).copy_(param.grad)
        self._present |= arrived
        self._let_go(changed=True)

    def measure(self) -> None:
        """Store the 2-norm of each gradient in ``param.grad`` in :attr:`norms`."""
        for index, param in enumerate(self._params):
            if param.grad is not None:
                self.norms[index] = torch.linalg.vector_norm(param.grad)

    def forget_norms(self) -> None:
        """Drop the gradient norms that :meth:`measure` has stored in :attr:`norms`."""
        self.norms.clear()

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply the gradients in ``param.grad`` by a factor: in place in the gradients' block, else as new tensors."""
        for index, param in enumerate(self._params):
            if param.grad is None:
                continue
            if index in self._present:
                param.grad.mul_(factor)
            else:  # autograd may have given it memory that the gradient of an activation is in as well
                param.grad = param.grad * factor

    def drop(self) -> None:
        """Drop all gradients, but keep their norms. Waits for a transfer of the gradients' block."""
        self._let_go(changed=False)
        self._drive.cache.discard(self.block)
        self._present.clear()

    def _let_go(self, changed: bool) -> None:
        for param in self._params:
            param.grad = None
        if self._in_use:
            self._in_use = False
            self._drive.cache.release([self.block], changed=changed, write=False)


class TrainedStates(SubGroupStates):
    """The optimizer states of some parameters of a block. A change is undone or committed with the step that it belongs to."""

    def __init__(self, sub_group: SubGroup, drive: BlocksOnDrive) -> None:
        super().__init__(sub_group, drive)
        self._undo: Callable[[], None] | None = None

    def begin_change(self) -> None:
        """Record the current states for :meth:`undo`. Call it before the states are loaded or replaced."""
        block, bring_back = self.block, self.sub_group.snapshot()

        def undo() -> None:
            bring_back()
            self.block, self.unplaced = block, None
            if block is not None:
                block.rename(block_name(self.sub_group))

        self._undo = undo

    def replace(self, states: Mapping[torch.Tensor, Mapping[str, Any]], groups: Groups) -> None:
        """Replace the states by those of the sub-group's parameters in ``states``. Raises OSError."""
        self.unplaced = block_tensors_of(self.sub_group, states, groups) or None
        self.block = None
        if self.unplaced is not None:
            self.write()

    def commit(self, groups: Groups) -> None:
        """Make the changed states those of the last completed step. Their writes must have ended."""
        if self._undo is not None:
            self.sub_group.pull(groups)
            self._undo = None

    def undo(self) -> None:
        """Go back to the states of the last completed step. The cache must have dropped the blocks before."""
        if self._undo is not None:
            self._undo()
            self._undo = None


class TrainedBlock:
    """Parameters that are stepped together, and their states. A step can be undone.

    Args:
        parameters: The block of the parameters.
        sub_groups: Step the parameters that require gradients, one sub-group after the other: while one is stepped, the states of
            the next are read, and those of the previous one are written.
        drive: Store and cache of the blocks.
    """

    def __init__(self, parameters: ParameterBlock, sub_groups: Iterable[SubGroup], drive: BlocksOnDrive) -> None:
        self.parameters = parameters
        self.states = tuple(TrainedStates(each, drive) for each in sub_groups)
        self.trained = tuple(param for param in parameters.params if param.requires_grad)
        self.trained_shards = tuple(shard for shard in parameters.shards if shard.requires_grad)
        """For each trained parameter, the tensor that is stepped: the parameter itself, or this process's shard of it."""
        self.gradients = BlockGradients(f"{parameters.index}.gradients", self.trained_shards, drive)
        self.arrived: Counter[torch.Tensor] = Counter()
        """For each parameter, the number of backwards in progress that have accumulated its gradient."""
        self.stepped = False
        """Whether the current step has changed the block."""
        self.averaged = False
        """Whether the gradients of the backwards in progress were averaged over the processes."""
        self._drive = drive

    def begin_backwards(self) -> None:
        """Prepare for the next backwards, whose gradients are not averaged yet."""
        self.averaged = False

    def average_gradients(self, ranks: TrainingRanks) -> None:
        """Average the new gradients over all processes, and add them to the gradients of the shards. Blocks.

        Raises RuntimeError if another process has failed or ended.
        """
        shared = self.parameters.ranks is None  # each process has all of the parameters
        averages = ranks.average_gradients(self.parameters.number, self.trained, whole=shared)
        for shard, average in zip(self.trained_shards, averages, strict=True):
            if average is not None:
                shard.grad = average if shard.grad is None else shard.grad.add_(average)
        self.averaged = True

    def drop_own_gradients(self) -> None:
        """Drop this process's gradients that were not averaged over the processes yet."""
        if self.parameters.ranks is not None:
            for param in self.trained:
                param.grad = None

    def step(self, groups: Groups, scratch: torch.Tensor) -> None:
        """Step the parameters, which must be in memory, with the gradients in ``param.grad``.

        States are read, and parameters and states are written.

        Args:
            groups: Parameter groups with the options of the step.
            scratch: Memory of :attr:`scratch_bytes`.

        Raises OSError, and whatever the optimizer raises. Call :meth:`undo` then.
        """
        self.stepped = True
        for states in self.states:
            states.begin_change()
            states.load()
            states.step({}, scratch, groups)
            states.write()
        self._write_parameters()

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that :meth:`step` needs, for gradients converted to float32."""
        return max((states.sub_group.full_gradient_bytes for states in self.states), default=0)

    def load(
        self,
        values: Iterable[torch.Tensor],
        quantized: Mapping[str, torch.Tensor] | None,
        states: Mapping[torch.Tensor, Mapping[str, Any]],
        groups: Groups,
    ) -> None:
        """Replace the parameters, which are in memory, and their states. If this fails, call :meth:`undo`.

        Args:
            values: For each parameter, its value.
            quantized: Quantised weights by name, as for :meth:`FrozenParameters.quantize`.
            states: For each parameter, its whole state.
            groups: The parameter groups that belong to these states.

        Raises:
            ValueError: If a value cannot be quantised.
            OSError: If the drive cannot be read or written.
        """
        self.stepped = True
        frozen = self.parameters.frozen
        if frozen is not None:
            self._drive.cache.acquire([frozen])
        frozen_changed = self.parameters.fill(values, quantized)
        for each in self.states:
            each.begin_change()
            each.replace(states, groups)
        self._write_parameters()
        if frozen is not None:
            if frozen_changed:
                frozen.changed(self._drive.versions.next_of(frozen))
            self._drive.cache.release([frozen], changed=frozen_changed)

    def write_values(self) -> None:
        """Start writing the parameters' values in memory as a new version. Call :meth:`undo` if this raises OSError."""
        self.stepped = True
        self._write_parameters()
        frozen = self.parameters.frozen
        if frozen is not None:
            self._drive.cache.acquire([frozen])
            frozen.changed(self._drive.versions.next_of(frozen))
            self._drive.cache.release([frozen], changed=True)

    def _write_parameters(self) -> None:
        self.parameters.changed(self._drive.versions.next_of(self.parameters))
        self._drive.cache.acquire([self.parameters])
        self._drive.cache.release([self.parameters], changed=True)  # is written when its use ends

    def to_write(self) -> list[StoredBlock]:
        """Return the blocks that the current step has changed, to be written; none if it has not stepped this block."""
        states = [each.block for each in self.states if each.block is not None]
        frozen = [part for part in self.parameters.parts[1:] if part.uncommitted]
        return [self.parameters, *frozen, *states] if self.stepped else []

    def commit(self, groups: Groups) -> None:
        """Make the stepped parameters and states those of the last completed step. Their writes must have ended."""
        if self.stepped:
            self.parameters.commit()
        for states in self.states:
            states.commit(groups)
        self.stepped = False

    def undo(self) -> None:
        """Go back to the last completed step. The cache must have dropped the blocks before."""
        for states in self.states:
            states.undo()
        if self.stepped:
            self.parameters.undo()
        self.stepped = False
        self.arrived.clear()
