"""Rows in FP8 are read with their scales: the values are those of the whole tensor, dequantised by torch."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from deepnvme.nn import EmbeddingOnDisk
from deepnvme.tables import RowScales, Table

from ..support.fp8 import dequantized, quantized

ROWS, COLUMNS = 1000, 77
IDS = torch.tensor([[999, 0], [3, 999], [127, 128]])


def made(path: Path, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Save a table of random rows in FP8; return its rows, and the scales."""
    torch.manual_seed(0)
    codes, scales = quantized(torch.randn(ROWS, COLUMNS) * torch.rand(ROWS, 1), block)
    codes.view(torch.uint8)[3] = torch.arange(COLUMNS) + 90  # NaN among them
    safetensors.torch.save_file({"rows": codes, "rows_scale_inv": scales}, path)
    return codes, scales


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found.nan_to_num(nan=7), expected.nan_to_num(nan=7))


@pytest.fixture
def path(drive: Path) -> Path:
    return drive / "rows.safetensors"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("block", [(128, 128), (16, 24), (1, 1000), (1000, 1000), (1, 32)])
def test_rows_are_those_of_the_dequantised_tensor(block: tuple[int, int], dtype: torch.dtype, path: Path) -> None:
    codes, scales = made(path, block)
    values = dequantized(codes, scales, block, dtype)
    with Table.open(path, "rows", scales=RowScales(scales, dtype, block=block), memory_budget="20KiB") as table:
        assert (table.shape, table.dtype, table.nbytes) == ((ROWS, COLUMNS), dtype, ROWS * COLUMNS)
        for ids in (IDS, torch.arange(ROWS), IDS[:0], torch.tensor(5), torch.randint(ROWS, (3000,))):
            assert_same(table.read(ids), values[ids])
            table.prefetch(ids)
            assert_same(table.read_async(ids).result(), values[ids])
        future = table.read_async(IDS)
        assert future.result() is future.result()


def test_rows_are_dequantised_to_where_the_caller_wants_them(path: Path) -> None:
    codes, scales = made(path, (128, 128))
    values = dequantized(codes, scales, (128, 128), torch.bfloat16)
    with Table.open(path, "rows", scales=RowScales(scales)) as table:
        for out in (torch.empty(2, 3, COLUMNS, dtype=torch.bfloat16), torch.empty(3, 2, COLUMNS, dtype=torch.bfloat16)):
            here = out if out.shape[0] == 3 else out.transpose(0, 1)
            assert table.read(IDS, out=here) is here
            assert_same(here, values[IDS])
        with pytest.raises(TypeError, match=r"dtype torch\.bfloat16, got torch\.float8_e4m3fn"):
            table.read(IDS, out=torch.empty(3, 2, COLUMNS).to(torch.float8_e4m3fn))


def test_an_embedding_of_rows_in_fp8_and_another_process(path: Path) -> None:
    codes, scales = made(path, (128, 128))
    values = dequantized(codes, scales, (128, 128), torch.bfloat16)
    with Table.open(path, "rows", scales=RowScales(scales)) as table:
        assert_same(EmbeddingOnDisk.from_pretrained(table)(IDS), values[IDS])
        with pickle.loads(pickle.dumps(table)) as again:
            assert_same(again.read(IDS), values[IDS])


def test_raw_rows_and_one_scale(drive: Path) -> None:
    codes, _ = made(drive / "rows.safetensors", (128, 128))
    codes.view(torch.uint8).numpy().tofile(drive / "rows.bin")
    scale = torch.tensor([0.3], dtype=torch.bfloat16)  # as in transformers, whose table is multiplied in the dtype of the scale
    with Table.open(drive / "rows.bin", dtype=torch.float8_e4m3fn, shape=COLUMNS, scales=RowScales(scale)) as table:
        assert_same(table.read(IDS), codes[IDS].to(torch.bfloat16) * scale)


def test_scales_that_are_not_those_of_the_rows_are_refused(path: Path, drive: Path) -> None:
    _, scales = made(path, (128, 128))
    wrong: Any
    for name, wrong, text in (
        ("rows", scales.t().contiguous(), r"has scales of shape \(8, 1\) for blocks of 128 x 128.* got the shape \(1, 8\)"),
        ("rows", scales[:7], r"got the shape \(7, 1\)"),
        ("rows_scale_inv", scales, "are for rows of float8_e4m3fn with one dimension, got torch.float32"),
    ):
        with pytest.raises(ValueError, match=text):
            Table.open(path, name, scales=RowScales(wrong))
    Table.from_tensor(drive / "table", torch.zeros(3, 4)).close()
    with pytest.raises(ValueError, match="is a table: scales are for rows that lie in a file"):
        Table.open(drive / "table", scales=RowScales(scales))
    with pytest.raises(TypeError, match=r"dtype is torch\.int8"):
        RowScales(scales, torch.int8)
