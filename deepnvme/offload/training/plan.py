"""How a training divides its memory between blocks and activations, by their sizes and by measured speeds."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepnvme.cache.block import Block

_SHARES = 16
"""The memory for activations is a multiple of this part of the budget: a step's time changes by a few percent in between."""
_WORTH = 0.97
"""What costs computing time has to take less than this part of the time without it: estimates are no better than that."""


@dataclass(frozen=True)
class TrainingPlan:
    """What an :class:`OffloadedTraining` has in memory, and how long a step should take with that. Bytes and seconds."""

    memory_budget: int
    """Of parameters, gradients, states and activations."""
    block_bytes: int
    """Of these, those of blocks on the drive: parameters, gradients and states. What is left is for gradients that arrive, and
    for scratch memory."""
    activation_bytes: int
    """Of these, those of activations; 0 if all activations stay in memory beside the budget."""
    recomputed: tuple[str, ...]
    """Names of the modules whose forward is computed again in the backward: of their activations only the inputs are saved."""
    saved_bytes: int
    """Bytes of activations that a step saves at a time."""
    bytes_read: int
    """Bytes that a step reads, of blocks and activations."""
    bytes_written: int
    """Bytes that a step writes."""
    read_speed: float
    """Bytes per second that the drive reads at most, as measured for this plan."""
    write_speed: float
    """Bytes per second that the drive writes at most, as measured for this plan."""
    computing: float
    """Seconds that a step computes, as measured in the step before this plan; with what is computed again."""
    measured_in: int
    """Number of that step."""

    @property
    def transferring(self) -> float:
        """Seconds that the drive needs for the bytes of a step, first reading and then writing."""
        return self.bytes_read / self.read_speed + self.bytes_written / self.write_speed

    @property
    def seconds(self) -> float:
        """Seconds that a step should take: the larger of computing and transferring, which go on at the same time."""
        return max(self.computing, self.transferring)

    def __str__(self) -> str:
        mib = 1 << 20
        recomputed = f"{len(self.recomputed)} blocks computed again" if self.recomputed else "nothing computed again"
        return "\n".join(
            [
                f"memory: {self.memory_budget / mib:.0f} MiB, of which {self.block_bytes / mib:.0f} for blocks of parameters,"
                f" gradients and states, {self.activation_bytes / mib:.0f} for activations",
                f"activations: {self.saved_bytes / mib:.0f} MiB saved, {recomputed}",
                f"a step reads {self.bytes_read / 1e9:.3f} GB and writes {self.bytes_written / 1e9:.3f} GB:"
                f" {self.transferring:.3f} s at {self.read_speed / 1e9:.2f} and {self.write_speed / 1e9:.2f} GB/s",
                f"it computes for {self.computing:.3f} s, as measured in step {self.measured_in}",
                f"expected: {self.seconds:.3f} s a step",
            ]
        )


class BlockUse(NamedTuple):
    """A use of a block in a step."""

    block: Block
    temporary: bool
    """Whether the block is new in each step and gone at its end: one of gradients. Others are on the drive before their use."""


@dataclass(frozen=True)
class ForwardCost:
    """What the forward of a block saves, and what saving less costs."""

    name: str
    """Of its module."""
    saved_bytes: int
    """Bytes of activations."""
    input_bytes: int
    """Bytes of its inputs, which are all that is saved if it is computed again."""
    seconds: float


@dataclass(frozen=True)
class StepFigures:
    """What was measured of a step, and is the same for each way to divide memory."""

    step: int
    uses: Sequence[BlockUse]
    """Of blocks that come and go, in order."""
    resident_bytes: int
    """Bytes of those that stay in memory."""
    usable: float
    """Share of the memory for blocks that served to keep them; the rest had those on their way to and from the drive."""
    forwards: Sequence[ForwardCost]
    """Of those blocks whose forward may be computed again."""
    saved_bytes: int
    """Bytes of activations that are saved at a time, if nothing is computed again."""
    rounds: int
    """How often they are saved in a step."""
    changed_bytes: int
    """Bytes of parameters and states that a step writes."""
    computing: float
    """Seconds without waiting."""
    read_speed: float
    write_speed: float


def block_traffic(uses: Sequence[BlockUse], limit: int) -> tuple[int, int]:
    """Return how many bytes of blocks a step reads, and how many of temporary ones it writes, if steps are all alike.

    Within ``limit`` bytes, blocks stay in memory, but for those whose next use is furthest away.
    """
    count = len(uses)
    next_uses = [0] * count
    following: dict[Block, int] = {}  # where the next use is, seen from the place that the loop has come to
    for place in reversed(range(2 * count)):
        block = uses[place % count].block
        if place < count:
            next_uses[place] = following[block]
        following[block] = place
    held: dict[Block, int] = {}  # -> place of the next use
    furthest: list[tuple[int, int]] = []  # minus the place of a next use, and which use that is; some are past
    occupied = read = written = 0
    for place in range(2 * count):
        if place == count:
            read = written = 0  # the first round has begun with nothing in memory
        index = place % count
        block, temporary = uses[index]
        if block not in held:
            occupied += block.nbytes
            if not (temporary and following[block] == index):  # it is made then
                read += block.nbytes
        if temporary and next_uses[index] >= count:  # gone with this use
            occupied -= block.nbytes
            held.pop(block, None)
        else:
            held[block] = next_uses[index] + place - index
            heapq.heappush(furthest, (-held[block], next_uses[index] % count))
        in_use = None
        while occupied > limit and furthest:
            minus_place, index = heapq.heappop(furthest)
            other = uses[index]
            if held.get(other.block) != -minus_place:
                continue
            if other.block is block:
                in_use = minus_place, index
                continue
            occupied -= other.block.nbytes
            del held[other.block]
            written += other.block.nbytes if other.temporary else 0
        if in_use is not None:
            heapq.heappush(furthest, in_use)
    return read, written


def usable_share(uses: Sequence[BlockUse], limit: int, bytes_read: int) -> float:
    """Return with which share of ``limit`` a step reads so many bytes of blocks, as :func:`block_traffic` has it."""
    low, high = 0.0, 1.0
    for _ in range(7):
        share = (low + high) / 2
        if block_traffic(uses, int(limit * share))[0] > bytes_read:
            low = share
        else:
            high = share
    return high


def best_plan(
    figures: StepFigures,
    memory_budget: int,
    block_bytes: Callable[[int], int | None],
    activation_bytes: int | None,
    may_recompute: bool,
    recomputed: Iterable[str] = (),
) -> TrainingPlan:
    """Return the plan with which a step should take the least time.

    Args:
        figures: What was measured.
        memory_budget: Bytes of memory.
        block_bytes: Returns the bytes for blocks, given those for activations; None if these leave too little.
        activation_bytes: Bytes for activations; None to choose them.
        may_recompute: Whether to choose which blocks are computed again.
        recomputed: Names of those that are, otherwise.
    """
    if activation_bytes is not None:
        given = [activation_bytes]
    else:
        given = [part for part in range(0, memory_budget, max(memory_budget // _SHARES, 1)) if block_bytes(part) is not None]
        given = given or [memory_budget // 4]
    traffic = {
        part: block_traffic(figures.uses, int(((block_bytes(part) or 0) - figures.resident_bytes) * figures.usable))
        for part in given
    }
    # Those whose computing again frees most memory for its time come first.
    by_worth = sorted(
        figures.forwards, key=lambda each: (each.saved_bytes - each.input_bytes) / max(each.seconds, 1e-9), reverse=True
    )
    best: TrainingPlan | None = None
    for count in range(len(by_worth) + 1) if may_recompute else [0]:
        again = by_worth[:count]
        saved = figures.saved_bytes - sum(each.saved_bytes - each.input_bytes for each in again)
        for part in given:
            read, written = traffic[part]
            spilled = max(saved - part, 0) * figures.rounds
            plan = TrainingPlan(
                memory_budget=memory_budget,
                block_bytes=block_bytes(part) or 0,
                activation_bytes=part,
                recomputed=tuple(each.name for each in again) if may_recompute else tuple(recomputed),
                saved_bytes=max(saved, 0),
                bytes_read=read + spilled,
                bytes_written=figures.changed_bytes + written + spilled,
                read_speed=figures.read_speed,
                write_speed=figures.write_speed,
                computing=figures.computing + sum(each.seconds for each in again),
                measured_in=figures.step,
            )
            if best is None or _is_better(plan, best):
                best = plan
    assert best is not None
    return best


def _is_better(plan: TrainingPlan, best: TrainingPlan) -> bool:
    """Return whether a plan takes less time, or as much and spares the drive. It may not compute longer for little."""
    if plan.computing > best.computing:
        return plan.seconds < _WORTH * best.seconds
    return (plan.seconds, plan.transferring) < (best.seconds, best.transferring)


def scaled(figures: StepFigures, saved_bytes: int) -> StepFigures:
    """Return figures of a step that saves so many bytes of activations, if all blocks save more in the same proportion."""
    factor = saved_bytes / max(figures.saved_bytes, 1)
    forwards = [
        dataclasses.replace(
            each,
            saved_bytes=round(each.saved_bytes * factor),
            input_bytes=round(each.input_bytes * factor),
            seconds=each.seconds * factor,
        )
        for each in figures.forwards
    ]
    return dataclasses.replace(figures, saved_bytes=saved_bytes, forwards=forwards)
