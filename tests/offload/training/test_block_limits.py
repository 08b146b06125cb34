"""needs_of_blocks: how much memory blocks have at least."""

from __future__ import annotations

import torch
from torch import nn

from deepnvme.offload.pinned_arena import PinnedArena
from deepnvme.offload.training.blocks.limits import needs_of_blocks
from deepnvme.offload.training.blocks.parameter_block import ParameterBlock
from deepnvme.offload.training.ranks import TrainingRanks
from deepnvme.states.partition import SubGroupPlanner


class OneOfEight(TrainingRanks):
    """The first of 8 ranks, with nothing to be exchanged."""

    def __init__(self) -> None:
        super().__init__(None)
        self.count = 8


def test_a_block_needs_memory_for_its_shards_and_their_gradients() -> None:
    param = nn.Parameter(torch.zeros(64, 1024))
    memory = PinnedArena(0)
    blocks = [ParameterBlock(0, [param], ["weight"], memory, ranks=OneOfEight()), ParameterBlock(1, [], [], memory)]
    planner = SubGroupPlanner(torch.optim.SGD, {"lr": 0.1}, False, 1 << 62)
    sub_groups = [planner.sub_groups_of([{"params": list(blocks[0].shards)}], 0, 0), []]
    limit = needs_of_blocks(sub_groups, blocks, planner, False, True).limit(0)
    shard = param.nbytes // 8
    assert limit >= 2 * shard  # of the parameter and of its gradient
    assert limit < param.nbytes
