"""How much a training will write to its drive, before it does."""

from __future__ import annotations

from collections.abc import Sequence

from deepnvme.states.partition import SubGroupPlanner
from deepnvme.telemetry.drive_wear import WriteEstimate

from .blocks.trained_block import TrainedBlock


def estimate_writes(blocks: Sequence[TrainedBlock], planner: SubGroupPlanner, gradient_stores: int) -> WriteEstimate:
    """Return how many bytes of parameters, states and gradients are written, if all parameters get a gradient in each step.

    Args:
        blocks: All blocks.
        planner: Estimates the states of blocks that were not stepped yet.
        gradient_stores: How often a step takes the gradients of a block aside, which are written if their memory is needed.
    """
    trained = [block for block in blocks if block.trained]
    parameters = sum(block.parameters.nbytes for block in trained)
    states = sum(
        planner.estimate(each.sub_group) if each.sub_group.layout is None else each.sub_group.layout.nbytes
        for block in trained
        for each in block.states
    )
    gradients = sum(block.gradients.block.nbytes for block in trained)
    return WriteEstimate(
        bytes_per_step=parameters + states,
        most_bytes_per_step=parameters + states + gradient_stores * gradients,
        bytes_once=sum(part.nbytes for block in blocks for part in block.parameters.parts),
    )
