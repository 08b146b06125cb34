"""Embeddings on a drive: forward and gradients have the bits of torch's, for whatever torch's can do."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme.files.directory_lock import StoreLocked
from deepnvme.nn import EmbeddingBagOnDisk, EmbeddingOnDisk
from deepnvme.tables import Table

from ..support.embedding_ids import DIM, ROWS, SMALL, some_ids

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def pair(drive: Path, **more: Any) -> tuple[nn.Embedding, EmbeddingOnDisk]:
    """Torch's embedding and ours, with the same rows."""
    torch.manual_seed(5)
    ours = EmbeddingOnDisk(ROWS, DIM, path=drive / "table", optimizer=torch.optim.SGD, memory_budget=SMALL, **more)
    torch.manual_seed(5)
    return nn.Embedding(ROWS, DIM, sparse=True, **more), ours


def bags(drive: Path, **more: Any) -> tuple[nn.EmbeddingBag, EmbeddingBagOnDisk]:
    torch.manual_seed(5)
    ours = EmbeddingBagOnDisk(ROWS, DIM, path=drive / "table", optimizer=torch.optim.SGD, memory_budget=SMALL, **more)
    torch.manual_seed(5)
    return nn.EmbeddingBag(ROWS, DIM, sparse=True, **more), ours


def dense(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.coalesce().to_dense() if gradient.is_sparse else gradient


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "dim", "padding"), [(1000, 7, None), (3, 5, 1), (2, 5, None), (97, 1, 96), (33_000, 37, 20_000)]
)
def test_a_new_table_has_the_rows_that_torch_makes_of_the_same_seed(
    rows: int, dim: int, padding: int | None, dtype: torch.dtype, drive: Path
) -> None:
    torch.manual_seed(3)
    wanted = nn.Embedding(rows, dim, padding_idx=padding, dtype=dtype).weight
    state = torch.get_rng_state()
    torch.manual_seed(3)
    embedding = EmbeddingOnDisk(rows, dim, padding, path=drive / "table", dtype=dtype)
    assert torch.equal(embedding(torch.arange(rows)), wanted)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("more", [{}, {"padding_idx": 3}, {"padding_idx": -1}], ids=str)
@pytest.mark.parametrize("shape", [(64,), (4, 5, 6), (1,), (0,), (3, 0)], ids=str)
def test_forward_and_gradient_have_the_bits_of_torch(
    shape: tuple[int, ...], more: dict[str, Any], dtype: torch.dtype, drive: Path
) -> None:
    theirs, ours = pair(drive, dtype=dtype, **more)
    ids = some_ids(*shape)
    wanted, found = theirs(ids), ours(ids)
    assert torch.equal(found, wanted)
    factor = torch.randn_like(wanted)
    (wanted * factor).sum().backward()
    (found * factor).sum().backward()
    assert torch.equal(dense(ours.gradient_holder.grad), dense(theirs.weight.grad))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("padding", "ids_dtype"), [(None, torch.int32), (3, torch.int64)])
@pytest.mark.parametrize(
    ("mode", "how"),
    [
        *[(mode, how) for mode in ("sum", "mean") for how in ("2d", "offsets", "last offset", "empty")],
        ("sum", "weights"),
    ],
)
def test_bags_have_the_bits_of_torch(
    mode: Any, how: str, padding: int | None, dtype: torch.dtype, ids_dtype: torch.dtype, drive: Path
) -> None:
    theirs, ours = bags(drive, mode=mode, padding_idx=padding, dtype=dtype, include_last_offset=how == "last offset")
    arguments: dict[str, Any] = {"input": some_ids(0 if how == "empty" else 60).to(ids_dtype)}
    if how == "2d":
        arguments["input"] = arguments["input"].view(12, 5)
    elif how == "empty":
        arguments["offsets"] = torch.zeros(3, dtype=ids_dtype)
    else:
        arguments["offsets"] = torch.tensor([0, 4, 4, 11, 40, 60][: 6 if how == "last offset" else 5], dtype=ids_dtype)
    if how == "weights":
        arguments["per_sample_weights"] = torch.randn(60, dtype=dtype)
    results = []
    for module, holder in ((theirs, theirs.weight), (ours, ours.gradient_holder)):
        own = {name: value.clone().requires_grad_(value.is_floating_point()) for name, value in arguments.items()}
        out = module(**own)
        torch.manual_seed(1)
        (out * torch.randn_like(out)).sum().backward()
        results.append((out, dense(holder.grad), own["per_sample_weights"].grad if how == "weights" else torch.empty(0)))
        with torch.no_grad():
            results[-1] += (module(**own),)
    for found, wanted in zip(results[1], results[0], strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("more", [{}, {"padding_idx": 3}], ids=str)
def test_gradients_of_several_forwards_and_backwards_add_up_in_the_order_of_torch(more: dict[str, Any], drive: Path) -> None:
    theirs, ours = pair(drive, **more)
    for module, holder in ((theirs, theirs.weight), (ours, ours.gradient_holder)):
        torch.manual_seed(2)
        for backward in range(4):
            losses = []
            for count in (30, 1, 1, 20):
                out = module(some_ids(count) % (10 if backward else ROWS))
                losses.append((out * torch.randn_like(out) * 10 ** (count % 4)).sum())
            torch.stack(losses).sum().backward()
        holder.grad = dense(holder.grad)
    assert torch.equal(ours.gradient_holder.grad, theirs.weight.grad)


def test_without_a_gradient_rows_are_only_read(drive: Path) -> None:
    _, ours = pair(drive)
    with torch.no_grad():
        assert not ours(torch.tensor([1, 1])).requires_grad
    ours.requires_grad_(False)
    assert not ours(torch.tensor([1])).requires_grad
    stats = ours.table.stats()
    assert (stats.hits + stats.misses, stats.rows_read) == (3, 1)


def test_a_table_that_is_there_is_opened(drive: Path) -> None:
    _, ours = pair(drive)
    wanted = ours(torch.arange(ROWS)).detach()
    ours.table.close()
    again = EmbeddingOnDisk(ROWS, DIM, path=drive / "table", optimizer=torch.optim.SGD)
    assert torch.equal(again(torch.arange(ROWS)), wanted)
    again.table.close()
    reader = EmbeddingOnDisk(ROWS, DIM, path=drive / "table")
    assert torch.equal(reader(torch.tensor([7])), wanted[7:8])
    reader.table.close()
    with pytest.raises(ValueError, match="is wanted"):
        EmbeddingOnDisk(ROWS + 1, DIM, path=drive / "table")
    with pytest.raises(ValueError, match="is wanted"):
        EmbeddingOnDisk(ROWS, DIM, path=drive / "table", dtype=torch.float64)
    with pytest.raises(ValueError, match="make the table with optimizer=SparseAdam"):
        EmbeddingOnDisk(ROWS, DIM, path=drive / "table", optimizer=torch.optim.SparseAdam)


@pytest.mark.parametrize("kind", [EmbeddingOnDisk, EmbeddingBagOnDisk])
def test_from_pretrained(kind: Any, drive: Path) -> None:
    weight = torch.randn(50, 6)
    ids = torch.tensor([[3, 4], [49, 0]])
    wanted = getattr(nn, kind.__name__.removesuffix("OnDisk")).from_pretrained(weight)(ids)
    of_tensor = kind.from_pretrained(weight, path=drive / "a")
    assert torch.equal(of_tensor(ids), wanted)
    assert not of_tensor.trained
    assert torch.equal(kind.from_pretrained(of_tensor.table)(ids), wanted)
    trained = kind.from_pretrained(of_tensor.table, False, path=drive / "c", optimizer=torch.optim.SparseAdam, padding_idx=3)
    assert trained.trained
    assert torch.equal(trained.state_dict()["weight"], weight)  # the padding too
    trained(ids).sum().backward()
    trained.table.close()
    table = Table.open(drive / "c", writable=True)
    again = kind.from_pretrained(table, False, optimizer=torch.optim.SparseAdam)
    assert torch.equal(again.state_dict()["weight"], weight)


def test_from_pretrained_says_what_is_missing(drive: Path) -> None:
    with pytest.raises(TypeError, match=r"give Table\.open"):
        EmbeddingOnDisk.from_pretrained(drive / "a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="path= is needed"):
        EmbeddingOnDisk.from_pretrained(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="optimizer="):
        EmbeddingOnDisk.from_pretrained(torch.zeros(3, 2), freeze=False, path=drive / "a")
    with pytest.raises(ValueError, match="two dimensions"):
        EmbeddingOnDisk.from_pretrained(torch.zeros(3), path=drive / "a")
    with pytest.raises(ValueError, match="two dimensions"):
        EmbeddingOnDisk.from_pretrained(Table.from_tensor(drive / "b", torch.zeros(3, 2, 2)))
    frozen = EmbeddingOnDisk.from_pretrained(torch.zeros(3, 2), path=drive / "c")
    with pytest.raises(ValueError, match="cannot be trained"):
        frozen.requires_grad_()


def test_bad_arguments(drive: Path) -> None:
    for kind in (EmbeddingOnDisk, EmbeddingBagOnDisk):
        for more in (
            {"max_norm": 1.0},
            {"scale_grad_by_freq": True},
            {"device": "cuda"},
            {"_weight": torch.zeros(3, 2)},
        ):
            with pytest.raises(TypeError, match=f"{kind.__name__} does not know {next(iter(more))}: gradients are always sparse"):
                kind(3, 2, path=drive / "t", **more)
        with pytest.raises(ValueError, match=r"padding_idx must be in \[-3, 3\), got 3"):
            kind(3, 2, padding_idx=3, path=drive / "t")
    with pytest.raises(ValueError, match='mode must be "sum" or "mean"'):
        EmbeddingBagOnDisk(3, 2, mode="max", path=drive / "t")  # type: ignore[arg-type]
    for optimizer in (torch.optim.Adam, torch.optim.RMSprop, torch.optim.LBFGS):
        with pytest.raises(ValueError, match=r"torch\.optim\.SparseAdam"):
            EmbeddingOnDisk(3, 2, path=drive / "t", optimizer=optimizer)
    assert not (drive / "t").exists()


@pytest.mark.parametrize("kind", [EmbeddingOnDisk, EmbeddingBagOnDisk])
@pytest.mark.parametrize("grad", [True, False])
def test_of_bad_ids_the_first_one_and_its_position_are_named(kind: Any, grad: bool, drive: Path) -> None:
    """Also where rows are read that are sorted, and each once."""
    ours = kind(ROWS, DIM, path=drive / "table", optimizer=torch.optim.SGD)
    for bad in (ROWS, -1, -7):
        ids = torch.tensor([[5, 5, 2], [2, bad, bad - 1]])
        with torch.set_grad_enabled(grad):
            for call in (ours, ours.prefetch):
                with pytest.raises(IndexError, match=rf"^ids\[1, 1\] is {bad}, and the table has the rows 0 to {ROWS - 1}$"):
                    call(ids)
                with pytest.raises(TypeError):
                    call(torch.tensor([[0.5]]))
    assert ours.table.stats().rows_read == 0


def test_a_state_dict_is_torchs_and_takes_no_name_on_the_drive(drive: Path) -> None:
    theirs, ours = pair(drive)
    before = sorted((drive / "table").iterdir())
    weight = ours.state_dict()["weight"]
    assert torch.equal(weight, theirs.weight)
    assert sorted((drive / "table").iterdir()) == before
    weight.zero_()  # of the copy only
    assert torch.equal(ours.state_dict()["weight"], theirs.weight)
    other = nn.Embedding(ROWS, DIM)
    ours.load_state_dict(other.state_dict())
    assert torch.equal(ours.state_dict()["weight"], other.weight)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.weight, other.weight)


def test_a_state_dict_of_a_whole_model_is_loaded_or_refused(drive: Path) -> None:
    _, ours = pair(drive)
    model, in_memory = nn.Sequential(ours, nn.Linear(DIM, 1)), nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1))
    model.load_state_dict(in_memory.state_dict())
    assert model.state_dict().keys() == in_memory.state_dict().keys()
    assert torch.equal(model(torch.tensor([4])), in_memory(torch.tensor([4])))
    with pytest.raises(RuntimeError, match="size mismatch"):
        ours.load_state_dict({"weight": torch.zeros(3, DIM)})
    with pytest.raises(RuntimeError, match="Missing"):
        ours.load_state_dict({})
    with pytest.raises(RuntimeError, match="Unexpected"):
        ours.load_state_dict({"weight": in_memory[0].weight, "bias": torch.zeros(1)})
    ours.load_state_dict({}, strict=False)
    ours.table.close()
    reader = EmbeddingOnDisk(ROWS, DIM, path=drive / "table")
    with pytest.raises(RuntimeError, match="cannot be changed"):
        reader.load_state_dict({"weight": in_memory[0].weight})
    reader.table.close()


def test_copies_read_the_same_table_and_what_is_trained_has_none(drive: Path) -> None:
    _, ours = pair(drive)
    ids = torch.tensor([5])
    wanted = ours(ids).detach()
    with pytest.raises(StoreLocked, match="the Table of this process"):
        copy.deepcopy(nn.Sequential(ours))
    pickled = pickle.dumps(ours)
    ours.table.close()
    again = pickle.loads(pickled)
    other = copy.deepcopy(nn.Sequential(again))[0]
    for each in (again, other):
        assert torch.equal(each(ids), wanted)
        assert not each.trained
        with pytest.raises(ValueError, match="cannot be trained"):
            each.requires_grad_()
        each.table.close()
