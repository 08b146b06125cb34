"""Files that others have made are tables without a copy: .npy, tensors of checkpoints, and rows of raw bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import safetensors.torch
import torch

from deepnvme.tables import CorruptTable, Table

VALUES = torch.arange(1000 * 77, dtype=torch.int16).view(1000, 7, 11)
IDS = torch.tensor([[999, 0], [3, 999]])


@pytest.mark.parametrize("values", [VALUES, torch.arange(1000.0)], ids=["rows of two dimensions", "rows of one value"])
def test_an_array_saved_by_numpy(drive: Path, values: torch.Tensor) -> None:
    path = drive / "rows.npy"
    numpy.save(path, values.numpy())
    with Table.open(path) as table:
        assert table.shape == values.shape
        assert torch.equal(table.read(IDS), values[IDS])
        assert torch.equal(table.read(torch.arange(1000)), values)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (numpy.asfortranarray(VALUES[:, 0].numpy()), r"Fortran order.*ascontiguousarray"),
        (numpy.arange(10, dtype=">i4"), "big-endian"),
        (numpy.array(["a", "b"]), "no tensor can have"),
        (numpy.zeros(3, dtype=[("x", "f4")]), "no tensor can have"),
        (numpy.array(3), "no rows"),
        (numpy.zeros((3, 0)), "at least one byte"),
    ],
)
def test_arrays_that_are_no_rows_of_numbers_are_refused_with_the_reason(drive: Path, array: numpy.ndarray, message: str) -> None:
    path = drive / "rows.npy"
    numpy.save(path, array)
    with pytest.raises(ValueError, match=message):
        Table.open(path)


def _safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    safetensors.torch.save_file(tensors, path)


def _pt(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, path)


@pytest.mark.parametrize(("suffix", "save"), [("safetensors", _safetensors), ("pt", _pt)])
def test_a_tensor_of_a_checkpoint(drive: Path, suffix: str, save: Callable[[Path, dict[str, torch.Tensor]], None]) -> None:
    path = drive / f"model.{suffix}"
    save(path, {"other": torch.ones(3), "rows": VALUES, "scalar": torch.tensor(1.0)})
    with Table.open(path, "rows", memory_budget=0) as table:
        assert torch.equal(table.read(IDS), VALUES[IDS])
        assert torch.equal(table.read(torch.arange(1000)), VALUES)
    with pytest.raises(ValueError, match="give the name"):
        Table.open(path)
    with pytest.raises(ValueError, match="no tensor 'nothing'"):
        Table.open(path, "nothing")
    with pytest.raises(ValueError, match="no rows"):
        Table.open(path, "scalar")
    save(path, {"rows": VALUES})
    with Table.open(path) as table:  # the only one needs no name
        assert torch.equal(table.read(IDS), VALUES[IDS])


def test_a_transposed_tensor_of_a_checkpoint_is_refused(drive: Path) -> None:
    torch.save({"rows": VALUES[:, 0].T}, drive / "model.pt")
    with pytest.raises(ValueError, match="contiguous"):
        Table.open(drive / "model.pt")


@pytest.mark.parametrize("offset", [0, 1, 100, 512, 4096, 5000])
@pytest.mark.parametrize("width", [1, 154, 512, 1024])
def test_raw_rows_end_where_the_file_ends(drive: Path, offset: int, width: int) -> None:
    path = drive / "rows.raw"
    content = torch.randint(0, 256, (300, width), dtype=torch.uint8)
    path.write_bytes(b"x" * offset + content.numpy().tobytes())
    with Table.open(path, dtype=torch.uint8, shape=width, offset=offset, memory_budget=0) as table:
        assert len(table) == 300
        assert torch.equal(table.read(torch.tensor([299])), content[299:])  # the last sector alone
        assert torch.equal(table.read(torch.arange(300)), content)


def test_raw_files_need_dtype_and_shape_and_whole_rows(drive: Path) -> None:
    path = drive / "rows.raw"
    path.write_bytes(bytes(100))
    with pytest.raises(ValueError, match="dtype"):
        Table.open(path)
    with pytest.raises(ValueError, match="no whole number of rows"):
        Table.open(path, dtype=torch.float32, shape=3)
    with pytest.raises(ValueError, match="no whole number of rows"):
        Table.open(path, dtype=torch.float32, shape=1, offset=104)
    with pytest.raises(ValueError, match="negative"):
        Table.open(path, dtype=torch.float32, shape=1, offset=-4)
    with pytest.raises(ValueError, match="at least one byte"):
        Table.open(path, dtype=torch.float32, shape=0)


def test_what_is_missing_is_not_found(drive: Path) -> None:
    for name in ("none", "none.npy", "none.safetensors", "none.pt"):
        with pytest.raises(FileNotFoundError):
            Table.open(drive / name)
    with pytest.raises(FileNotFoundError):
        Table.open(drive / "none", dtype=torch.int8, shape=1)
    with pytest.raises(FileNotFoundError):
        Table.open(drive)  # a directory without a table
    for wrong in ([], [drive, drive]):
        with pytest.raises(ValueError, match="a table needs a directory, or several different ones"):
            Table.open(wrong)


def test_such_files_cannot_be_changed(drive: Path) -> None:
    path = drive / "rows.npy"
    numpy.save(path, VALUES.numpy())
    with pytest.raises(ValueError, match="no table whose rows can be changed"):
        Table.open(path, writable=True)
    with Table.open(path) as table, pytest.raises(PermissionError):
        table.write(torch.tensor([0]), VALUES[:1])


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_truncated_files_are_refused(drive: Path, suffix: str) -> None:
    path = drive / f"rows.{suffix}"
    (_safetensors if suffix == "safetensors" else _pt)(path, {"rows": VALUES})
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises((ValueError, OSError)):
        Table.open(path)


@pytest.mark.parametrize("left", [-100, 0, 5, 8, 40, 128])
def test_a_truncated_numpy_file_is_corrupt_wherever_it_ends(drive: Path, left: int) -> None:
    path = drive / "rows.npy"
    numpy.save(path, VALUES.numpy())
    os.truncate(path, left if left >= 0 else path.stat().st_size + left)
    with pytest.raises(CorruptTable) as caught:
        Table.open(path)
    assert caught.value.filename == str(path)


def test_a_numpy_file_of_another_kind_is_corrupt(drive: Path) -> None:
    numpy.savez(drive / "several.npz", VALUES.numpy())
    header = b"{'shape': " + b"(" * 500
    (drive / "nested.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    for path in ((drive / "several.npz").rename(drive / "several.npy"), drive / "nested.npy"):
        with pytest.raises(CorruptTable) as caught:
            Table.open(path)
        assert caught.value.filename == str(path)


def test_what_contradicts_a_file_is_refused(drive: Path) -> None:
    path = drive / "rows.npy"
    numpy.save(path, VALUES.numpy())
    _pt(drive / "rows.pt", {"rows": VALUES})
    for name in ("rows.npy", "rows.pt"):
        for wrong in ({"dtype": torch.int16}, {"shape": 77}, {"dtype": torch.int8, "shape": 154}, {"offset": 128}):
            with pytest.raises(ValueError, match="says itself what its rows are"):
                Table.open(drive / name, **wrong)
    with pytest.raises(ValueError, match="no tensors with names, got name='rows'"):
        Table.open(path, "rows")
    with pytest.raises(ValueError, match="no tensors with names"):
        Table.open(drive / "raw", "rows", dtype=torch.int16, shape=77)


def test_a_file_that_becomes_shorter_while_it_is_open(drive: Path) -> None:
    path = drive / "rows.raw"
    path.write_bytes(VALUES.numpy().tobytes())
    with Table.open(path, dtype=torch.int16, shape=(7, 11), memory_budget=0) as table:
        os.truncate(path, 154 * 500)
        assert torch.equal(table.read(torch.arange(490)), VALUES[:490])
        with pytest.raises(OSError, match="the file no longer has") as caught:
            table.read(torch.arange(1000))
        assert caught.value.filename == str(path)
        assert torch.equal(table.read(torch.arange(490)), VALUES[:490])
