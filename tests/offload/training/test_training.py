"""OffloadedTraining: the bits of training in memory, with every block on the drive, and whole steps or none."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepnvme.offload.training import OffloadedTraining
from deepnvme.swap import TensorStore

from ...support.engines import failing
from ...support.offloaded_training import InMemory, assert_same_model, assert_same_values, state_of, train_both
from ...support.pinned_memory import pinned_bytes

WIDTH, ROWS, WORDS = 64, 8, 90


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))


class Model(nn.Module):
    """Its head is tied to its embedding. ``order`` are the indices of the blocks that the forward uses."""

    def __init__(self, blocks: int = 5, checkpoints: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.order = list(range(blocks))
        self.checkpoints = checkpoints

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        each = max(self.checkpoints, 1)
        for begin in range(0, len(self.order), each):
            some = [self.blocks[index] for index in self.order[begin : begin + each]]

            def run(x: torch.Tensor, some: list[nn.Module] = some) -> torch.Tensor:
                for block in some:
                    x = block(x)
                return x

            x = checkpoint(run, x, use_reentrant=False) if self.checkpoints else run(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (ROWS, 17), generator=random)
    return ids, ids.roll(-1, 1)


def training_of(model: Model, drive: Path, **options: Any) -> OffloadedTraining:
    given = {"memory_budget": 0, "activation_budget": 150_000, "lr": 1e-2, "blocks": list(model.blocks), **options}
    return OffloadedTraining(model, given.pop("optimizer", torch.optim.AdamW), path=drive, **given)


RESULTS = ("master_weights", "micro_batches", "max_norm")
"""Options that change the results."""


def in_both_ways(model: Model, drive: Path, steps: int = 4, **options: Any) -> OffloadedTraining:
    """Train in both ways, and compare losses and parameters."""
    kind = options.get("optimizer", torch.optim.AdamW)
    reference = InMemory(model, kind, **{name: value for name, value in options.items() if name in RESULTS})
    training = training_of(model, drive, **options)
    train_both(training, reference, map(batch, range(steps)))
    return training


@pytest.mark.parametrize(("checkpoints", "micro_batches"), [(0, 1), (1, 4), (2, 1)])
@pytest.mark.parametrize("activations", ["memory", "nvme"])
@pytest.mark.parametrize(("dtype", "masters"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_a_training_has_the_bits_of_one_in_memory(
    drive: Path, dtype: torch.dtype, masters: bool, activations: str, checkpoints: int, micro_batches: int
) -> None:
    model = Model(checkpoints=checkpoints).to(dtype)
    options = {"activations": activations, "activation_budget": 20_000, "micro_batches": micro_batches}
    with in_both_ways(model, drive, master_weights=masters, **options) as training:
        assert training.steps == 4
    assert not list(drive.iterdir())


def test_parameters_may_stay_in_memory(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_both_ways(Model(), drive, parameters="memory") as training:
        read: list[str] = []
        get = TensorStore.get
        monkeypatch.setattr(TensorStore, "get", lambda store, name, *args: read.append(name) or get(store, name, *args))
        training.step(*batch(0))
        assert read  # states
        assert not [name for name in read if "parameters" in name]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_gradients_are_clipped_as_in_memory(drive: Path, max_norm: float, micro_batches: int) -> None:
    in_both_ways(Model(), drive, max_norm=max_norm, micro_batches=micro_batches).close()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.RMSprop])
def test_other_optimizers(drive: Path, optimizer: type[torch.optim.Optimizer]) -> None:
    in_both_ways(Model(), drive, optimizer=optimizer).close()


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    """Groups of an optimizer that decays matrices only. Each block has parameters of both; a third group is empty."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.5},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
        {"params": [], "weight_decay": 0.1},
    ]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_parameters_of_a_block_may_be_in_several_groups(drive: Path, micro_batches: int) -> None:
    model = Model()
    model.blocks[1].requires_grad_(False)
    reference = InMemory(model, micro_batches=micro_batches)
    reference.optimizer = torch.optim.AdamW(decayed(reference.model), lr=1e-2)
    with training_of(model, drive, param_groups=decayed(model), micro_batches=micro_batches) as training:
        for step in range(4):
            for group in (*reference.optimizer.param_groups, *training.optimizer.param_groups):
                group["lr"] = 1e-2 / (step + 1)
            train_both(training, reference, [batch(step)])
        state = copy.deepcopy(training.state_dict())
        assert [group["weight_decay"] for group in state["optimizer"]["param_groups"]] == [0.5, 0.0, 0.1]
        training.step(*batch(0))
        training.load_state_dict(state)
        assert_same_model(training, reference.model)


def test_groups_that_lack_a_trained_parameter_are_an_error(drive: Path) -> None:
    model = Model()
    groups = decayed(model)
    groups[0]["params"].pop()
    with pytest.raises(ValueError, match="param_groups must have each parameter"):
        training_of(model, drive, param_groups=groups)
    assert not list(drive.iterdir())


@pytest.mark.parametrize("budget", [0, 10 << 20, "auto"])
def test_any_budget_will_do(drive: Path, budget: int | str) -> None:
    in_both_ways(Model(), drive, memory_budget=budget).close()


@pytest.mark.parametrize("activations", ["memory", "nvme"])
def test_a_budget_that_a_single_block_exceeds_is_refused_or_exceeded_aloud(
    drive: Path, activations: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        ValueError, match=r"memory_budget must be at least \d+, .*, or 0 for no more than that; got 1000"
    ) as refused:
        OffloadedTraining(Model(), torch.optim.AdamW, path=drive, memory_budget="1KB", activations=activations)
    assert not list(drive.iterdir())
    needed = int(str(refused.value).split("at least ")[1].split(",")[0])
    OffloadedTraining(Model(), torch.optim.AdamW, path=drive, memory_budget=needed - 4, activations=activations).close()
    assert f"takes more than its budget: memory_budget must be at least {needed}" in caplog.text
    caplog.clear()
    with OffloadedTraining(Model(), torch.optim.AdamW, path=drive, memory_budget=needed, activations=activations) as training:
        training.step(*batch(0))
        assert 0 < training.report().peak_bytes <= needed
    assert not caplog.records


def test_without_a_budget_a_large_block_takes_what_it_needs(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepnvme.offload.training.training.DEFAULT_MEMORY_BUDGET", 1000)
    with OffloadedTraining(Model(), torch.optim.AdamW, path=drive) as training:
        training.step(*batch(0))
        assert training.report().peak_bytes > 1000


@pytest.mark.parametrize("checkpoints", [0, 3])
def test_frozen_parameters_are_only_read(drive: Path, checkpoints: int) -> None:
    model = Model(checkpoints=checkpoints)
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    for block in model.blocks[2:]:
        block.narrow.requires_grad_(False)  # as beside the adapters of LoRA
    in_both_ways(model, drive).close()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_module_that_is_not_used_keeps_its_parameters(drive: Path, micro_batches: int) -> None:
    model = Model(blocks=3)
    model.order = [0, 2]
    in_both_ways(model, drive, micro_batches=micro_batches).close()


def test_the_order_may_change_from_step_to_step(drive: Path) -> None:
    model = Model()
    reference = InMemory(model)
    with training_of(model, drive) as training:
        for step, order in enumerate([[0, 1, 2, 3, 4], [4, 1, 0], [2, 3, 2], [0, 1, 2, 3, 4]]):
            model.order = reference.model.order = order
            train_both(training, reference, [batch(step)])


def test_parameters_take_no_memory_between_uses(drive: Path) -> None:
    model = Model()
    with training_of(model, drive):
        for block in model.blocks:
            assert all(param.untyped_storage().nbytes() <= 4 for param in block.parameters())


def test_blocks_stay_within_the_budget(drive: Path) -> None:
    gc.collect()
    before = pinned_bytes()
    model = Model(blocks=8)
    one = sum(param.nbytes for param in model.blocks[0].parameters())
    with training_of(model, drive, memory_budget=8 * one) as training:
        pinned: list[int] = []
        for block in model.blocks:
            block.register_forward_hook(lambda *_: pinned.append(pinned_bytes() - before))
            block.register_full_backward_hook(lambda *_: pinned.append(pinned_bytes() - before))
        for step in range(3):
            training.step(*batch(step))
        assert 2 * one < max(pinned) <= 8 * one
    del training
    gc.collect()
    assert pinned_bytes() <= before


# Steps as a whole


def test_a_step_that_fails_is_undone(drive: Path) -> None:
    model = Model()
    reference = InMemory(model)
    with training_of(model, drive) as training:
        train_both(training, reference, map(batch, range(2)))
        failed = 0
        for step, operation in enumerate(("read", "write"), 2):
            for first in itertools.count(0, 3):
                torch.manual_seed(step)
                try:
                    with failing(operation, first, count=1000):
                        training.step(*batch(step))
                except OSError:
                    failed += 1
                    assert training.steps == step
                    assert_same_model(training, reference.model)
                else:  # nothing was read or written any more
                    break
            torch.manual_seed(step)
            reference.step(*batch(step))
            assert_same_model(training, reference.model)
        assert failed > 5


# What is asked for at the wrong time


def test_a_forward_with_gradients_outside_of_a_step_is_an_error(drive: Path) -> None:
    model = Model()
    with training_of(model, drive), pytest.raises(RuntimeError, match="has to run in OffloadedTraining"):
        model(*batch(0))


def test_the_models_own_state_is_an_error(drive: Path) -> None:
    model = Model()
    with training_of(model, drive) as training:
        for module in (model, model.blocks[0], model.blocks[0].wide):
            with pytest.raises(RuntimeError, match="the parameters are on the drive"):
                module.state_dict()
        assert len(training.state_dict()["model"]) == len(Model().state_dict())


def test_two_backwards_in_a_micro_batch_are_an_error(drive: Path) -> None:
    model = Model()
    with training_of(model, drive) as training:
        with pytest.raises(RuntimeError, match="there is one backward in each micro_batch"), training.micro_batch():
            _ = [model(*batch(0)).backward() for _ in range(2)]
        assert training.step(*batch(0)) is not None


def test_a_step_without_its_micro_batches_is_an_error(drive: Path) -> None:
    model = Model()
    with training_of(model, drive, micro_batches=2) as training:
        with training.micro_batch():
            model(*batch(0)).backward()
        with pytest.raises(RuntimeError, match="a step is under way"):
            training.state_dict()
        with pytest.raises(RuntimeError, match="2 micro-batches, and only 1 were run"):
            training.step()
        training.step(*batch(0))
        assert training.steps == 1


def test_a_backward_after_the_step_is_an_error(drive: Path) -> None:
    model = Model()
    with training_of(model, drive) as training:
        with training.micro_batch():
            loss = model(*batch(0))
            loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="was changed by a step since the forward"):
            loss.backward()
        training.step()
        training.step(*batch(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activations": "disk"}, "activations must be"),
        ({"parameters": "disk"}, "parameters must be"),
        ({"accumulation": "diagonal"}, "accumulation must be"),
        ({"micro_batches": 0}, "micro_batches must be positive"),
        ({"memory_budget": -1}, "memory_budget must not be negative"),
        ({"memory_budget": "much"}, "memory_budget must be a number of bytes.*'much'"),
        ({"activation_budget": "101%"}, "activation_budget must be at most 100% of the available memory"),
        ({"activation_budget": "auto"}, "activation_budget must be a number of bytes.*'auto'"),
        ({"blocks": [nn.Linear(1, 1)]}, "blocks must be modules of the model"),
        ({"checkpoint": {"weight": torch.ones(1)}}, r"checkpoint must be a path, got a dict: .*load_state_dict\(mapping, assign"),
    ],
)
def test_wrong_options_are_named(drive: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        training_of(Model(), drive, **options)
    assert not list(drive.iterdir())


# States


def test_a_training_that_is_resumed_has_the_same_bits(drive: Path, tmp_path: Path) -> None:
    options = {"master_weights": True, "micro_batches": 2, "max_norm": 1.0}
    model = Model().to(torch.bfloat16)
    reference = InMemory(model, **options)
    with training_of(model, drive, **options) as training:
        train_both(training, reference, map(batch, range(2)))
        torch.save(training.state_dict(), tmp_path / "saved.pt")
    with training_of(Model().to(torch.bfloat16), drive, **options) as resumed:
        resumed.load_state_dict(torch.load(tmp_path / "saved.pt", mmap=True, weights_only=True))
        assert resumed.steps == 2
        train_both(resumed, reference, map(batch, range(2, 4)))
        found = resumed.state_dict()
        assert found["steps"] == 4
        expected = reference.optimizer.state_dict()["state"]
        for index, (name, _) in enumerate(reference.model.named_parameters()):
            for key, value in expected[index].items():
                assert torch.equal(found["optimizer"]["state"][name][key], value), (name, key)


def test_a_mapped_state_keeps_its_values(drive: Path) -> None:
    with in_both_ways(Model(), drive, steps=2) as training:
        kept = training.state_dict()
        values = copy.deepcopy(kept)
        for step in range(3):
            training.step(*batch(step))
        parameters = dict(training.model.named_parameters())
        assert all(torch.equal(kept["model"][name], values["model"][name]) for name in parameters)
        for name, state in values["optimizer"]["state"].items():
            assert_same_values(kept["optimizer"]["state"][name], state)


def test_close_can_give_the_parameters_back(drive: Path) -> None:
    model = Model()
    training = in_both_ways(model, drive)
    expected = copy.deepcopy(training.state_dict()["model"])
    training.close(restore=True)
    training.close()
    assert_same_values(model.state_dict(), expected)
    model(*batch(0)).backward()
    with pytest.raises(RuntimeError, match="closed"):
        training.step(*batch(0))


def closed_model(drive: Path) -> Model:
    """Its values have gone with its training."""
    model = Model()
    says = r"closed without restore=True: its 1 steps are lost\. save\(\) keeps them"
    with pytest.warns(UserWarning, match=says), training_of(model, drive) as training:
        training.step(*batch(0))
    return model


def test_a_model_whose_values_are_gone_is_on_the_meta_device_and_not_begun_anew(drive: Path) -> None:
    model, expected = closed_model(drive), Model()
    assert all(param.is_meta for param in model.blocks.parameters())
    assert model.head.weight is model.embedding.weight
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        model(*batch(0))
    with pytest.raises(ValueError, match=r"no values any more .* closed without restore=True"):
        training_of(model, drive)
    for part, name in ((model, "blocks.0.norm.weight"), (model.blocks, "0.norm.weight")):
        with pytest.raises(RuntimeError, match=rf"without values \('{name}'.*: their training was closed without restore=True"):
            part.state_dict()
    model.load_state_dict(expected.state_dict(), assign=True)
    assert model.state_dict().keys() == expected.state_dict().keys()
    model(*batch(0)).backward()
    model.zero_grad()
    model.load_state_dict(expected.state_dict())  # a forward counts its calls
    with training_of(model, drive) as training:
        assert_same_model(training, expected)


def test_a_model_whose_values_are_gone_is_trained_from_a_checkpoint(drive: Path, tmp_path: Path) -> None:
    model, values = closed_model(drive), Model().state_dict()
    torch.save(values, tmp_path / "values.pt")
    with training_of(model, drive, checkpoint=tmp_path / "values.pt") as training:
        assert_same_values(training.state_dict()["model"], values)
        training.step(*batch(0))
        training.close(restore=True)
    model(*batch(0)).backward()


def test_a_scheduler_sets_the_learning_rate(drive: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    reference = InMemory(model)
    with training_of(model, drive) as training:
        schedulers = [torch.optim.lr_scheduler.StepLR(each.optimizer, 1, 0.5) for each in (reference, training)]
        for step in range(4):
            train_both(training, reference, [batch(step)])
            for scheduler in schedulers:
                scheduler.step()


def _write_to_data(param: nn.Parameter) -> None:
    param.data.fill_(0)


def _replace_data(param: nn.Parameter) -> None:
    param.data = torch.zeros(param.shape)


@pytest.mark.parametrize("write", [_write_to_data, _replace_data])
@pytest.mark.parametrize("use", ["step", "close"])
def test_a_write_to_a_parameter_that_is_on_the_drive_is_an_error(
    drive: Path, use: str, write: Callable[[nn.Parameter], None]
) -> None:
    model = Model()
    training = training_of(model, drive)
    training.step(*batch(0))
    before = {name: value.clone() for name, value in training.state_dict()["model"].items()}
    write(model.blocks[1].norm.weight)
    uses: dict[str, Callable[[], object]] = {
        "step": lambda: training.step(*batch(1)),
        "close": lambda: training.close(restore=True),
    }
    with pytest.raises(RuntimeError, match=r"shapes \(64,\) were changed between steps"):
        uses[use]()
    assert_same_values(training.state_dict()["model"], before)
    training.step(*batch(1))
    training.close(restore=True)


@pytest.mark.parametrize("method", ["step", "model"])
def test_a_second_thread_is_refused_while_a_step_runs(drive: Path, method: str) -> None:
    model = Model()
    reference = InMemory(model)
    training = training_of(model, drive)
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: training.step(*batch(1)),
        "model": lambda: torch.no_grad()(model)(*batch(1)),
    }
    errors: list[BaseException] = []

    def call() -> None:
        try:
            calls[method]()
        except BaseException as error:
            errors.append(error)

    def in_the_midst(*_: object) -> None:
        other = threading.Thread(target=call, name="the other")
        other.start()
        other.join()

    model.blocks[2].register_forward_hook(in_the_midst)
    train_both(training, reference, [batch(0)])
    assert len(errors) == 1
    with pytest.raises(RuntimeError, match="one thread at a time"):
        raise errors[0]
    training.close(restore=True)


CHANGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda state: state.pop("steps"), "lacks 'steps'"),
    (lambda state: state["optimizer"].pop("state"), "lacks 'state'"),
    (lambda state: state.update(steps=-5), "steps must be a number of steps, at least 0, got -5"),
    (lambda state: state["model"].update(extra=torch.ones(2)), r"unexpected: 'extra', float32 \[2\]"),
    (lambda state: state["optimizer"]["state"].update(extra={}), "unexpected: 'extra' in the optimizer's state"),
    (
        lambda state: state["optimizer"]["state"]["blocks.0.wide.weight"].pop("exp_avg_sq"),
        "blocks.0.wide.weight: AdamW needs 'exp_avg_sq'",
    ),
    (
        lambda state: state["optimizer"]["state"]["blocks.0.wide.weight"].update(exp_avg=torch.ones(3)),
        r"exp_avg of blocks.0.wide.weight: \(3,\) instead of \(256, 64\)",
    ),
    (lambda state: state["optimizer"]["state"]["blocks.0.wide.weight"].update(step=3), "step of blocks.0.wide.weight: 3 instead"),
    (lambda state: state["optimizer"]["state"].update({"blocks.0.wide.weight": 3}), "is a mapping, got int"),
    (
        lambda state: state["model"].update({"blocks.0.wide.weight": torch.empty(256, 64, device="meta")}),
        "without a value, on the meta device: 'blocks.0.wide.weight'",
    ),
]


def test_a_state_that_no_step_could_go_on_from_changes_nothing(drive: Path) -> None:
    training = training_of(Model(), drive)
    training.step(*batch(0))
    good = copy.deepcopy(training.state_dict())
    training.step(*batch(1))
    before = copy.deepcopy(training.state_dict())
    for change, message in CHANGES:
        bad = copy.deepcopy(good)
        change(bad)
        with pytest.raises(ValueError, match=message):
            training.load_state_dict(bad)
    after = training.state_dict()
    assert_same_values(after["model"], before["model"])
    assert after["steps"] == 2
    for name, values in before["optimizer"]["state"].items():
        assert_same_values(after["optimizer"]["state"][name], values)
    training.load_state_dict(good)
    training.step(*batch(1))
    training.close(restore=True)


def test_close_goes_to_its_end_and_then_raises(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    training = training_of(model, drive)
    training.step(*batch(0))
    expected = state_of(training)
    end = TensorStore.close

    def close(store: TensorStore) -> None:
        end(store)
        raise OSError(errno.EIO, "as asked for")

    monkeypatch.setattr(TensorStore, "close", close)
    with pytest.raises(OSError, match="as asked for"):
        training.close(restore=True)
    training.close()
    assert list(drive.iterdir()) == []
    assert_same_values(model.state_dict(), expected)


class Tower(nn.Module):
    """Blocks with a learned temperature each, and a head outside of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        for block in self.blocks:
            block.register_parameter("scale", nn.Parameter(torch.ones(1)))
        self.head = nn.Linear(WIDTH, 1)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * block.scale
        return self.head(x * self.frozen).square().mean()


def change(model: Tower) -> None:
    with torch.no_grad():
        model.head.weight.fill_(0.5)
        model.frozen.data.mul_(2)
        for block in model.blocks:
            block.scale.data.clamp_(0, 0.25)


@pytest.mark.parametrize(("how", "steps_after"), [("state_dict", 0), ("restore", 1)])
def test_what_is_written_to_parameters_in_memory_between_steps_counts(drive: Path, how: str, steps_after: int) -> None:
    model, known = Tower(), Tower()
    optimizer = torch.optim.AdamW(known.parameters(), lr=0.1)
    batch = torch.ones(4, WIDTH)
    training = OffloadedTraining(model, torch.optim.AdamW, path=drive, memory_budget=0, lr=0.1)
    for number in range(1 + steps_after):
        training.step(batch)
        optimizer.zero_grad()
        known(batch).backward()
        optimizer.step()
        if number == 0:
            change(model)
            change(known)
    found = training.state_dict()["model"] if how == "state_dict" else {}
    training.close(restore=how == "restore")
    assert_same_values(found or model.state_dict(), known.state_dict())


def test_a_state_whose_groups_divide_a_group_is_refused(drive: Path) -> None:
    model = Tower()
    biases = [param for param in model.parameters() if param.dim() == 1 and param.requires_grad]
    weights = [param for param in model.parameters() if param.dim() == 2]
    groups = [{"params": weights}, {"params": biases, "lr": 0.5}]
    options: dict[str, Any] = {"path": drive, "memory_budget": 0, "lr": 0.1}
    with OffloadedTraining(model, torch.optim.AdamW, param_groups=groups, **options) as training:
        training.step(torch.ones(4, WIDTH))
        state = copy.deepcopy(training.state_dict())
    with OffloadedTraining(Tower(), torch.optim.AdamW, **options) as training:
        with pytest.raises(ValueError, match="different options"):
            training.load_state_dict(state)
        assert training.steps == 0
        training.step(torch.ones(4, WIDTH))
