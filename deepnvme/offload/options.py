"""Options of OffloadedOptimizer and OffloadedTraining that few programs need, for their argument ``advanced``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from deepnvme.drives.aio_config import AioConfig
from deepnvme.memory.budget import MemoryBudget
from deepnvme.memory.pool import BufferPool


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Rarely used options of :class:`deepnvme.OffloadedOptimizer`, which also takes each of them as a keyword argument.

    >>> deepnvme.OffloadedOptimizer(
    ...     model.parameters(), torch.optim.AdamW, path="/mnt/nvme", advanced=OptimizerOptions(checksum=True)
    ... )
    """

    aio_config: AioConfig | None = None
    """Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`."""
    checksum: bool = False
    """Whether to verify states when they are read, and when a state_dict is made."""
    pool: BufferPool | None = None
    """Buffer pool to lease memory from; None for the process's."""
    sub_group_size: int = 1 << 22
    """Elements that are read, stepped and written at once. A larger parameter is cut if the optimizer is one of torch's that work
    element by element, and the parameter is float32 or float64, or has master weights. Otherwise the largest parameter determines
    the least memory needed."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Rarely used options of :class:`deepnvme.OffloadedTraining`, which also takes each of them as a keyword argument.

    >>> deepnvme.OffloadedTraining(
    ...     model, torch.optim.AdamW, path="/mnt/nvme", advanced=TrainingOptions(parameters="memory")
    ... )
    """

    accumulation: str = "vertical"
    """"vertical": :meth:`OffloadedTraining.step` runs each block for all micro-batches before the next block, so that a block is
    read once for all of them. "horizontal": it runs the micro-batches one after the other. Results are bit-identical: either way
    each micro-batch draws its random numbers, such as those of dropout, from a seed of its own, one of
    ``torch.randint(1 << 62, (micro_batches,))`` at the beginning of the step."""
    activation_budget: MemoryBudget | None = None
    """Bytes of the memory budget for activations, unless all stay in memory; or a size such as "2GB", or a share of the available
    memory such as "10%", as for ``memory_budget``. None for a quarter of the memory budget."""
    aio_config: AioConfig | None = None
    """Settings of the engine; None for the profile of the drive, see :func:`deepnvme.engine_for`."""
    param_groups: Iterable[dict[str, Any]] | None = None
    """The trained parameters in groups with options of their own, as for torch's optimizers. None for one group for each block,
    all with the same options."""
    parameters: str = "nvme"
    """"nvme"; or "memory" to keep all parameters in memory as well as on the drive, so that only states are read."""
    process_group: torch.distributed.ProcessGroup | None = None
    """Processes that train the model together, such as ``torch.distributed.group.WORLD``. Each process computes other batches,
    whose gradients are averaged, and has a shard of each block on its own drive. All must make the same calls and run the same
    modules. They begin with the parameters and buffers of the first process. The optimizer must work element by element, as AdamW
    and SGD do. None for one process."""
