"""Measures a training's steps, and makes the plan of how its memory is divided."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from deepnvme.memory.pool import BufferPool
from deepnvme.offload.activations.saving import MIN_BYTES, save_on_disk
from deepnvme.states.counted_io import CountedIO, StoredBlock

from .blocks.parameter_uses import ScheduledBlocks
from .blocks.trained_block import TrainedBlock
from .plan import BlockUse, ForwardCost, StepFigures, TrainingPlan, best_plan, scaled, usable_share
from .report import TrainingReport

_logger = logging.getLogger(__name__)

_MEASURED_STEP = 3
"""The first one makes the states, and the second is the first that reads them."""
_CHUNK, _MEASURED_BYTES = 4 << 20, 96 << 20
"""Of transfers that measure the drive, and in all, each way."""
_MORE = 1.25
"""So many times what a plan was made for is saved before another one is made: activations of longer sequences."""


class ForwardMeter:
    """Measures what the forwards of modules save for the backward, and how long they take.

    Args:
        names: Modules and their names.
        saved_bytes: Returns the bytes of activations that were saved so far in this step.
    """

    def __init__(self, names: Mapping[nn.Module, str], saved_bytes: Callable[[], int]) -> None:
        self._saved_bytes = saved_bytes
        self._begun: dict[nn.Module, tuple[float, int]] = {}
        self._costs = {module: ForwardCost(name, 0, 0, 0.0) for module, name in names.items()}
        self._handles: list[RemovableHandle] = []
        for module in names:
            self._handles.append(module.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._end))

    def begin_step(self) -> None:
        """Set all measured costs to zero: a step begins."""
        self._costs = {module: ForwardCost(cost.name, 0, 0, 0.0) for module, cost in self._costs.items()}

    def costs(self, rounds: int) -> list[ForwardCost]:
        """Return what the step has cost, whose activations were saved in so many rounds."""
        return [
            dataclasses.replace(each, saved_bytes=each.saved_bytes // rounds, input_bytes=each.input_bytes // rounds)
            for each in self._costs.values()
        ]

    def remove(self) -> None:
        """Remove the forward hooks from all modules. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, module: nn.Module, args: object, kwargs: object) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0:
            cost = self._costs[module]
            inputs = sum(each.nbytes for each in tree_leaves((args, kwargs)) if _is_saved(each))
            self._costs[module] = dataclasses.replace(cost, input_bytes=cost.input_bytes + inputs)
            self._begun[module] = time.perf_counter(), self._saved_bytes()

    def _end(self, module: nn.Module, *_: object) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0 and module in self._begun:
            begun, saved_before = self._begun.pop(module)
            cost = self._costs[module]
            saved = max(self._saved_bytes() - saved_before, 0)
            self._costs[module] = dataclasses.replace(
                cost, saved_bytes=cost.saved_bytes + saved, seconds=cost.seconds + time.perf_counter() - begun
            )


class TrainingPlanner:
    """Makes a plan after the third step, and another one when steps save more activations than that was made for.

    Args:
        memory_budget: Bytes of memory for everything.
        block_bytes: Returns the bytes for blocks, given those for activations; None if these leave too little.
        activation_bytes: Bytes for activations; None to choose them.
        recomputable: Modules that the plan may have computed again, and their names; none if that is not to be chosen.
        recomputed: Names of modules that are computed again anyway.
        blocks: All blocks.
        schedule: Knows in which order they were used.
        io: Measures the drive.
    """

    def __init__(
        self,
        memory_budget: int,
        block_bytes: Callable[[int], int | None],
        activation_bytes: int | None,
        recomputable: Mapping[nn.Module, str],
        recomputed: Iterable[str],
        blocks: Sequence[TrainedBlock],
        schedule: ScheduledBlocks,
        io: CountedIO,
    ) -> None:
        self._memory_budget, self._block_bytes, self._activation_bytes = memory_budget, block_bytes, activation_bytes
        self._names, self._recomputed = dict(recomputable), tuple(recomputed)
        self._blocks, self._schedule, self._io = tuple(blocks), schedule, io
        self._saver: save_on_disk | None = None
        self._meter: ForwardMeter | None = None
        self._steps = 0
        self._figures: StepFigures | None = None
        self._plan: TrainingPlan | None = None
        self._followed: TrainingPlan | None = None

    def begin_step(self, saver: save_on_disk | None) -> TrainingPlan | None:
        """Return a plan to follow from now on, if there is a new one. Blocks while the drive is measured; raises OSError."""
        self._saver = saver
        if self._figures is None:
            if self._meter is None and self._names and saver is not None:
                self._meter = ForwardMeter(self._names, lambda: 0 if self._saver is None else self._saver.report().saved_bytes)
            if self._meter is not None:
                self._meter.begin_step()
            return None
        chooses = self._activation_bytes is None or bool(self._names)
        is_followed = self._plan is not None and self._plan is self._followed
        return self.plan() if chooses and not is_followed else None

    def followed(self, plan: TrainingPlan) -> None:
        """Take note that a plan is followed from now on."""
        self._followed = plan

    def end_step(self, report: TrainingReport, rounds: int) -> None:
        """Take note of what a step did, which has saved activations so many times."""
        plan, figures, activations = self._plan, self._figures, report.activations
        if figures is None:
            self._steps += 1
            if self._steps == _MEASURED_STEP:
                self._figures = self._measured(report, rounds)
                self.remove_hooks()
        elif plan is None or plan is not self._followed or activations is None:
            pass
        elif activations.saved_bytes > _MORE * plan.saved_bytes + _CHUNK:
            factor = activations.saved_bytes / plan.saved_bytes if plan.saved_bytes else 0
            more = round(figures.saved_bytes * factor) or activations.saved_bytes
            self._figures, self._plan = scaled(figures, more), None

    def plan(self) -> TrainingPlan:
        """Return the newest plan. Blocks while the drive is measured. Raises RuntimeError before the third step, and OSError."""
        if self._figures is None:
            raise RuntimeError(f"there is no plan before the end of step {_MEASURED_STEP}, which it is made of")
        if not self._figures.read_speed:
            pool = BufferPool(4 * _CHUNK)
            try:
                read, write = self._io.measure_limits(pool, _CHUNK, _MEASURED_BYTES)
            finally:
                pool.trim()  # otherwise its memory would stay beside the budget until the garbage collector runs
            self._figures = dataclasses.replace(self._figures, read_speed=read, write_speed=write)
        if self._plan is None:
            self._plan = best_plan(
                self._figures,
                self._memory_budget,
                self._block_bytes,
                self._activation_bytes,
                bool(self._names),
                self._recomputed,
            )
            _logger.info("after step %d, the plan of the training:\n%s", self._plan.measured_in, self._plan)
        return self._plan

    def remove_hooks(self) -> None:
        """Remove the hooks from the model."""
        if self._meter is not None:
            self._meter.remove()

    def _measured(self, report: TrainingReport, rounds: int) -> StepFigures:
        gradients = {block.gradients.block for block in self._blocks}
        uses = [BlockUse(block, block in gradients) for block in self._schedule.order.newest if not block.resident]
        resident = sum(part.nbytes for each in self._blocks for part in each.parameters.parts if part.resident)
        changed = [block for each in self._blocks if each.trained for block in (each.parameters, *_states(each))]
        activations = report.activations
        waiting = report.waiting + (0 if activations is None else activations.waiting)
        return StepFigures(
            step=report.step,
            uses=uses,
            resident_bytes=resident,
            usable=usable_share(uses, self._schedule.cache.memory.limit - resident, report.bytes_read),
            forwards=[] if self._meter is None else self._meter.costs(rounds),
            saved_bytes=0 if activations is None else activations.saved_bytes,
            rounds=rounds,
            changed_bytes=sum(block.nbytes for block in changed),
            computing=max(report.seconds - waiting, 0),
            read_speed=0,
            write_speed=0,
        )


def _is_saved(value: object) -> bool:
    """Return whether an argument is a tensor that would be saved beside those in memory anyway."""
    return isinstance(value, torch.Tensor) and value.nbytes >= MIN_BYTES


def _states(block: TrainedBlock) -> list[StoredBlock]:
    return [each.block for each in block.states if each.block is not None]
