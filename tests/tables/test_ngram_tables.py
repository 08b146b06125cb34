"""n-gram tables are read from the safetensors files of a model where they are."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.tables import PartialRows, RowsFuture, RowShards, Table, open_ngram_tables

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


@contextlib.contextmanager
def opened(*arguments: Any, **more: Any) -> Iterator[dict[str, RowShards]]:
    """The tables of a model, closed in the end."""
    with contextlib.ExitStack() as stack:
        tables = open_ngram_tables(*arguments, **more)
        for table in tables.values():
            stack.enter_context(table)
        yield tables


def test_a_table_in_several_shards_is_one(sharded: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, whole = sharded
    with opened(path) as tables:
        assert tables.keys() == whole.keys()
        for name, table in tables.items():
            assert (table.shape, table.dtype) == (tuple(whole[name].shape), whole[name].dtype)
            assert (len(table), table.nbytes) == (len(whole[name]), whole[name].nbytes)
            ids = torch.randint(0, table.rows, (4, 25))
            table.prefetch(ids)
            assert torch.equal(table.read(ids), whole[name][ids])
            assert torch.equal(table.read(torch.arange(table.rows)), whole[name])
            assert table.read(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, table.shape[1])
            assert table.read(torch.tensor(3)).shape == table.row_shape
        table = tables["ngram.weight"]
        assert [table.table_of(row)[1] for row in (0, 29, 30, 31, 80)] == [0, 29, 0, 0, 49]
        assert [stats.rows_read for stats in table.stats()] == [30, 1, 50]
    with opened(path / "model.safetensors.index.json", "bi.*") as tables:
        assert list(tables) == ["bigram.weight"]


def test_rows_are_read_into_what_is_given_and_in_the_background(sharded: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, whole = sharded
    weight = whole["ngram.weight"]
    ids = torch.randint(0, len(weight), (4, 25))
    with opened(path) as tables:
        table = tables["ngram.weight"]
        for out in (torch.empty(4, 25, 8), torch.empty(8, 25, 4).transpose(0, 2), torch.empty(4, 50, 8)[:, ::2]):
            assert table.read(ids, out) is out
            assert torch.equal(out, weight[ids])
            out.zero_()
            future = table.read_async(ids, out)
            assert future.result() is future.result() is out
            assert future.done()
            assert torch.equal(out, weight[ids])
        assert torch.equal(table.read_async(ids).result(), weight[ids])
        for wrong, error in ((torch.empty(4, 25, 8).double(), TypeError), (torch.empty(4, 25, 7), ValueError)):
            with pytest.raises(error, match="out must"):
                table.read(ids, wrong)
        with pytest.raises(ValueError, match="errors must be"):
            table.read(ids, errors="ignore")  # type: ignore[arg-type]


def test_all_tables_are_being_read_before_one_is_waited_for(
    sharded: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for owner, name in ((Table, "read_async"), (RowsFuture, "result")):
        whole = getattr(owner, name)

        def noted(*arguments: Any, name: str = name, whole: Any = whole) -> Any:
            calls.append(name)
            return whole(*arguments)

        monkeypatch.setattr(owner, name, noted)
    with opened(sharded[0], "ngram.*") as tables:
        tables["ngram.weight"].read(torch.tensor([80, 0, 30]))
    assert calls == ["read_async"] * 3 + ["result"] * 3


def test_rows_that_cannot_be_read_are_those_of_all_tables(drive: Path) -> None:
    values = torch.arange(3000 * 64, dtype=torch.float32).view(3000, 64)
    for number in range(3):
        (drive / f"{number}.raw").write_bytes(values[1000 * number : 1000 * number + 1000].numpy().tobytes())
    tables = [Table.open(drive / f"{number}.raw", dtype=torch.float32, shape=64, memory_budget=0) for number in range(3)]
    with RowShards(tables) as table:
        for number in (1, 2):
            os.truncate(drive / f"{number}.raw", 256 * 500)
        ids = torch.tensor([[2900, 3], [1700, 1100], [2900, 2999]])
        with pytest.raises(OSError, match="the file no longer has") as caught:
            table.read(ids)
        assert caught.value.filename == str(drive / "1.raw")
        found = table.read(ids, errors="partial")
        assert isinstance(found, PartialRows)
        assert [each.row for each in found.failed] == [1700, 2900, 2999]
        assert [each.file for each in found.failed] == [str(drive / f"{number}.raw") for number in (1, 2, 2)]
        assert found.positions.tolist() == [0, 2, 4, 5]
        for row in (3, 1100):
            assert torch.equal(found.rows[ids == row][0], values[row])


def test_all_tables_are_closed_also_if_one_fails(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [Table.from_tensor(drive / str(number), torch.zeros(3, 2)) for number in range(3)]
    whole_close = tables[1].close

    def failing() -> None:
        whole_close()
        raise OSError(5, "the drive fails")

    monkeypatch.setattr(tables[1], "close", failing)
    with pytest.raises(OSError, match="the drive fails"):
        RowShards(tables).close()
    for table in tables:
        with pytest.raises(ValueError, match="closed"):
            table.read(torch.tensor([0]))


def test_one_allowance_of_memory_is_for_all_tables(sharded: tuple[Path, dict[str, torch.Tensor]]) -> None:
    with opened(sharded[0], staging_bytes=8 << 20, memory_budget=1 << 20) as tables:
        all_tables = [each for table in tables.values() for each in table.tables]
        assert [each.staging_bytes for each in all_tables] == [2 << 20] * 4
        assert sum(each.memory_budget for each in all_tables) <= 1 << 20


def test_one_file(drive: Path) -> None:
    weight = torch.randn(20, 4)
    save_file({"engram": weight}, drive / "model.safetensors")
    with opened(drive / "model.safetensors") as tables:
        assert torch.equal(tables["engram"].read(torch.tensor(3)), weight[3])


def test_what_is_wrong_is_said(sharded: tuple[Path, dict[str, torch.Tensor]], drive: Path) -> None:
    path, _ = sharded
    with opened(path) as tables:
        table = tables["ngram.weight"]
        for row in (81, -1):
            for read in (table.read, table.read_async, table.prefetch):
                with pytest.raises(IndexError, match=rf"ids\[0, 1\] is {row}, and the table has the rows 0 to 80"):
                    read(torch.tensor([[0, row]]))
            with pytest.raises(IndexError):
                table.table_of(row)
        with pytest.raises(TypeError):
            table.read(torch.tensor([0.5]))
    with pytest.raises(ValueError, match="no table whose name matches"):
        open_ngram_tables(path, "trigram")
    save_file({"ngram.shard_0.weight": torch.zeros(3, 2), "ngram.shard_2.weight": torch.zeros(3, 2)}, drive / "gap.safetensors")
    with pytest.raises(ValueError, match="some are missing"):
        open_ngram_tables(drive / "gap.safetensors")
    with (
        Table.from_tensor(drive / "a", torch.zeros(3, 2)) as a,
        Table.from_tensor(drive / "b", torch.zeros(3, 3)) as b,
        pytest.raises(ValueError, match="same shape and dtype"),
    ):
        RowShards([a, b])
    with pytest.raises(ValueError, match="at least one"):
        RowShards([])
