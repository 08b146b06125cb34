"""Computes how much of a training's memory budget its blocks may use; arriving gradients and scratch memory need the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from deepnvme.memory.alignment import padded
from deepnvme.states.partition import SubGroupPlanner
from deepnvme.states.sub_group import SubGroup

from .parameter_block import ParameterBlock


@dataclass(frozen=True)
class BlockNeeds:
    """Bytes of memory that a training needs for its blocks."""

    beside: int
    """Bytes of arriving gradients and scratch memory, which are not blocks."""
    one: int
    """Bytes of the blocks that are needed at a time."""
    all: int
    """Bytes of all blocks."""

    @property
    def least(self) -> int:
        """Bytes that the training cannot do without."""
        return self.beside + self.one

    def limit(self, budget: int) -> int:
        """Return the most bytes of blocks in memory: what the budget leaves, but at least what a single block needs."""
        return min(max(budget - self.beside, self.one), self.all)


def needs_of_blocks(
    sub_groups: Sequence[Sequence[SubGroup]],
    blocks: Sequence[ParameterBlock],
    planner: SubGroupPlanner,
    parameters_stay: bool,
    several_ranks: bool,
) -> BlockNeeds:
    """Return how much memory a training's blocks need.

    Args:
        sub_groups: For each block, the sub-groups that step it.
        blocks: The blocks; the last one stays in memory.
        planner: Estimates the sizes of optimizer states.
        parameters_stay: Whether all parameters stay in memory.
        several_ranks: Whether other processes have shards of the blocks.
    """
    parameters = [sum(padded(part.nbytes) for part in block.parts) for block in blocks]
    gradients = [_trained_bytes(block.params) for block in blocks]
    stored = [_trained_bytes(block.shards) for block in blocks]
    states = [[planner.estimate(each) for each in some] for some in sub_groups]
    largest_states = [max(some, default=0) for some in states]
    # In torch's memory: gradients of a block and the one before, of what is in no block, and those converted to float32. With
    # other ranks also the averages of a block, and of the largest parameter twice, for what they send of its gradient and for
    # what is gathered.
    in_use = gradients[-1] + 2 * max(gradients[:-1], default=0)
    in_use += max((each.full_gradient_bytes for some in sub_groups for each in some), default=0)
    if several_ranks:
        in_use += max(stored) + max((2 * padded(param.nbytes) for block in blocks for param in block.params), default=0)
    one = max((sum(sizes) for sizes in zip(parameters[:-1], stored[:-1], largest_states[:-1], strict=True)), default=0)
    staying = sum(parameters) if parameters_stay else parameters[-1]
    least = staying + max(one, stored[-1] + largest_states[-1])
    return BlockNeeds(beside=in_use, one=least, all=sum(parameters) + sum(stored) + sum(map(sum, states)))


def _trained_bytes(params: Iterable[nn.Parameter]) -> int:
    """Return the bytes of those parameters that are trained, each padded to whole pages."""
    return sum(padded(param.nbytes) for param in params if param.requires_grad)
