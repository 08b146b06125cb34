"""EmbeddingBagCollectionOnDisk beside TorchRec's own collection, with its configurations and features."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepnvme.integrations.torchrec import TESTED, EmbeddingBagCollectionOnDisk
from deepnvme.tables import RowOptimizer

from . import serving

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ROWS, SAMPLES, NAMES = 500, 16, ("user", "friends", "item")


@pytest.fixture(scope="module")
def torchrec(request: pytest.FixtureRequest) -> SimpleNamespace:
    return serving.torchrec(request.config)


def configs(torchrec: SimpleNamespace, pooling: str) -> list[Any]:
    mode = torchrec.PoolingType[pooling]
    return [
        torchrec.EmbeddingBagConfig(
            name="users", num_embeddings=ROWS, embedding_dim=8, feature_names=["user", "friends"], pooling=mode
        ),
        torchrec.EmbeddingBagConfig(name="item", num_embeddings=ROWS, embedding_dim=4, feature_names=["item"], pooling=mode),
        torchrec.EmbeddingBagConfig(name="articles", num_embeddings=ROWS, embedding_dim=16, feature_names=["item"], pooling=mode),
    ]


def features(torchrec: SimpleNamespace, seed: int, weighted: bool) -> Any:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (len(NAMES) * SAMPLES,), generator=generator)
    ids = torch.randint(ROWS // 4, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    return torchrec.KeyedJaggedTensor(list(NAMES), ids, weights, lengths)


@pytest.mark.parametrize(("pooling", "weighted"), [("SUM", False), ("MEAN", False), ("SUM", True)])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
def test_results_and_trained_rows_have_the_bits_of_torchrecs_collection(
    torchrec: SimpleNamespace, drive: Path, pooling: str, weighted: bool, optimizer: Any
) -> None:
    known = torchrec.EmbeddingBagCollection(configs(torchrec, pooling), is_weighted=weighted)
    for bag in known.embedding_bags.values():
        bag.sparse = True
    ours = EmbeddingBagCollectionOnDisk(
        configs(torchrec, pooling), weighted, path=drive, optimizer=optimizer, memory_budget=64 << 10
    )
    assert all(len(rows) == ROWS and bool((rows.abs() <= ROWS**-0.5).all()) for rows in ours.state_dict().values())
    ours.load_state_dict(known.state_dict())
    of_known, of_ours = optimizer(known.parameters(), lr=0.1), RowOptimizer(ours, lr=0.1)
    for seed in range(5):
        batch = features(torchrec, seed, weighted)
        wanted, found = known(batch), ours(batch)
        assert type(found) is type(wanted)
        assert found.keys() == wanted.keys() == ["user", "friends", "item@item", "item@articles"]
        assert found.length_per_key() == wanted.length_per_key()
        torch.testing.assert_close(found.values(), wanted.values(), rtol=0, atol=0)
        for result, step in ((wanted, of_known), (found, of_ours)):
            result["item@articles"].sin().sum().backward(retain_graph=True)
            result.values().cos().sum().backward()
            step.step()
            step.zero_grad()
    torch.testing.assert_close(dict(ours.state_dict()), dict(known.state_dict()), rtol=0, atol=0)
    for bag in ours.embedding_bags.values():
        bag.table.close()


def test_features_with_inverse_indices_are_refused(torchrec: SimpleNamespace, drive: Path) -> None:
    ours = EmbeddingBagCollectionOnDisk(configs(torchrec, "SUM"), path=drive)
    inverse = ["user"], torch.zeros(1, SAMPLES, dtype=torch.int64)
    ids = torch.ones(2, dtype=torch.int64)
    batch = torchrec.KeyedJaggedTensor(["user"], ids, lengths=ids, stride_per_key_per_rank=[[2]], inverse_indices=inverse)
    with pytest.raises(ValueError, match="inverse indices"):
        ours(batch)
    for bag in ours.embedding_bags.values():
        bag.table.close()


def test_the_version_is_the_one_that_the_docs_name(torchrec: SimpleNamespace) -> None:
    assert torchrec.__version__.split("+")[0] == TESTED
