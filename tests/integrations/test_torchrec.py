"""EmbeddingBagCollectionOnDisk without TorchRec: the bits of torch's bags, common commits. tests/compat has the real one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepnvme.integrations.torchrec import EmbeddingBagCollectionOnDisk
from deepnvme.tables import Lookahead, RowOptimizer, RowWiseAdagrad

from ..support import jagged_features
from ..support.jagged_features import KeyedJaggedTensor

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")

ROWS, SAMPLES = 500, 16


def tables(pooling: str = "sum") -> list[Any]:
    """Two features share the table of users; the feature "item" is in two tables."""
    return [
        SimpleNamespace(name="users", num_embeddings=ROWS, embedding_dim=8, feature_names=["user", "friends"], pooling=pooling),
        SimpleNamespace(name="articles", num_embeddings=2 * ROWS, embedding_dim=4, feature_names=["item"], pooling=pooling),
        SimpleNamespace(name="item", num_embeddings=ROWS, embedding_dim=16, feature_names=["item"], pooling=pooling),
    ]


def features(seed: int, weighted: bool = False, **more: Any) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in ("friends", "item", "user", "not used"):
        lengths = torch.randint(0, 5, (SAMPLES,), generator=generator)
        found[name] = torch.randint(ROWS // 4, (int(lengths.sum()),), generator=generator), lengths
    return KeyedJaggedTensor(found, weighted, **more)


class InMemory(torch.nn.Module):
    def __init__(self, pooling: str = "sum", weighted: bool = False) -> None:
        super().__init__()
        self.weighted = weighted
        self.embedding_bags = torch.nn.ModuleDict(
            {
                table.name: torch.nn.EmbeddingBag(
                    table.num_embeddings, table.embedding_dim, mode=pooling, sparse=True, include_last_offset=True
                )
                for table in tables()
            }
        )

    def forward(self, given: KeyedJaggedTensor) -> torch.Tensor:
        pooled, jagged = [], given.to_dict()
        for table in tables():
            for name in table.feature_names:
                each = jagged[name]
                weights = each.weights() if self.weighted else None
                pooled.append(self.embedding_bags[table.name](each.values(), each.offsets(), weights))
        return torch.cat(pooled, dim=1)


def on_disk(drive: Path, pooling: str = "sum", weighted: bool = False, **options: Any) -> EmbeddingBagCollectionOnDisk:
    return EmbeddingBagCollectionOnDisk(
        tables(pooling), weighted, path=drive / "tables", **{"memory_budget": 64 << 10, **options}
    )


def close(collection: EmbeddingBagCollectionOnDisk) -> None:
    for bag in collection.embedding_bags.values():
        bag.table.close()


def test_features_that_are_none_of_torchrec_are_refused(drive: Path) -> None:
    collection = on_disk(drive)
    with pytest.raises(TypeError, match=r"must be a KeyedJaggedTensor of TorchRec .*, got dict"):
        collection({"user": torch.tensor([1])})
    with pytest.raises(ValueError, match="inverse indices"):
        collection(features(1, inverse=(["user"], torch.zeros(1))))
    with pytest.raises(KeyError, match="user"):
        collection(KeyedJaggedTensor({}))
    with pytest.raises(IndexError):
        collection(KeyedJaggedTensor(dict.fromkeys(("user", "friends", "item"), (torch.tensor([ROWS]), torch.tensor([1])))))
    close(collection)


def test_tables_that_cannot_be_made_are_refused_and_the_others_closed(drive: Path) -> None:
    first = tables()[0]
    with pytest.raises(ValueError, match="different names"):
        EmbeddingBagCollectionOnDisk([first, first], path=drive)
    with pytest.raises(ValueError, match="different names"):
        EmbeddingBagCollectionOnDisk([], path=drive)
    for change, message in (
        ({"pooling": "none"}, 'mode must be "sum" or "mean"'),
        ({"data_type": "INT8"}, "must be FP32 or FP16, got INT8"),
    ):
        other = SimpleNamespace(**{**vars(tables()[1]), **change})
        with pytest.raises(ValueError, match=message):
            EmbeddingBagCollectionOnDisk([first, other], path=drive, optimizer=torch.optim.SGD)
    with pytest.raises(ValueError, match="with weights need the pooling 'sum', got 'mean'"):
        on_disk(drive, "mean", weighted=True)
    close(EmbeddingBagCollectionOnDisk([first], path=drive, optimizer=torch.optim.SGD))  # nobody has it open


@pytest.mark.parametrize(("pooling", "weighted"), [("sum", False), ("mean", False), ("sum", True)])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
def test_results_and_trained_rows_have_the_bits_of_bags_in_memory(
    drive: Path, pooling: str, weighted: bool, optimizer: Any
) -> None:
    torch.manual_seed(0)
    known = InMemory(pooling, weighted)
    torch.manual_seed(0)
    ours = on_disk(drive, pooling, weighted, optimizer=optimizer)
    of_known, of_ours = optimizer(known.parameters(), lr=0.1), RowOptimizer(ours, lr=0.1)
    batches = [features(seed, weighted) for seed in range(5)]
    for batch in Lookahead(batches, lambda batch: {ours: batch}):
        wanted, found = known(batch), ours(batch)
        assert isinstance(found, jagged_features.KeyedTensor)
        assert found.keys == ["user", "friends", "item@articles", "item@item"]
        assert found.length_per_key == [8, 8, 4, 16]
        torch.testing.assert_close(found.values, wanted, rtol=0, atol=0)
        for result, step in ((wanted, of_known), (found.values, of_ours)):
            result.sin().sum().backward()
            step.step()
            step.zero_grad()
    torch.testing.assert_close(dict(ours.state_dict()), dict(known.state_dict()), rtol=0, atol=0)
    close(ours)


def test_all_tables_are_committed_together(drive: Path) -> None:
    ours = on_disk(drive, optimizer=RowWiseAdagrad)
    optimizer = RowOptimizer(ours, lr=0.1)
    optimizer.commit({"position": 1})
    committed = ours(features(1)).values.detach()
    ours(features(1)).values.sum().backward()
    optimizer.step()
    close(ours)  # without a commit
    again = on_disk(drive, optimizer=RowWiseAdagrad)
    assert RowOptimizer(again, lr=0.1).attributes["position"] == 1
    assert len({bag.table.session.epochs.name for bag in again.embedding_bags.values()}) == 1
    torch.testing.assert_close(again(features(1)).values, committed, rtol=0, atol=0)
    close(again)


def test_state_dicts_are_exchanged_with_bags_in_memory(drive: Path) -> None:
    known, ours = InMemory(), on_disk(drive, optimizer=torch.optim.SGD)
    ours.load_state_dict(known.state_dict())
    torch.testing.assert_close(ours(features(2)).values, known(features(2)), rtol=0, atol=0)
    other = InMemory()
    other.load_state_dict(ours.state_dict())
    torch.testing.assert_close(other(features(2)), known(features(2)), rtol=0, atol=0)
    close(ours)


def test_new_rows_are_made_by_the_configuration_and_memory_is_shared_by_size(drive: Path) -> None:
    given = tables()
    given[1].init_fn = lambda rows: rows.fill_(3.0)
    ours = EmbeddingBagCollectionOnDisk(given, path=[drive / "a", drive / "b"], memory_budget=3 << 20)
    items = ours.embedding_bags["articles"].table
    assert bool((items.read(torch.arange(2 * ROWS)) == 3).all())
    assert (drive / "b" / "articles").is_dir()
    assert [bag.table.session.memory_budget for bag in ours.embedding_bags.values()] == [3 << 18, 3 << 18, 3 << 19]
    assert ours.embedding_bag_configs() == given
    assert not ours.is_weighted()
    close(ours)
