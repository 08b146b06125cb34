"""Steps of OffloadedTraining that leave to the next forward what they can: the same bits, and none is half done."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepnvme.offload.training.training as training_module
from deepnvme.offload.training import OffloadedTraining

from ...faults.torture.interruption import Interruption
from ...support.engines import failing
from ...support.offloaded_training import assert_same_values, state_of

WIDTH, ROWS = 48, 8
TORCH = (str(Path(torch.__file__).parent),)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.relu(self.batch_norm(self.linear(x))))


class Model(nn.Module):
    """``order`` are the indices of the blocks that the forward uses."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 1)
        self.order = list(range(blocks))
        self.fails_after: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, index in enumerate(self.order):
            if number == self.fails_after:
                raise ZeroDivisionError
            x = self.blocks[index](x)
        return self.head(x).square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def training_of(model: Model, drive: Path, **options: Any) -> OffloadedTraining:
    given: dict[str, Any] = {"memory_budget": 60_000, "lr": 1e-2, "blocks": list(model.blocks), **options}
    return OffloadedTraining(model, torch.optim.AdamW, nvme_path=drive, **given)


@pytest.mark.parametrize("max_norm", [None, 1e-3])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("accumulation", ["vertical", "horizontal"])
@pytest.mark.parametrize("activations", ["memory", "nvme", "recompute"])
def test_deferred_steps_have_the_same_bits(
    drive: Path, model: Model, activations: str, accumulation: str, micro_batches: int, max_norm: float | None
) -> None:
    """Also if blocks are not used in each step, a scheduler changes the learning rate, and the model is evaluated between."""
    found = []
    for deferred in (False, True):
        options = {"activations": activations, "accumulation": accumulation, "deferred": deferred}
        mine = copy.deepcopy(model)
        with training_of(mine, drive, micro_batches=micro_batches, max_norm=max_norm, **options) as training:
            scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.5)
            torch.manual_seed(1)
            losses: list[Any] = []
            for step, order in enumerate(([0, 1, 2, 3], [0, 1, 2, 3], [3, 1], [3, 2, 1, 0], [0, 1, 2, 3], [2, 1])):
                mine.order = order
                losses.append(training.step(batch(step)))
                scheduler.step()
                assert training.steps == step + 1
                if step == 3:
                    with torch.no_grad():
                        losses.append(mine.eval()(batch(9)))
                        mine.train()
            found.append((torch.stack(losses), state_of(training)))
    assert torch.equal(found[0][0], found[1][0])
    assert_same_values(found[1][1], found[0][1])


@pytest.mark.parametrize("max_norm", [None, 1e-3])
def test_a_state_between_deferred_steps_is_of_the_last_one(drive: Path, model: Model, max_norm: float | None) -> None:
    after = []
    for deferred in (False, True):
        with training_of(copy.deepcopy(model), drive, deferred=deferred, max_norm=max_norm) as training:
            torch.manual_seed(1)
            training.step(batch(0))
            training.step(batch(1))
            after.append(state_of(training))
            training.close(restore=True)
            assert_same_values(training.model.state_dict(), after[-1])
    assert_same_values(after[1], after[0])


@pytest.mark.parametrize("max_norm", [None, 1e-3])
@pytest.mark.parametrize("fails_after", [0, 2, 4])
def test_an_error_of_the_next_forward_leaves_the_deferred_step(
    drive: Path, model: Model, fails_after: int, max_norm: float | None
) -> None:
    reference = copy.deepcopy(model)
    with (
        training_of(model, drive, deferred=True, max_norm=max_norm) as training,
        training_of(reference, drive, max_norm=max_norm) as expected,
    ):
        for each in (expected, training):
            torch.manual_seed(1)
            each.step(batch(0))
            each.step(batch(1))
        model.fails_after = fails_after
        model.order = [*model.order, 0]
        with pytest.raises(ZeroDivisionError):
            training.step(batch(2))
        model.fails_after = None
        model.order.pop()
        assert training.steps == 2
        assert_same_values(state_of(training), state_of(expected))
        for each in (expected, training):
            torch.manual_seed(2)
            each.step(batch(2))
        assert_same_values(state_of(training), state_of(expected))


@pytest.mark.parametrize("part", [1 << 21, 500])  # elements of a sub-group: a block has one, or several
def test_an_evaluation_whose_reads_fail_is_repeated_with_whole_steps(
    drive: Path, model: Model, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may fail while it steps a block that was left for it: that step is undone before it is evaluated again."""
    monkeypatch.setattr(training_module, "_PART", part)

    def evaluated(training: OffloadedTraining) -> torch.Tensor:
        training.model.eval()
        with torch.no_grad():
            found: torch.Tensor = training.model(batch(9))
        training.model.train()
        return found

    def stepped(training: OffloadedTraining, step: int) -> torch.Tensor:
        torch.manual_seed(step)
        loss = training.step(batch(step))
        assert loss is not None
        return loss

    given: dict[str, Any] = {"memory_budget": 0, "max_norm": 1e-3, "deferred": True}
    with training_of(copy.deepcopy(model), drive, **given) as training:
        expected = {}
        for step in range(4):
            loss = stepped(training, step)
            expected[step + 1] = loss, evaluated(training)
    undone = set()
    for successful in range(40):
        with training_of(copy.deepcopy(model), drive, **given) as training:
            stepped(training, 0)
            stepped(training, 1)
            with failing("read", successful, count=1000):
                try:
                    evaluated(training)
                    break
                except OSError:
                    training.model.train()
            assert torch.equal(evaluated(training), expected[training.steps][1])
            undone.add(training.steps)
            for step in range(training.steps, 4):
                assert torch.equal(stepped(training, step), expected[step + 1][0])
    else:
        raise AssertionError("reads fail for ever")
    assert undone == {1, 2}


@pytest.mark.parametrize("max_norm", [None, 1e-3])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_drive_that_fails_undoes_whole_steps(drive: Path, model: Model, kind: str, max_norm: float | None) -> None:
    """The state afterwards is always that of as many steps as are told."""
    states: dict[int, dict[str, torch.Tensor]] = {}
    with training_of(copy.deepcopy(model), drive, max_norm=max_norm) as training:
        for step in range(4):
            torch.manual_seed(step)
            training.step(batch(step))
            states[training.steps] = state_of(training)
    undone = set()
    for number in range(1, 40, 2):
        with training_of(copy.deepcopy(model), drive, max_norm=max_norm, deferred=True, memory_budget=0) as training:
            torch.manual_seed(0)
            training.step(batch(0))
            try:
                with failing(kind, number, 12 if kind == "read" else 1):  # reads that only were ahead are tried again
                    for step in range(1, 4):
                        torch.manual_seed(step)
                        training.step(batch(step))
                    training.state_dict()
            except OSError:
                undone.add(training.steps)
            steps = training.steps
            assert_same_values(state_of(training), states[steps] if steps else model.state_dict())
            for step in range(steps, 4):  # and goes on
                torch.manual_seed(step)
                training.step(batch(step))
            assert_same_values(state_of(training), states[4])
    assert undone


def step_of_forwards(training: OffloadedTraining, model: Model, step: int) -> list[float]:
    """Make a step of the user's own forwards, of as many as it likes, and return their losses."""
    torch.manual_seed(step)
    parts = [batch(step * 10 + number) for number in range(1 + step % 3)]
    losses = training.run_micro_batches([lambda part=part: model(part) / len(parts) for part in parts])  # type: ignore[misc]
    training.step()
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("max_norm", [None, 1e-3])
@pytest.mark.parametrize("accumulation", ["vertical", "horizontal"])
def test_forwards_of_the_users_own_make_deferred_steps_with_the_same_bits(
    drive: Path, model: Model, accumulation: str, max_norm: float | None
) -> None:
    """And with clipping, blocks are stepped in the next step's forward, which writes them."""
    nbytes = sum(param.nbytes for block in model.blocks for param in block.parameters())
    found = []
    for deferred in (False, True):
        mine = copy.deepcopy(model)
        options = {"accumulation": accumulation, "max_norm": max_norm, "memory_budget": 0, "deferred": deferred}
        with training_of(mine, drive, **options) as training:
            losses = []
            for step in range(5):
                losses += step_of_forwards(training, mine, step)
                if step > 1 and max_norm is not None:  # before, the number of random numbers that are drawn is learnt
                    assert training.report().bytes_written > 3 * nbytes  # parameters and two averages; and gradients
            found.append((losses, state_of(training)))
    assert found[0][0] == found[1][0]
    assert_same_values(found[1][1], found[0][1])


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_drive_that_fails_in_forwards_of_the_users_own_undoes_whole_steps(drive: Path, model: Model, kind: str) -> None:
    """With what a step has left to them, that step is undone as well."""
    states: dict[int, dict[str, torch.Tensor]] = {}
    reference = copy.deepcopy(model)
    with training_of(reference, drive, max_norm=1e-3) as training:
        for step in range(4):
            step_of_forwards(training, reference, step)
            states[training.steps] = state_of(training)
    undone = set()
    for number in range(0, 20, 2):
        mine = copy.deepcopy(model)
        with training_of(mine, drive, max_norm=1e-3, deferred=True, memory_budget=0) as training:
            for step in range(2):
                step_of_forwards(training, mine, step)
            try:
                with failing(kind, number, 12 if kind == "read" else 1):  # reads that only were ahead are tried again
                    step_of_forwards(training, mine, 2)
            except OSError:
                undone.add(training.steps)
            assert_same_values(state_of(training), states[training.steps])
            for step in range(training.steps, 4):  # and goes on
                step_of_forwards(training, mine, step)
            assert_same_values(state_of(training), states[4])
    assert 1 in undone


def test_ctrl_c_anywhere_leaves_whole_steps(drive: Path) -> None:
    torch.manual_seed(0)
    model = Model(blocks=2)
    with training_of(model, drive, max_norm=1e-3, deferred=True, memory_budget=30_000) as training:
        states = {}
        for step in range(3):
            torch.manual_seed(step)
            training.step(batch(step))
            if step:
                states[step + 1] = copy.deepcopy(training.state_dict())

        def steps() -> None:
            for step in (2, 3):
                torch.manual_seed(step)
                training.step(batch(step))

        training.load_state_dict(states[2])
        counted = Interruption(0, TORCH)
        with counted:
            steps()
        states[4] = copy.deepcopy(training.state_dict())
        for point in range(1, counted.passed, max(counted.passed // 80, 1)):
            training.load_state_dict(states[2])
            interruption = Interruption(point, TORCH)
            try:
                with interruption:
                    steps()
            except KeyboardInterrupt:
                pass
            found = training.state_dict()
            assert_same_values(found["model"], states[training.steps]["model"])
            assert found["steps"] == training.steps


def test_a_saved_training_is_resumed(drive: Path, tmp_path: Path, model: Model) -> None:
    reference = copy.deepcopy(model)
    with training_of(model, drive, deferred=True) as training:
        for step in range(2):
            torch.manual_seed(step)
            training.step(batch(step))
        training.save(tmp_path / "last.pt")
        torch.manual_seed(2)
        training.step(batch(2))
        expected = state_of(training)
    with training_of(reference, drive) as training:
        training.load_state_dict(torch.load(tmp_path / "last.pt", mmap=True))
        torch.manual_seed(2)
        training.step(batch(2))
        assert training.steps == 3
        assert_same_values(state_of(training), expected)
