"""n-gram tables are read from the safetensors files of a model where they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from deepnvme.tables import RowShards, Table, open_ngram_tables

save_file = pytest.importorskip("safetensors.torch").save_file


@pytest.fixture
def sharded(drive: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model in two files, whose table "ngram.weight" is in three tensors."""
    parts = [torch.randn(count, 8) for count in (30, 1, 50)]
    whole = {"ngram.weight": torch.cat(parts), "bigram.weight": torch.randn(20, 4, dtype=torch.bfloat16)}
    save_file(
        {"ngram.shard_0.weight": parts[0], "ngram.shard_2.weight": parts[2], "norm": torch.ones(8)}, drive / "1.safetensors"
    )
    save_file({"ngram.shard_1.weight": parts[1], "bigram.weight": whole["bigram.weight"]}, drive / "2.safetensors")
    files = {"ngram.shard_0.weight": 1, "ngram.shard_2.weight": 1, "norm": 1, "ngram.shard_1.weight": 2, "bigram.weight": 2}
    index = {"metadata": {}, "weight_map": {name: f"{number}.safetensors" for name, number in files.items()}}
    (drive / "model.safetensors.index.json").write_text(json.dumps(index))
    return drive, whole


def test_a_table_in_several_shards_is_one(sharded: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, whole = sharded
    tables = open_ngram_tables(path)
    assert tables.keys() == whole.keys()
    for name, table in tables.items():
        assert (table.shape, table.dtype) == (tuple(whole[name].shape), whole[name].dtype)
        ids = torch.randint(0, table.rows, (4, 25))
        table.prefetch(ids)
        assert torch.equal(table.read(ids), whole[name][ids])
        assert torch.equal(table.read(torch.arange(table.rows)), whole[name])
        assert table.read(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, table.shape[1])
    table = tables["ngram.weight"]
    assert [table.table_of(row)[1] for row in (0, 29, 30, 31, 80)] == [0, 29, 0, 0, 49]
    assert list(open_ngram_tables(path / "model.safetensors.index.json", "bi.*")) == ["bigram.weight"]
    table.close()


def test_one_file(drive: Path) -> None:
    weight = torch.randn(20, 4)
    save_file({"engram": weight}, drive / "model.safetensors")
    assert torch.equal(open_ngram_tables(drive / "model.safetensors")["engram"].read(torch.tensor(3)), weight[3])


def test_what_is_wrong_is_said(sharded: tuple[Path, dict[str, torch.Tensor]], drive: Path) -> None:
    path, _ = sharded
    table = open_ngram_tables(path)["ngram.weight"]
    for row in (81, -1):
        with pytest.raises(IndexError, match=rf"ids\.flatten\(\)\[1\] is {row}, and the table has the rows 0 to 80"):
            table.read(torch.tensor([0, row]))
        with pytest.raises(IndexError):
            table.table_of(row)
    with pytest.raises(TypeError):
        table.read(torch.tensor([0.5]))
    with pytest.raises(ValueError, match="no table whose name matches"):
        open_ngram_tables(path, "trigram")
    save_file({"ngram.shard_0.weight": torch.zeros(3, 2), "ngram.shard_2.weight": torch.zeros(3, 2)}, drive / "gap.safetensors")
    with pytest.raises(ValueError, match="some are missing"):
        open_ngram_tables(drive / "gap.safetensors")
    with pytest.raises(ValueError, match="same shape and dtype"):
        RowShards([Table.from_tensor(drive / "a", torch.zeros(3, 2)), Table.from_tensor(drive / "b", torch.zeros(3, 3))])
    with pytest.raises(ValueError, match="at least one"):
        RowShards([])
