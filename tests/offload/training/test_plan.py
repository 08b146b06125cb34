"""How a training divides its memory, and what it expects of that."""

from __future__ import annotations

import copy
import gc
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme.cache.block import Block
from deepnvme.memory.chunks import PinnedChunk
from deepnvme.offload import OffloadedTraining
from deepnvme.offload.training.plan import BlockUse, ForwardCost, StepFigures, best_plan, block_traffic, usable_share

MIB = 1 << 20


# Block traffic


def blocks_of(*sizes: int) -> list[Block]:
    return [Block(str(number), size, stored=True) for number, size in enumerate(sizes)]


def slowly(uses: list[BlockUse], limit: int) -> tuple[int, int]:
    """Do what block_traffic says, one use after the other."""
    held: set[Block] = set()
    read = written = 0
    rounds = uses * 3
    for place, (block, temporary) in enumerate(uses * 2):
        if place == len(uses):
            read = written = 0
        now = place % len(uses)
        if block not in held:
            is_first = all(use.block is not block for use in uses[:now])
            read += 0 if temporary and is_first else block.nbytes
        held.add(block)
        if temporary and all(use.block is not block for use in uses[now + 1 :]):
            held.remove(block)
        while sum(each.nbytes for each in held) > limit and held - {block}:
            last = max(held - {block}, key=lambda each: [use.block for use in rounds].index(each, place + 1))
            held.remove(last)
            written += last.nbytes if any(use == BlockUse(last, True) for use in uses) else 0
    return read, written


@pytest.mark.parametrize("seed", range(60))
def test_traffic_is_that_of_a_memory_that_drops_what_is_needed_last(seed: int) -> None:
    rng = random.Random(seed)
    blocks = blocks_of(*(rng.choice((1, 2, 5, 9)) for _ in range(rng.randint(1, 8))))
    temporary = {block for block in blocks if rng.random() < 0.3}
    uses = [BlockUse(block, block in temporary) for block in blocks]
    uses += [BlockUse(block, block in temporary) for block in rng.choices(blocks, k=rng.randint(0, 12))]
    rng.shuffle(uses)
    for limit in (0, 5, 11, 20, 100):
        assert block_traffic(uses, limit) == slowly(uses, limit)


def test_nothing_is_read_if_all_fits() -> None:
    uses = [BlockUse(block, False) for block in blocks_of(3, 4, 5)]
    assert block_traffic([*uses, *reversed(uses)], 12) == (0, 0)


def test_what_is_used_once_a_step_is_read_but_for_what_stays() -> None:
    uses = [BlockUse(block, False) for block in blocks_of(*[10] * 10)]
    assert block_traffic(uses, 10) == (100, 0)
    assert block_traffic(uses, 50) == (50, 0)


def test_the_usable_share_explains_what_was_read() -> None:
    uses = [BlockUse(block, False) for block in blocks_of(*[10] * 100)]
    read, _ = block_traffic(uses, 300)
    assert usable_share(uses, 600, read) == pytest.approx(0.5, abs=0.02)
    assert usable_share(uses, 600, 0) == 1.0


# The choice


def figures(**changes: Any) -> StepFigures:
    uses = [BlockUse(block, False) for block in blocks_of(*[10 * MIB] * 20)]
    given: dict[str, Any] = {
        "step": 3,
        "uses": uses,
        "resident_bytes": 0,
        "usable": 1.0,
        "forwards": [ForwardCost(str(number), 20 * MIB, MIB, 0.01) for number in range(10)],
        "saved_bytes": 200 * MIB,
        "rounds": 1,
        "changed_bytes": 100 * MIB,
        "computing": 1.0,
        "read_speed": 1000.0 * MIB,
        "write_speed": 1000.0 * MIB,
    }
    return StepFigures(**given | changes)


def test_without_activations_all_memory_is_for_blocks() -> None:
    plan = best_plan(figures(saved_bytes=0, forwards=[]), 160 * MIB, lambda part: 160 * MIB - part, None, True)
    assert (plan.activation_bytes, plan.block_bytes, plan.recomputed) == (0, 160 * MIB, ())


def test_blocks_leave_memory_to_activations_if_these_would_be_written() -> None:
    """A block's byte is read, an activation's is written and read: so it stays."""
    plan = best_plan(figures(computing=0.1), 300 * MIB, lambda part: 300 * MIB - part, None, False)
    assert plan.activation_bytes >= 200 * MIB
    assert plan.bytes_written == 100 * MIB
    assert plan.seconds == plan.transferring > plan.computing


def test_blocks_are_computed_again_only_where_the_drive_would_take_longer() -> None:
    def limit(part: int) -> int:
        return 100 * MIB - part

    slow = figures(read_speed=50.0 * MIB, write_speed=50.0 * MIB)
    assert len(best_plan(slow, 100 * MIB, limit, None, True).recomputed) == 10
    assert best_plan(slow, 100 * MIB, limit, None, False).recomputed == ()
    fast = figures(read_speed=1e12, write_speed=1e12)
    assert best_plan(fast, 100 * MIB, limit, None, True).recomputed == ()


def test_blocks_whose_computing_again_takes_little_time_come_first() -> None:
    costs = [ForwardCost(str(number), 20 * MIB, MIB, 0.5 if number % 2 else 0.001) for number in range(10)]
    slow = figures(forwards=costs, read_speed=100.0 * MIB, write_speed=100.0 * MIB)
    plan = best_plan(slow, 100 * MIB, lambda part: 100 * MIB - part, None, True)
    assert set(plan.recomputed) >= {"0", "2", "4", "6", "8"}


def test_enough_for_one_block_is_left() -> None:
    plan = best_plan(figures(), 160 * MIB, lambda part: 160 * MIB - part if part <= 20 * MIB else None, None, False)
    assert plan.activation_bytes <= 20 * MIB


# In a training


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def batch(step: int, rows: int = 1100) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(step))


def in_memory(model: nn.Module, batches: list[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for each in batches:
        loss = model(each)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_of(training: OffloadedTraining, batches: list[torch.Tensor]) -> list[float]:
    losses = []
    for each in batches:
        loss = training.step(each)
        assert loss is not None
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("activations", ["auto", "nvme", "recompute"])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_new_plan_changes_no_bit(drive: Path, model: Model, activations: str, deferred: bool) -> None:
    batches = [batch(step, rows=1100 if step < 6 else 4400) for step in range(9)]  # longer ones ask for another plan
    expected = in_memory(reference := copy.deepcopy(model), batches)
    with OffloadedTraining(
        model, torch.optim.AdamW, nvme_path=drive, memory_budget=8 * MIB, activations=activations, deferred=deferred, lr=1e-2
    ) as training:
        found = losses_of(training, batches[:5])
        first = training.plan()
        found += losses_of(training, batches[5:])
        assert found == expected
        if activations != "recompute":
            assert first.saved_bytes > 0
            assert training.plan().saved_bytes > 2 * first.saved_bytes
        training.close(restore=True)
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(param, other)


def test_memory_that_no_activation_needs_goes_to_blocks(drive: Path, model: Model) -> None:
    batches = [batch(step, rows=8) for step in range(6)]
    with OffloadedTraining(
        model, torch.optim.AdamW, nvme_path=drive, memory_budget=2 * MIB, activations="nvme", lr=1e-2
    ) as training:
        losses_of(training, batches[:3])
        before = training.report().bytes_read
        losses_of(training, batches[3:])
        assert training.plan().activation_bytes == 0
        assert training.report().bytes_read < before


def test_what_is_given_is_left_as_it_is(drive: Path, model: Model) -> None:
    with OffloadedTraining(
        model, torch.optim.AdamW, nvme_path=drive, memory_budget=2 * MIB, activations="nvme", activation_budget=MIB, lr=1e-2
    ) as training:
        losses_of(training, [batch(step) for step in range(5)])
        assert training.plan().activation_bytes == MIB


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("accumulation", ["vertical", "horizontal"])
def test_all_blocks_are_computed_again_if_the_drive_is_slow(
    drive: Path, model: Model, micro_batches: int, accumulation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepnvme.states.counted_io.CountedIO.measure_limits", lambda *_: (1e5, 1e5))
    batches = [batch(step, rows=4400 * micro_batches) for step in range(5)]
    with OffloadedTraining(
        copy.deepcopy(model), torch.optim.AdamW, nvme_path=drive, memory_budget=2 * MIB, activations="recompute",
        micro_batches=micro_batches, accumulation=accumulation, lr=1e-2,
    ) as training:  # fmt: skip
        expected = losses_of(training, batches)
    with OffloadedTraining(
        model, torch.optim.AdamW, nvme_path=drive, memory_budget=2 * MIB, activations="auto", micro_batches=micro_batches,
        accumulation=accumulation, lr=1e-2,
    ) as training:  # fmt: skip
        found = losses_of(training, batches[:3])
        plan = training.plan()
        assert sorted(plan.recomputed) == [f"layers.{number}" for number in range(4)]
        wrote = training.report().activations
        found += losses_of(training, batches[3:])
        writes = training.report().activations
        assert wrote is not None
        assert writes is not None
        assert writes.saved_bytes < wrote.saved_bytes / 2
        assert found == expected
    assert all("forward" not in vars(layer) for layer in model.layers)


def test_the_plan_tells_what_it_is_made_of(drive: Path, model: Model) -> None:
    with OffloadedTraining(
        model, torch.optim.AdamW, nvme_path=drive, memory_budget=2 * MIB, activations="auto", lr=1e-2
    ) as training:
        losses_of(training, [batch(0), batch(1)])
        with pytest.raises(RuntimeError, match="before the end of step 3"):
            training.plan()
        losses_of(training, [batch(2)])
        text = str(training.plan())
        assert training.plan() is training.plan()
        for expected in ("memory: 2 MiB", "activations: ", "a step reads ", "as measured in step 3", "expected: "):
            assert expected in text


def test_the_memory_in_which_the_drive_was_measured_is_free_again_at_once(drive: Path, model: Model) -> None:
    def pinned_bytes() -> int:
        return sum(each.nbytes for each in gc.get_objects() if isinstance(each, PinnedChunk) and each.memory is not None)

    with OffloadedTraining(model, torch.optim.AdamW, nvme_path=drive, memory_budget=64 * MIB, activations="nvme") as training:
        losses_of(training, [batch(step) for step in range(3)])
        gc.collect()
        before = pinned_bytes()
        gc.disable()
        try:
            training.plan()
            assert pinned_bytes() == before
        finally:
            gc.enable()


def test_a_plan_that_cannot_be_made_undoes_the_step(drive: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [batch(step) for step in range(5)]
    expected = in_memory(copy.deepcopy(model), batches)
    failures = itertools.chain([OSError(5, "the drive cannot be measured")], itertools.repeat(None))

    def measured(*_: object) -> tuple[float, float]:
        error = next(failures)
        if error is not None:
            raise error
        return 1e9, 1e9

    monkeypatch.setattr("deepnvme.states.counted_io.CountedIO.measure_limits", measured)
    with OffloadedTraining(
        model, torch.optim.AdamW, nvme_path=drive, memory_budget=2 * MIB, activations="auto", lr=1e-2
    ) as training:
        found = losses_of(training, batches[:3])
        with pytest.raises(OSError, match="cannot be measured"):
            training.step(batches[3])
        assert training.steps == 3
        assert found + losses_of(training, batches[3:]) == expected
