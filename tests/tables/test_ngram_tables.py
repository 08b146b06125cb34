"""n-gram tables are read from the safetensors files of a model where they are."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deepnvme import Engine
from deepnvme.tables import RowScales, RowsUnreadable, Table, open_ngram_tables

from ..support.fp8 import dequantized, quantized

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
def opened(*arguments: Any, **more: Any) -> Iterator[dict[str, Table]]:
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
        assert table.stats().rows_read == 81
        with pickle.loads(pickle.dumps(table)) as copy:
            assert torch.equal(copy.read(torch.arange(81)), whole["ngram.weight"])
    with opened(path / "model.safetensors.index.json", "bi.*") as tables:
        assert list(tables) == ["bigram.weight"]


def test_rows_of_many_shards_in_one_file_are_read_by_one_call(drive: Path) -> None:
    """A call for each shard takes longer than the drive. In the file, shards 10 and 11 lie between 1 and 2."""
    parts = [torch.randn(count, 5) for count in range(1, 13)]
    save_file({f"t.shard_{number}": part for number, part in enumerate(parts)}, drive / "t.safetensors")
    whole = torch.cat(parts)
    rows = torch.randperm(len(whole))
    with (
        opened(drive / "t.safetensors") as tables,
        mock.patch.object(Engine, "gather", autospec=True, side_effect=Engine.gather) as gather,
    ):
        assert torch.equal(tables["t"].read(rows), whole[rows])
        assert gather.call_count == 1


def test_shards_in_fp8_are_dequantised_with_the_scales_of_all_rows(drive: Path) -> None:
    codes, scales = quantized(torch.randn(60, 40), (16, 32))
    shards = {f"ngram.shard_{number}.weight": codes[20 * number : 20 * number + 20] for number in range(3)}
    save_file({**shards, "other": codes.clone()}, drive / "fp8.safetensors")
    given = RowScales(scales, torch.float32, block=(16, 32))
    with opened(drive / "fp8.safetensors", scales={"ngram.weight": given}) as tables:
        values = dequantized(codes, scales, (16, 32), torch.float32)
        for table in (tables["ngram.weight"], pickle.loads(pickle.dumps(tables["ngram.weight"]))):
            assert torch.equal(table.read(torch.arange(60)), values)
        assert tables["other"].dtype == torch.float8_e4m3fn
    for wrong, text in (({"ngram": given}, "scales for 'ngram', and no table"), ({"other": RowScales(scales[:2])}, "of shape")):
        with pytest.raises(ValueError, match=text):
            open_ngram_tables(drive / "fp8.safetensors", scales=wrong)


def test_rows_that_cannot_be_read_are_named_with_their_shard(drive: Path) -> None:
    values = torch.arange(3000 * 64, dtype=torch.float32).view(3000, 64)
    for number in range(3):
        shard = values[1000 * number : 1000 * number + 1000].clone()
        save_file({f"t.shard_{number}": shard}, drive / f"{number}.safetensors")
    index = {"metadata": {}, "weight_map": {f"t.shard_{number}": f"{number}.safetensors" for number in range(3)}}
    (drive / "model.safetensors.index.json").write_text(json.dumps(index))
    with opened(drive, memory_budget=0) as tables:
        table = tables["t"]
        for number in (1, 2):
            os.truncate(drive / f"{number}.safetensors", 256 * 500)
        ids = torch.tensor([[2900, 3], [1700, 1100], [2900, 2999]])
        out = torch.zeros(3, 2, 64)
        with pytest.raises(OSError, match="the file no longer has") as caught:
            table.read(ids, out)
        assert caught.value.filename == str(drive / "1.safetensors")


def test_one_allowance_of_memory_is_for_all_tables(sharded: tuple[Path, dict[str, torch.Tensor]]) -> None:
    with opened(sharded[0], staging_bytes=8 << 20, memory_budget=1 << 20) as tables:
        assert [table.staging_bytes for table in tables.values()] == [4 << 20] * 2
        assert sum(table.memory_budget for table in tables.values()) <= 1 << 20


def test_what_is_wrong_is_said(sharded: tuple[Path, dict[str, torch.Tensor]], drive: Path) -> None:
    path, _ = sharded
    with opened(path) as tables:
        table = tables["ngram.weight"]
        for row in (81, -1):
            for read in (table.read, table.read_async, table.prefetch):
                with pytest.raises(IndexError, match=rf"ids\[0, 1\] is {row}, and the table has the rows 0 to 80"):
                    read(torch.tensor([[0, row]]))
        with pytest.raises(TypeError):
            table.read(torch.tensor([0.5]))
    with pytest.raises(ValueError, match="no table whose name matches"):
        open_ngram_tables(path, "trigram")
    save_file({"ngram.shard_0.weight": torch.zeros(3, 2), "ngram.shard_2.weight": torch.zeros(3, 2)}, drive / "gap.safetensors")
    with pytest.raises(ValueError, match="some are missing"):
        open_ngram_tables(drive / "gap.safetensors")
    for name, wrong in (("shape", torch.zeros(3, 3)), ("dtype", torch.zeros(3, 2).half())):
        save_file({"t.part0": torch.zeros(3, 2), "t.part1": wrong}, drive / f"{name}.safetensors")
        with pytest.raises(ValueError, match="same shape and dtype"):
            open_ngram_tables(drive / f"{name}.safetensors")


class BrokenReads:
    """The future of reads of which some fail."""

    def __init__(self, future: Any, path: str, failed: list[int]) -> None:
        self._future, self._path, self._failed = future, path, failed

    def done(self) -> bool:
        return bool(self._future.done())

    def exception(self, timeout: float | None = None) -> OSError:
        self._future.exception(timeout)
        error = OSError(errno.EIO, "Input/output error", self._path)
        error.indices = self._failed  # type: ignore[attr-defined]
        return error


def test_few_rows_of_many_files_are_read_by_one_call(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [torch.randn(61, 40) for _ in range(12)]
    for number, part in enumerate(parts):
        save_file({f"ngram.shard_{number}.weight": part}, drive / f"{number}.safetensors")
    index = {f"ngram.shard_{number}.weight": f"{number}.safetensors" for number in range(12)}
    (drive / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    whole, sound = torch.cat(parts), Engine.read_many
    calls: list[list[str]] = []
    broken: set[str] = set()

    def read_many(self: Engine, tensors: Any, source: Any, offsets: Any) -> Any:
        calls.append([file.path for file in source])
        future = sound(self, tensors, source, offsets)
        failed = [number for number, file in enumerate(source) if file.path in broken]
        return BrokenReads(future, *broken, failed) if failed else future

    monkeypatch.setattr(Engine, "read_many", read_many)
    with opened(drive, memory_budget=0) as tables:
        table = tables["ngram.weight"]
        ids = torch.arange(16).view(2, 8) * 47 % 732
        for some in (ids, torch.tensor([60, 61, 731]), torch.arange(732)):  # the last rows of files end within a sector
            assert torch.equal(table.read(some), whole[some])
        assert [len(set(paths)) for paths in calls] == [12, 3, 12]
        broken.add(str(drive / "2.safetensors"))
        rows = torch.zeros(4, 40)
        with pytest.raises(RowsUnreadable, match="row 130 at offset") as raised:
            table.read(torch.tensor([700, 0, 130, 70]), rows)
        assert [(each.row, each.file) for each in raised.value.failed] == [(130, str(drive / "2.safetensors"))]
        assert torch.equal(rows[[0, 1, 3]], whole[[700, 0, 70]])
        broken.clear()
        os.truncate(drive / "7.safetensors", 0)
        with pytest.raises(RowsUnreadable, match="row 470 at offset") as changed:
            table.read(ids)
        assert (changed.value.errno, changed.value.filename) == (errno.ESTALE, str(drive / "7.safetensors"))
        assert torch.equal(table.read(torch.tensor([3, 100])), whole[[3, 100]])
