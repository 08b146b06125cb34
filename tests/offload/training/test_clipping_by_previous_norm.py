"""OffloadedTraining that clips gradients by the norm of the step before: the bits of that in memory, and no gradient waits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme.offload import OffloadedTraining

from ...faults.torture.interruption import Interruption
from ...support.engines import failing

WIDTH, ROWS = 32, 2
MAX_NORM = 0.05
"""Less than the norms of most steps."""
TORCH = (str(Path(torch.__file__).parent),)


class Block(nn.Module):
    """The gradient that autograd makes of ``positions`` is in the same memory as that of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(ROWS * WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.positions.view(ROWS, WIDTH)
        return x + torch.relu(self.linear(x))


class Model(nn.Module):
    """``order`` are the indices of the blocks that the forward uses."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
        x = self.dropout(x)
        for index in order:
            x = self.blocks[index](x)
        return self.head(x).square().mean()


def forwards(model: nn.Module, step: int, count: int, uneven: bool = False) -> list[Any]:
    """Return the forwards of a step. Not every step uses all blocks; if ``uneven``, nor do all forwards of a step."""
    orders = [(3, 1) if step == 4 else (0, 1, 2, 3)] * count
    if uneven and step % 3 == 2:
        orders[-1] = (0, 2, 3)
    dtype = next(model.parameters()).dtype
    random = torch.Generator().manual_seed(step)
    inputs = [torch.randn(ROWS, WIDTH, generator=random).to(dtype) for _ in orders]
    return [lambda x=x, order=order: model(x, order) / count for x, order in zip(inputs, orders, strict=True)]


class InMemory:
    """Trains a copy of a model as anybody would."""

    def __init__(self, model: nn.Module, max_norm: float, masters: bool = False, groups: Any = None, **options: Any) -> None:
        self.model = copy.deepcopy(model)
        self.params = list(self.model.parameters())
        self.masters = [param.detach().float().requires_grad_() for param in self.params] if masters else self.params
        of = dict(zip(self.params, self.masters, strict=True))
        given = self.masters if groups is None else [
            {**group, "params": [of[param] for param in group["params"]]} for group in groups(self.model)
        ]  # fmt: skip
        self.optimizer = torch.optim.AdamW(given, **{"lr": 1e-2, **options})
        self.max_norm = max_norm
        self.previous: torch.Tensor | None = None

    def step(self, step: int, count: int, uneven: bool = False) -> tuple[list[float], float]:
        """Return the losses, and the norm of the gradients."""
        torch.manual_seed(step)
        losses = []
        for forward in forwards(self.model, step, count, uneven):
            loss = forward()
            loss.backward()
            losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(self.params, torch.inf)  # changes nothing
        by = norm if self.previous is None else self.previous
        factor = torch.clamp(self.max_norm / (by + 1e-6), max=1.0)
        for param, master in zip(self.params, self.masters, strict=True):
            if param.grad is not None:
                master.grad = param.grad.mul_(factor).to(master.dtype)
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)
                param.grad = master.grad = None
        self.previous = norm
        return losses, norm.item()


def training_of(model: Model, drive: Path, **options: Any) -> OffloadedTraining:
    given: dict[str, Any] = {"memory_budget": 30_000, "lr": 1e-2, "blocks": list(model.blocks), "clip_by": "previous", **options}
    return OffloadedTraining(model, torch.optim.AdamW, nvme_path=drive, **{"max_norm": MAX_NORM, **given})


def make_step(training: OffloadedTraining, step: int, count: int, uneven: bool = False) -> tuple[list[float], float]:
    """Return the losses, and the norm of the gradients."""
    torch.manual_seed(step)
    losses = training.run_micro_batches(forwards(training.model, step, count, uneven))
    norm = training.gradient_norm().item()
    training.step()
    return [loss.item() for loss in losses], norm


def assert_equal(training: OffloadedTraining, expected: InMemory) -> None:
    found = training.state_dict()
    for name, value in expected.model.state_dict().items():
        assert torch.equal(found["model"][name], value), name
    assert expected.previous is not None
    assert torch.equal(found["gradient_norm"], expected.previous)
    assert found["gradient_norm"].dtype == expected.previous.dtype


@pytest.mark.parametrize("max_norm", [MAX_NORM, 1e3])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(("count", "accumulation"), [(1, "vertical"), (4, "vertical"), (4, "horizontal")])
def test_steps_have_the_bits_of_those_in_memory(
    drive: Path, model: Model, count: int, accumulation: str, deferred: bool, max_norm: float
) -> None:
    reference = InMemory(model, max_norm)
    uneven = accumulation == "horizontal"
    clipped = 0
    with training_of(model, drive, max_norm=max_norm, accumulation=accumulation, deferred=deferred) as training:
        for step in range(6):
            expected = reference.step(step, count, uneven)
            assert make_step(training, step, count, uneven) == expected
            assert training.steps == step + 1
            clipped += expected[1] > max_norm
        assert_equal(training, reference)
    assert clipped == (6 if max_norm == MAX_NORM else 0)


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.5},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0, "lr": 3e-2},
    ]


@pytest.mark.parametrize("activations", ["memory", "nvme", "recompute"])
@pytest.mark.parametrize("masters", [False, True])
def test_masters_of_bfloat16_and_groups_have_the_bits_of_those_in_memory(
    drive: Path, model: Model, masters: bool, activations: str
) -> None:
    model.to(torch.bfloat16)
    reference = InMemory(model, MAX_NORM, masters=masters, groups=decayed)
    options: dict[str, Any] = {"activations": activations, "master_weights": masters, "memory_budget": 0}
    with training_of(model, drive, param_groups=decayed(model), **options) as training:
        for step in range(4):
            assert make_step(training, step, 2) == reference.step(step, 2)
        assert_equal(training, reference)


def test_micro_batches_of_step_are_clipped_by_the_step_before(drive: Path, model: Model) -> None:
    """Also if a micro_batch() of the user's own makes the next step."""
    other = copy.deepcopy(model)
    x = torch.randn(4 * ROWS, WIDTH)
    with (
        training_of(model, drive / "one", micro_batches=4) as training,
        training_of(other, drive / "other", micro_batches=4) as expected,
    ):
        for step in range(3):
            torch.manual_seed(step)
            training.step(x)
            torch.manual_seed(step)
            for part in x.chunk(4):
                with expected.micro_batch():
                    (other(part) * 0.25).backward()
            expected.step()
        found = training.state_dict()["model"]
        assert all(torch.equal(found[name], value) for name, value in expected.state_dict()["model"].items())


def test_no_gradient_is_written(drive: Path) -> None:
    """Unlike by the first step, and by those that are clipped by their own norm."""
    written = {}
    for clip_by in ("previous", "current"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
        nbytes = sum(param.nbytes for param in model.parameters())
        options: dict[str, Any] = {"memory_budget": 0, "max_norm": MAX_NORM, "clip_by": clip_by, "blocks": list(model)}
        with OffloadedTraining(model, torch.optim.AdamW, nvme_path=drive, **options) as training:
            written[clip_by] = []
            for _ in range(3):
                with training.micro_batch():
                    model(torch.ones(4, 64)).square().mean().backward()
                training.step()
                written[clip_by].append(training.report().bytes_written / nbytes)
    assert written["previous"][1:] == [3, 3]  # parameters and two averages
    assert written["previous"][0] > 3
    assert min(written["current"]) > 3


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_drive_that_fails_undoes_the_norm_as_well(drive: Path, model: Model, kind: str, deferred: bool) -> None:
    """The norm afterwards is always that of as many steps as are told."""
    reference = InMemory(model, MAX_NORM)
    states = {}
    for step in range(4):
        reference.step(step, 2)
        states[step + 1] = copy.deepcopy(reference)
    undone = set()
    for number in range(0, 40, 6):
        mine = copy.deepcopy(model)
        with training_of(mine, drive, deferred=deferred, memory_budget=0) as training:
            make_step(training, 0, 2)
            try:
                with failing(kind, number, 12 if kind == "read" else 1):  # reads that only were ahead are tried again
                    for step in range(1, 4):
                        make_step(training, step, 2)
                    training.state_dict()
            except OSError:
                undone.add(training.steps)
            if training.steps:
                assert_equal(training, states[training.steps])
            else:
                assert "gradient_norm" not in training.state_dict()
            for step in range(training.steps, 4):  # and goes on
                make_step(training, step, 2)
            assert_equal(training, states[4])
    assert undone & {1, 2, 3}


@pytest.mark.parametrize("deferred", [False, True])
def test_ctrl_c_anywhere_leaves_the_norm_of_the_last_step(drive: Path, model: Model, deferred: bool) -> None:
    reference = InMemory(model, MAX_NORM)
    states = {}
    for step in range(3):
        reference.step(step, 1)
        states[step + 1] = copy.deepcopy(reference)
    with training_of(model, drive, deferred=deferred) as training:
        make_step(training, 0, 1)
        start = copy.deepcopy(training.state_dict())
        counted = Interruption(0, TORCH)
        with counted:
            for step in (1, 2):
                make_step(training, step, 1)
        assert_equal(training, states[3])
        for point in range(1, counted.passed, max(counted.passed // 16, 1)):
            training.load_state_dict(start)
            interruption = Interruption(point, TORCH)
            try:
                with interruption:
                    for step in (1, 2):
                        make_step(training, step, 1)
            except KeyboardInterrupt:
                pass
            assert_equal(training, states[training.steps])


def test_a_step_that_is_undone_leaves_the_norm_of_the_one_before(drive: Path, model: Model) -> None:
    reference = InMemory(model, MAX_NORM)
    with training_of(model, drive) as training:
        for step in (0, 1):
            assert make_step(training, step, 2) == reference.step(step, 2)
        training.run_micro_batches(forwards(model, 7, 2))
        training.gradient_norm()
        training.undo_step()
        assert make_step(training, 2, 2) == reference.step(2, 2)
        assert_equal(training, reference)


# States


@pytest.mark.parametrize("deferred", [False, True])
def test_a_training_that_is_resumed_has_the_same_bits(drive: Path, tmp_path: Path, model: Model, deferred: bool) -> None:
    again = copy.deepcopy(model)
    reference = InMemory(model, MAX_NORM)
    with training_of(model, drive, deferred=deferred) as training:
        for step in range(2):
            assert make_step(training, step, 2) == reference.step(step, 2)
        training.save(tmp_path / "last.pt")
    with training_of(again, drive, deferred=deferred) as training:
        training.load_state_dict(torch.load(tmp_path / "last.pt", mmap=True, weights_only=True))
        for step in range(2, 4):
            assert make_step(training, step, 2) == reference.step(step, 2)
        assert_equal(training, reference)


def test_after_a_state_without_a_norm_a_step_is_clipped_by_its_own(drive: Path, model: Model) -> None:
    reference = InMemory(model, MAX_NORM)
    with training_of(model, drive) as training:
        for step in range(3):
            state = copy.deepcopy(training.state_dict())
            assert ("gradient_norm" in state) is (step > 0)
            make_step(training, 7, 1)  # has a norm
            state.pop("gradient_norm", None)
            training.load_state_dict(state)
            reference.previous = None
            assert make_step(training, step, 1) == reference.step(step, 1)
        assert_equal(training, reference)


def test_a_training_that_clips_by_the_current_norm_goes_on_from_one_that_does_not(drive: Path, model: Model) -> None:
    reference = InMemory(model, MAX_NORM)
    again = copy.deepcopy(model)
    with training_of(model, drive) as training:
        assert make_step(training, 0, 1) == reference.step(0, 1)
        state = copy.deepcopy(training.state_dict())
    with training_of(again, drive, clip_by="current") as training:
        training.load_state_dict(state)
        assert "gradient_norm" not in training.state_dict()
        reference.previous = None
        assert make_step(training, 1, 1) == reference.step(1, 1)


# What is not finite


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("first", [False, True])
def test_a_norm_that_is_not_finite_undoes_the_step(drive: Path, model: Model, first: bool, bad: float, deferred: bool) -> None:
    """So the batch can be left out, and neither the model nor the next step has anything of it."""
    reference = InMemory(model, MAX_NORM)
    with training_of(model, drive, deferred=deferred) as training:
        done = 0
        if not first:
            done = 1
            assert make_step(training, 0, 1) == reference.step(0, 1)
        training.run_micro_batches([lambda: model(torch.full((ROWS, WIDTH), bad))])
        assert not training.gradient_norm().isfinite()
        with pytest.raises(FloatingPointError, match=r"the norm of the gradients is (nan|inf)"):
            training.step()
        assert training.steps == done
        for step in range(done, done + 2):
            assert make_step(training, step, 1) == reference.step(step, 1)
        assert_equal(training, reference)


@pytest.mark.parametrize(
    ("options", "message"), [({"clip_by": "next"}, "clip_by must be"), ({"max_norm": None}, "clips to max_norm: set it")]
)
def test_wrong_options_are_named(drive: Path, model: Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        training_of(model, drive, **options)
    assert not list(drive.iterdir())
