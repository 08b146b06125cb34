"""Embeddings of a model are moved to a drive, where that leaves the model as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from deepnvme.nn import EmbeddingBagOnDisk, EmbeddingOnDisk
from deepnvme.tables import RowOptimizer, offload_embeddings


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(500, 16, padding_idx=2)
        self.deeper = nn.ModuleDict({"goods": nn.EmbeddingBag(300, 16, mode="sum", include_last_offset=True)})
        self.small = nn.Embedding(3, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        bags = torch.arange(0, ids.numel() + 1, ids.shape[1])
        joined = self.users(ids).sum(1) + self.deeper["goods"](ids.flatten(), bags) + self.small(ids[:, 0] % 3)
        return self.out(joined)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def test_large_embeddings_are_replaced_and_the_model_computes_the_same(drive: Path) -> None:
    theirs, ours = model(), model()
    names = offload_embeddings(
        ours, drive, min_bytes=1000, optimizer=torch.optim.SparseAdam, memory_budget=50_000, staging_bytes=8 << 20
    )
    assert names == ["users", "deeper.goods"]
    assert isinstance(ours.users, EmbeddingOnDisk)
    assert isinstance(ours.deeper["goods"], EmbeddingBagOnDisk)
    assert type(ours.small) is nn.Embedding
    assert sorted(path.name for path in drive.iterdir()) == ["deeper.goods", "users"]
    assert (ours.users.padding_idx, ours.deeper["goods"].mode) == (2, "sum")
    assert [each.table.staging_bytes for each in (ours.users, ours.deeper["goods"])] == [4 << 20] * 2
    assert ours.users.table.memory_budget + ours.deeper["goods"].table.memory_budget <= 50_000
    ids = torch.randint(0, 300, (8, 5))
    assert torch.equal(ours(ids), theirs(ids))
    assert len(list(ours.parameters())) == 3
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())


def test_training_goes_on_with_the_tables_that_are_there(drive: Path) -> None:
    ours = model()
    offload_embeddings(ours, [drive / "x", drive / "y"], min_bytes=1000, optimizer=torch.optim.SparseAdam)
    optimizer = RowOptimizer(ours, torch.optim.SparseAdam, lr=0.1)
    ids = torch.randint(0, 300, (8, 5))
    ours(ids).sum().backward()
    optimizer.step()
    optimizer.commit()
    rest = {name: value for name, value in ours.state_dict().items() if "users" not in name and "goods" not in name}
    wanted = ours(ids)
    for embedding in (ours.users, ours.deeper["goods"]):
        embedding.table.close()
    with torch.device("meta"):
        again = Model()
    offload_embeddings(again, [drive / "x", drive / "y"], min_bytes=1000, optimizer=torch.optim.SparseAdam)
    again.small.to_empty(device="cpu")
    again.out.to_empty(device="cpu")
    again.load_state_dict(rest, strict=False)
    assert torch.equal(again(ids), wanted)


def test_a_module_on_the_meta_device_needs_its_table(drive: Path) -> None:
    with torch.device("meta"):
        empty = Model()
    with pytest.raises(ValueError, match="there is no table"):
        offload_embeddings(empty, drive, min_bytes=1000)
    assert type(empty.users) is nn.Embedding


def test_frozen_ones_and_those_without_an_optimizer_are_not_trained(drive: Path) -> None:
    ours = model()
    ours.users.requires_grad_(False)
    ours.eval()
    offload_embeddings(ours, drive / "a", min_bytes=1000, optimizer=torch.optim.SGD)
    assert not ours.users.trained
    assert ours.deeper["goods"].trained
    assert not ours.users.training
    ours = model()
    offload_embeddings(ours, drive / "b", min_bytes=1000)
    assert not ours.users.trained
    assert not ours.users.table.writable


def test_what_cannot_be_replaced_stays_with_a_warning(drive: Path) -> None:
    tied = nn.ModuleDict({"embed": nn.Embedding(500, 16), "head": nn.Linear(16, 500, bias=False)})
    tied["head"].weight = tied["embed"].weight
    with pytest.warns(UserWarning, match=r"'embed' stays in memory: it has the same weight as head\.weight") as warned:
        assert offload_embeddings(tied, drive, min_bytes=1) == []
    assert warned[0].filename == __file__
    for refused, reason in (
        (nn.Embedding(500, 16, max_norm=1.0), r"max_norm=1\.0"),
        (nn.Embedding(500, 16, scale_grad_by_freq=True), "no sparse gradients"),
        (nn.EmbeddingBag(500, 16, mode="max"), "no sparse gradients"),
    ):
        with pytest.warns(UserWarning, match=reason):
            assert offload_embeddings(nn.Sequential(refused), drive, min_bytes=1) == []
    with pytest.raises(ValueError, match="is an embedding itself"):
        offload_embeddings(nn.Embedding(3, 2), drive)

    class Own(nn.Embedding):
        pass

    assert offload_embeddings(nn.Sequential(Own(500, 16)), drive, min_bytes=1) == []
    assert list(drive.iterdir()) == []


def test_a_module_in_two_places_is_replaced_in_both(drive: Path) -> None:
    shared = nn.Embedding(500, 16)
    ours = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Sequential(shared)})
    assert offload_embeddings(ours, drive, min_bytes=1, optimizer=torch.optim.SGD) == ["a"]
    assert ours["a"] is ours["b"] is ours["c"][0]
    assert isinstance(ours["a"], EmbeddingOnDisk)
