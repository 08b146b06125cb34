"""Rows that are trained on a drive: the same bits as torch's optimizers give, and the last commit after whatever happens."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme.nn import EmbeddingBagOnDisk, EmbeddingOnDisk
from deepnvme.tables import Lookahead, RowOptimizer, RowWiseAdagrad

from ..support.embedding_ids import DIM, ROWS, SMALL, some_ids

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "maximize": True}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    (torch.optim.SparseAdam, {"lr": 0.01, "betas": (0.8, 0.99)}),
    (RowWiseAdagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
]
NAMES = ["SGD", "SGD maximize", "Adagrad", "SparseAdam", "RowWiseAdagrad"]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")


def made_for(kind: Any, settings: dict[str, Any]) -> Any:
    return functools.partial(kind, **{name: value for name, value in settings.items() if name.startswith("initial")})


def pair(drive: Path, kind: Any, settings: dict[str, Any], dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Any, ...]:
    """Torch's embedding and optimizer, and ours."""
    torch.manual_seed(5)
    ours = EmbeddingOnDisk(
        ROWS, DIM, path=drive / "table", dtype=dtype, optimizer=made_for(kind, settings), memory_budget=SMALL, **more
    )
    torch.manual_seed(5)
    theirs = nn.Embedding(ROWS, DIM, sparse=True, dtype=dtype, **more)
    return theirs, kind(theirs.parameters(), **settings), ours, RowOptimizer(ours, kind, **settings)


def step(module: nn.Module, optimizer: torch.optim.Optimizer, *batches: torch.Tensor) -> None:
    for ids in batches:
        generator = torch.Generator().manual_seed(int(ids.sum()))
        out = module(ids)
        (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same(theirs: Any, torchs: Any, ours: Any, mine: Any) -> None:
    assert torch.equal(ours.state_dict()["weight"], theirs.weight)
    wanted, found = torchs.state_dict(), mine.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for number, states in wanted["state"].items():
        assert list(found["state"][number]) == list(states)
        for name, value in states.items():
            other = found["state"][number][name]
            assert type(other) is type(value)
            assert torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS, ids=NAMES)
def test_steps_have_the_bits_of_torch(kind: Any, settings: dict[str, Any], dtype: torch.dtype, drive: Path) -> None:
    theirs, torchs, ours, mine = pair(drive, kind, settings, dtype, padding_idx=3)
    for number in range(40):
        batches = [some_ids(4, 16), some_ids(1)][: 1 + number % 2] * (1 + number % 3)
        if number % 10 == 9:
            batches = [torch.full((4,), 3)]  # padding only
        for module, optimizer in ((theirs, torchs), (ours, mine)):
            step(module, optimizer, *batches)
        if number % 30 == 7:
            mine.commit()
    assert ours.table.stats().cache_capacity < ROWS
    assert_same(theirs, torchs, ours, mine)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS, ids=NAMES)
def test_steps_of_bags_have_the_bits_of_torch(kind: Any, settings: dict[str, Any], mode: Any, drive: Path) -> None:
    torch.manual_seed(5)
    ours = EmbeddingBagOnDisk(
        ROWS, DIM, mode=mode, path=drive / "table", optimizer=made_for(kind, settings), memory_budget=SMALL, padding_idx=3
    )
    torch.manual_seed(5)
    theirs = nn.EmbeddingBag(ROWS, DIM, mode=mode, sparse=True, padding_idx=3)
    torchs, mine = kind(theirs.parameters(), **settings), RowOptimizer(ours, kind, **settings)
    for _ in range(30):
        ids = some_ids(8, 6)
        factor = torch.randn(8, DIM)
        (theirs(ids) * factor).sum().backward()
        (ours(ids) * factor).sum().backward()
        for optimizer in (torchs, mine):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(theirs, torchs, ours, mine)


def test_row_wise_adagrad_is_that_of_fbgemm() -> None:
    """``sum += mean(g ** 2)``, ``row -= lr * g / (sqrt(sum) + eps)``; of sparse and of dense gradients."""
    for sparse in (True, False):
        embedding = nn.Embedding(10, 4, sparse=sparse)
        optimizer = RowWiseAdagrad(embedding.parameters(), lr=0.5, eps=0.1)
        row, total = embedding.weight[2].detach().clone(), 0.0
        for factor in (1.0, 2.0, -3.0):
            gradient = torch.tensor([1.0, 2.0, 3.0, 4.0]) * factor
            total += float((gradient**2).mean())
            row -= 0.5 * gradient / (total**0.5 + 0.1)
            (embedding(torch.tensor([2])) * gradient).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(embedding.weight[2].detach(), row)
        assert optimizer.state[embedding.weight]["sum"].shape == (10,)


def test_groups_of_several_embeddings_in_a_model(drive: Path) -> None:
    def model(kind: Any, **more: Any) -> nn.ModuleDict:
        torch.manual_seed(0)
        return nn.ModuleDict(
            {name: kind(rows, 8, **{k: v / name for k, v in more.items()}) for name, rows in (("a", 50), ("b", 70))}
        )

    def in_memory(rows: int, dim: int) -> nn.Embedding:
        return nn.Embedding(rows, dim, sparse=True)

    theirs = model(in_memory)
    ours = model(functools.partial(EmbeddingOnDisk, optimizer=torch.optim.SparseAdam), path=drive)
    torchs = torch.optim.SparseAdam([{"params": [theirs["a"].weight], "lr": 0.5}, {"params": [theirs["b"].weight]}], lr=0.1)
    mine = RowOptimizer([{"params": ours["a"], "lr": 0.5}, {"params": [ours["b"]]}], torch.optim.SparseAdam, lr=0.1)
    for number in range(5):
        for module, optimizer in ((theirs, torchs), (ours, mine)):
            for name in ("a", "b")[: 1 + number % 2]:
                module[name](torch.tensor([number, 7])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    wanted, found = torchs.state_dict(), mine.state_dict()
    assert [state["step"] for state in found["state"].values()] == [5, 2]
    assert found["param_groups"] == wanted["param_groups"]
    assert torch.equal(found["state"][1]["exp_avg"], wanted["state"][1]["exp_avg"])
    mine.commit({"batch": 5})
    whole = RowOptimizer(ours)
    assert [whole.state[holder]["step"] for holder in whole.param_groups[0]["params"]] == [5, 2]
    assert whole.attributes == {"batch": 5}


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS, ids=NAMES)
def test_training_goes_on_from_the_last_commit(kind: Any, settings: dict[str, Any], drive: Path) -> None:
    theirs, torchs, ours, mine = pair(drive, kind, settings)
    for _ in range(10):
        ids = some_ids(40)
        step(theirs, torchs, ids)
        step(ours, mine, ids)
    mine.commit({"batch": 10})
    for _ in range(5):
        step(ours, mine, some_ids(40))  # is lost
    ours.table.close()
    again = EmbeddingOnDisk(ROWS, DIM, path=drive / "table", optimizer=made_for(kind, settings), memory_budget=SMALL)
    opened = RowOptimizer(again, kind, **settings)
    assert opened.attributes == {"batch": 10}
    for _ in range(10):
        ids = some_ids(40)
        step(theirs, torchs, ids)
        step(again, opened, ids)
    assert_same(theirs, torchs, again, opened)


def test_a_failed_step_is_refused_to_be_committed(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, torchs, ours, mine = pair(drive, torch.optim.SparseAdam, {"lr": 0.1})
    ids = some_ids(40)
    step(theirs, torchs, ids)
    step(ours, mine, ids)
    mine.commit()
    whole_write = ours.table.write_records

    def half(rows: torch.Tensor, columns: dict[str, torch.Tensor]) -> None:
        count = len(rows) // 2
        whole_write(rows[:count], {name: column[:count] for name, column in columns.items()})
        raise OSError(5, "the drive fails")

    with monkeypatch.context() as patch:
        patch.setattr(ours.table, "write_records", half)
        with pytest.raises(OSError, match="the drive fails"):
            step(ours, mine, ids)
    with pytest.raises(RuntimeError, match="rollback"):
        mine.commit()
    with pytest.raises(RuntimeError, match="rollback"):
        mine.step()
    mine.rollback()
    assert_same(theirs, torchs, ours, mine)
    step(theirs, torchs, ids)
    step(ours, mine, ids)
    assert_same(theirs, torchs, ours, mine)


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS, ids=NAMES)
def test_state_dicts_go_to_torch_and_back(kind: Any, settings: dict[str, Any], drive: Path) -> None:
    theirs, torchs, ours, mine = pair(drive, kind, settings)
    for _ in range(5):
        step(ours, mine, some_ids(40))
    theirs.load_state_dict(ours.state_dict())
    torchs.load_state_dict(mine.state_dict())
    for _ in range(5):
        ids = some_ids(40)
        step(theirs, torchs, ids)
        step(ours, mine, ids)
    assert_same(theirs, torchs, ours, mine)
    for _ in range(5):
        step(theirs, torchs, some_ids(40))
    file = io.BytesIO()
    torch.save([theirs.state_dict(), torchs.state_dict()], file)
    file.seek(0)
    weights, states = torch.load(file)
    ours.load_state_dict(weights)
    mine.load_state_dict(states)
    assert_same(theirs, torchs, ours, mine)
    ids = some_ids(40)
    step(theirs, torchs, ids)
    step(ours, mine, ids)
    assert_same(theirs, torchs, ours, mine)


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS[2:4], ids=NAMES[2:4])
def test_a_state_dict_of_before_the_first_step_resets_states(kind: Any, settings: dict[str, Any], drive: Path) -> None:
    theirs, torchs, ours, mine = pair(drive, kind, settings)
    fresh, fresh_of_torch = mine.state_dict(), torchs.state_dict()
    assert fresh["state"].keys() == fresh_of_torch["state"].keys()
    step(ours, mine, some_ids(40))
    ours.load_state_dict(theirs.state_dict())
    mine.load_state_dict(fresh_of_torch)
    ids = some_ids(40)
    step(theirs, torchs, ids)
    step(ours, mine, ids)
    assert_same(theirs, torchs, ours, mine)


def test_a_state_dict_of_another_optimizer_changes_nothing(drive: Path) -> None:
    theirs, torchs, ours, mine = pair(drive, torch.optim.SparseAdam, {"lr": 0.1})
    ids = some_ids(40)
    step(theirs, torchs, ids)
    step(ours, mine, ids)
    other = torch.optim.Adagrad(theirs.parameters()).state_dict()
    with pytest.raises(ValueError, match="SparseAdam has"):
        mine.load_state_dict(other)
    smaller = torchs.state_dict()
    smaller["state"] = {0: {**smaller["state"][0], "exp_avg": torch.zeros(3, DIM)}}
    with pytest.raises(ValueError, match="must have the shape"):
        mine.load_state_dict(smaller)
    assert_same(theirs, torchs, ours, mine)


def test_optimizers_that_cannot_train_rows_are_refused(drive: Path) -> None:
    ours = EmbeddingOnDisk(10, 4, path=drive / "table", optimizer=torch.optim.SGD)
    for kind, settings in (
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"weight_decay": 0.1}),
        (torch.optim.Adagrad, {"weight_decay": 0.1}),
        (torch.optim.Adam, {}),
    ):
        with pytest.raises(ValueError, match=r"torch\.optim\.SparseAdam"):
            RowOptimizer(ours, kind, lr=0.1, **settings)
    with pytest.raises(ValueError, match=r"torch\.optim\.SparseAdam"):
        RowOptimizer([{"params": ours, "momentum": 0.9}], torch.optim.SGD)
    with pytest.raises(ValueError, match="give all embeddings to its constructor"):
        RowOptimizer(ours, torch.optim.SGD).add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="make the table with optimizer=SparseAdam"):
        RowOptimizer(ours, torch.optim.SparseAdam)
    with pytest.raises(ValueError, match="no embeddings on a drive"):
        RowOptimizer(nn.Linear(2, 2), torch.optim.SGD)
    with pytest.raises(TypeError, match="Linear"):
        RowOptimizer([nn.Linear(2, 2)], torch.optim.SGD)
    with pytest.raises(ValueError, match="'optimizer'"):
        RowOptimizer(ours, torch.optim.SGD).commit({"optimizer": 1})
    ours.table.close()
    reader = EmbeddingOnDisk(10, 4, path=drive / "table")
    with pytest.raises(ValueError, match="cannot be trained"):
        RowOptimizer([reader], torch.optim.SGD)
    reader.table.close()


@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_an_eps_that_is_zero_in_float16_is_refused_for_what_torch_makes_of_it(drive: Path, kind: Any) -> None:
    with pytest.raises(ValueError, match=r"NaN of rows in torch.float16 where their gradient is 0.*functools.partial.*eps=1e-4"):
        EmbeddingOnDisk(10, 4, path=drive / "table", dtype=torch.float16, optimizer=kind)
    larger = functools.partial(kind, eps=1e-4)
    ours = EmbeddingOnDisk(10, 4, path=drive / "table", dtype=torch.float16, optimizer=larger)
    step(ours, RowOptimizer(ours), torch.tensor([1]))
    assert ours(torch.arange(10)).isfinite().all()


def two_tables(drive: Path) -> tuple[EmbeddingOnDisk, EmbeddingOnDisk]:
    first = EmbeddingOnDisk(10, 4, path=drive / "a", optimizer=torch.optim.SparseAdam)
    return first, EmbeddingOnDisk(10, 4, path=drive / "b", optimizer=torch.optim.SparseAdam)


def test_an_interrupt_between_two_tables_is_no_whole_step(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two_tables(drive)
    optimizer = RowOptimizer([first, second], lr=0.1)
    ids = torch.tensor([1, 3])
    wanted = first(ids).detach()
    optimizer.commit()
    (first(ids).sum() + second(ids).sum()).backward()

    def interrupted(ids: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(second.table, "read_records", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    for refused in (optimizer.commit, optimizer.step, lambda: optimizer.load_state_dict(optimizer.state_dict())):
        with pytest.raises(RuntimeError, match="rollback"):
            refused()
    optimizer.rollback()
    assert torch.equal(first(ids), wanted)


def test_a_gradient_that_is_not_sparse_changes_nothing(drive: Path) -> None:
    first, second = two_tables(drive)
    optimizer = RowOptimizer([first, second], lr=0.1)
    wanted = first(torch.tensor([1])).detach()
    first(torch.tensor([1])).sum().backward()
    second.gradient_holder.grad = torch.zeros(10, 4)
    with pytest.raises(RuntimeError, match="must be sparse"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.commit()
    assert torch.equal(first(torch.tensor([1])), wanted)


class Batches:
    """Half of the rows of each batch are in the next one too."""

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        before = torch.arange(32)
        for _ in range(40):
            before = torch.cat([before[16:], torch.randint(0, ROWS, (16,), generator=generator)])
            yield before


@pytest.mark.parametrize("memory_budget", [SMALL, 0])
def test_with_lookahead_rows_trained_meanwhile_are_seen(memory_budget: int, drive: Path) -> None:
    torch.manual_seed(5)
    ours = EmbeddingOnDisk(ROWS, DIM, path=drive / "table", optimizer=torch.optim.SparseAdam, memory_budget=memory_budget)
    torch.manual_seed(5)
    theirs = nn.Embedding(ROWS, DIM, sparse=True)
    torchs, mine = torch.optim.SparseAdam(theirs.parameters()), RowOptimizer(ours)
    ahead = Lookahead(Batches(), lambda ids: {ours: ids})
    assert len(ahead) == 40
    for _ in range(2):
        for ids, wanted in zip(ahead, Batches(), strict=True):
            assert torch.equal(ids, wanted)
            step(theirs, torchs, ids)
            step(ours, mine, ids)
    assert_same(theirs, torchs, ours, mine)
    assert list(Lookahead([], lambda ids: {})) == []
