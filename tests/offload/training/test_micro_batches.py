"""Micro-batches of OffloadedTraining that run side by side: the bits of one after the other, and blocks read once for all."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepnvme.offload.training import OffloadedTraining
from deepnvme.store.tensor_store import TensorStore

from ...support.engines import failing
from ...support.micro_batches import seeded_micro_batches
from ...support.offloaded_training import InMemory, assert_same_values, state_of, train_both

WIDTH, ROWS = 48, 8
TORCH = (str(Path(torch.__file__).parent),)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))  # used before any module inside is
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.more = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.batch_norm(self.linear(x * self.scale)))
        y = checkpoint(self.more, y, use_reentrant=False) if self.checkpointed else self.more(y)
        return x + self.dropout(y)


class Model(nn.Module):
    def __init__(self, blocks: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 1)
        self.fails_at = -1
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise ZeroDivisionError
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def batch(step: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


def training_of(model: Model, drive: Path, **options: Any) -> OffloadedTraining:
    given: dict[str, Any] = {"memory_budget": 0, "activation_budget": 15_000, "micro_batches": 4, "lr": 1e-2, **options}
    return OffloadedTraining(model, torch.optim.AdamW, path=drive, blocks=list(model.blocks), **given)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("activations", ["memory", "nvme"])
@pytest.mark.parametrize("accumulation", ["vertical", "horizontal"])
def test_micro_batches_in_either_order_have_the_bits_of_training_in_memory(
    drive: Path, model: Model, accumulation: str, activations: str, parts: int
) -> None:
    """With dropout and statistics of a BatchNorm. Random numbers go on after a step as in memory."""
    reference = InMemory(model, micro_batches=parts)
    options = {"activations": activations, "activation_budget": 3000, "accumulation": accumulation}
    with training_of(model, drive, micro_batches=parts, **options) as training:
        train_both(training, reference, [batch(step, 24) for step in range(4)])
        after = []
        for each in (training, reference):
            torch.manual_seed(1)
            each.step(batch(5, 24))
            after.append(torch.rand(4))
        assert torch.equal(*after)


@pytest.mark.parametrize("accumulation", ["vertical", "horizontal"])
@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_forwards_of_the_users_own_make_a_step(drive: Path, model: Model, accumulation: str, max_norm: float | None) -> None:
    """Each step with another number of them; the norm of the gradients is known before the step."""
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    with training_of(model, drive, accumulation=accumulation, max_norm=max_norm) as training:
        for step, count in enumerate([3, 1, 4, 2]):
            parts = batch(step).chunk(count)
            torch.manual_seed(step)
            expected = []
            for number in seeded_micro_batches(count):
                expected.append(reference(parts[number]) / count)
                expected[-1].backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), torch.inf if max_norm is None else max_norm)
            optimizer.step()
            optimizer.zero_grad()
            torch.manual_seed(step)
            losses = training.run_micro_batches([lambda part=part: model(part) / len(parts) for part in parts])  # noqa: B023
            assert [loss.item() for loss in losses] == [loss.item() for loss in expected]
            if max_norm is not None:
                assert torch.equal(training.gradient_norm(), norm)
            training.step()
        assert training.steps == 4
        assert_same_values(state_of(training), reference.state_dict())


class WithPositions(nn.Module):
    """Autograd makes the gradient of ``positions`` in the same memory as that of the input, which other modules still use."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(rows * WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.positions.view(-1, WIDTH)
        return x + torch.relu(self.linear(x))


@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_a_gradient_may_be_in_the_memory_of_an_activations(drive: Path, max_norm: float | None) -> None:
    """Other micro-batches add to it before the backward goes on from there."""
    torch.manual_seed(0)
    model = nn.Sequential(*(WithPositions(2) for _ in range(3)))
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    options: dict[str, Any] = {"blocks": list(model), "memory_budget": 0, "max_norm": max_norm, "lr": 1e-2}
    with OffloadedTraining(model, torch.optim.AdamW, path=drive, **options) as training:
        for step in range(3):
            parts = batch(step).split(2)
            for part in parts:
                reference(part).square().mean().backward()
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            training.run_micro_batches([lambda part=part: model(part).square().mean() for part in parts])  # type: ignore[misc]
            training.step()
        assert_same_values(state_of(training), reference.state_dict())


def test_a_step_under_way_can_be_undone(drive: Path, model: Model) -> None:
    with training_of(model, drive) as training:
        training.step(batch(0))
        before = state_of(training)
        training.undo_step()
        assert_same_values(state_of(training), before)
        training.run_micro_batches([lambda: model(batch(1)), lambda: model(batch(2))])
        with pytest.raises(RuntimeError, match="a step is under way"):
            training.run_micro_batches([lambda: model(batch(1))])
        training.undo_step()
        assert training.steps == 1
        assert_same_values(state_of(training), before)
        assert training.step(batch(1)) is not None
        assert training.steps == 2
    assert training.closed


def test_a_block_is_read_once_for_all_micro_batches(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    get = TensorStore.get

    def counted(store: TensorStore, name: str, *args: Any, **kwargs: Any) -> Any:
        read.append(name)
        return get(store, name, *args, **kwargs)

    monkeypatch.setattr(TensorStore, "get", counted)
    reads = {}
    for accumulation in ("vertical", "horizontal"):
        torch.manual_seed(0)
        with training_of(Model(blocks=12), drive, accumulation=accumulation) as training:
            for step in range(2):
                training.step(batch(step))
            read.clear()
            training.step(batch(2))
            reads[accumulation] = sum("parameters" in name for name in read)
    assert reads["vertical"] <= 2 * 12 + 2  # some for the next step may have begun
    assert reads["horizontal"] > 4 * 12  # about 8 uses, some of them from memory


def test_autocast_of_the_caller_holds_in_micro_batches(drive: Path, model: Model) -> None:
    losses = []
    for accumulation in ("vertical", "horizontal"):
        with training_of(copy.deepcopy(model), drive, accumulation=accumulation) as training:
            torch.manual_seed(1)
            with torch.autocast("cpu", torch.bfloat16):
                losses += [training.step(batch(step)) for step in range(2)]
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        chunks = batch(0).chunk(4)
        in_bfloat16 = sum(model(chunks[number]).detach() / 4 for number in seeded_micro_batches(4))
    assert torch.equal(losses[0], losses[2])  # type: ignore[arg-type]
    assert torch.equal(losses[1], losses[3])  # type: ignore[arg-type]
    assert torch.equal(losses[0], in_bfloat16)  # type: ignore[arg-type]


# Modules that are checkpointed by themselves


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_part_of_a_block_may_be_checkpointed(drive: Path, model: Model, micro_batches: int) -> None:
    reference = copy.deepcopy(model)
    for block in model.blocks:
        block.checkpointed = True
    with training_of(model, drive, micro_batches=micro_batches) as training:
        train_both(training, InMemory(reference, micro_batches=micro_batches), map(batch, range(3)))


def test_a_part_of_a_block_outside_of_its_forward_is_an_error(drive: Path, model: Model) -> None:
    with training_of(model, drive), torch.no_grad(), pytest.raises(RuntimeError, match="this Linear are on the drive"):
        model.blocks[0].linear(batch(0))  # type: ignore[operator]


# Failures


def threads_of_micro_batches() -> int:
    """Count the threads, but those that read and write in the background."""
    return sum(not thread.name.startswith("deepnvme-") for thread in threading.enumerate())


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("part", [1, 3])
def test_an_error_in_one_micro_batch_undoes_all(drive: Path, model: Model, micro_batches: int, part: int) -> None:
    """Buffers too, that micro-batches have changed."""
    with training_of(model, drive, micro_batches=micro_batches) as training:
        training.step(batch(0))
        before = state_of(training)
        threads = threads_of_micro_batches()
        model.fails_at = model.calls + min(part, micro_batches)
        with pytest.raises(ZeroDivisionError):
            training.step(batch(1))
        assert threads_of_micro_batches() <= threads
        assert_same_values(state_of(training), before)
        training.step(batch(1))
        assert training.steps == 2


@pytest.mark.parametrize("activations", ["memory", "nvme"])
def test_a_training_whose_step_has_failed_is_freed(drive: Path, activations: str) -> None:
    """The graph of the failed step, which the error's traceback keeps, refers to the training."""
    for number in range(0, 9, 3):
        model = Model()
        training = training_of(model, drive, activations=activations, memory_budget=0)
        training.step(batch(0))
        with failing("read", number, 12), pytest.raises(OSError, match="read of"):
            training.step(batch(1))
        training.close(restore=True)
        references = [weakref.ref(training), weakref.ref(model)]
        del model, training
        for _ in range(2):  # the second time what only the graph had kept
            gc.collect()
        assert [reference() for reference in references] == [None, None]
