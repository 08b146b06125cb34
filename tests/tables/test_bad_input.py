"""What no table can do is refused before anything is read or written, and said with its reason."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from deepnvme.tables import CorruptTable, State, Table

from ..support.disks import Disk

VALUES = torch.arange(600.0).view(200, 3)


@pytest.fixture
def table(drive: Path) -> Iterator[Table]:
    with Table.from_tensor(drive / "table", VALUES, updatable=True) as table:
        yield table


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([3, 200, -1]), r"ids\[1\] is 200, and the table has the rows 0 to 199"),
        (torch.tensor([[3, 4], [5, -1]]), r"ids\[1, 1\] is -1"),
        (torch.tensor(1 << 40), r"ids is 1099511627776"),
        (torch.tensor([1 << 63], dtype=torch.uint64), r"ids\[0\] is 9223372036854775808"),
        (torch.tensor([0, 255], dtype=torch.uint8), r"ids\[1\] is 255"),
    ],
)
def test_the_first_id_out_of_range_is_named(table: Table, ids: torch.Tensor, message: str) -> None:
    rows = torch.zeros(*ids.shape, 3)
    for use in (table.read, table.read_async, table.prefetch, lambda ids: table.write(ids, rows)):
        with pytest.raises(IndexError, match=message):
            use(ids)
    assert table.stats().bytes_read == 0
    assert table.stats().changed_rows == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.bfloat16])
def test_ids_are_integers(table: Table, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="ids must be integers"):
        table.read(torch.zeros(3, dtype=dtype))


def test_what_no_table_can_have_is_refused(drive: Path) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        Table.create(drive / "table", 10, (3, 0), torch.float32)
    with pytest.raises(ValueError, match="without dimensions"):
        Table.from_tensor(drive / "table", torch.tensor(1.0))
    with pytest.raises(ValueError, match="int_repr"):
        Table.create(drive / "table", 3, 3, torch.quint8)
    with pytest.raises(ValueError, match="must not have the name 'values'"):  # it would take the place of the rows
        Table.create(drive / "table", 10, 4, torch.float32, states={"values": State(torch.float64, (2,))})
    assert not (drive / "table").exists()


def test_rows_of_another_shape_or_dtype_are_not_written(table: Table) -> None:
    ids = torch.tensor([1, 2])
    for rows in (torch.zeros(3), torch.zeros(1, 3), torch.zeros(2, 3, dtype=torch.float64)):
        with pytest.raises(ValueError, match="rows must have the shape"):
            table.write(ids, rows)
        with pytest.raises(ValueError, match="values must have the shape"):
            table.write_records(ids, {"values": rows})
    with pytest.raises(ValueError, match="momentum"):
        table.write_records(ids, {"momentum": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match="one dimension"):
        table.write_records(ids.view(1, 2), {"values": torch.zeros(1, 2, 3)})
    assert torch.equal(table.read(ids), VALUES[ids])


def test_values_of_another_shape_leave_nothing(drive: Path) -> None:
    with pytest.raises(ValueError, match="must have the shape"):
        Table.create(drive / "table", 10, (3,), torch.float32, values=lambda begin, end: torch.zeros(end - begin, 4))
    assert not (drive / "table").exists()
    with pytest.raises(ZeroDivisionError):
        Table.create(drive / "table", 10, (3,), torch.float32, values=lambda begin, end: torch.zeros(1 // 0))
    assert os.listdir(drive) == []


def test_a_table_is_not_made_over_another(drive: Path) -> None:
    Table.from_tensor(drive / "a", VALUES).close()
    with pytest.raises(FileExistsError, match="there is a table already"):
        Table.create(drive / "a", 5, (3,), torch.float32)
    with Table.open(drive / "a") as table:
        assert torch.equal(table.read(torch.arange(200)), VALUES)


def test_tables_that_are_not_updatable_have_no_writer(drive: Path) -> None:
    Table.from_tensor(drive / "table", VALUES).close()
    with pytest.raises(ValueError, match="updatable=True"):
        Table.open(drive / "table", writable=True)


def test_rows_that_no_table_can_change_are_to_be_copied(drive: Path) -> None:
    numpy.save(drive / "rows.npy", VALUES.numpy())
    Table.from_tensor(drive / "table", VALUES).close()
    for path in (drive / "rows.npy", drive / "table"):
        with Table.open(path) as opened, pytest.raises(PermissionError, match=r"updatable=True") as refused:
            opened.write(torch.tensor([0]), VALUES[:1])
        assert f"the rows of '{path}'" in str(refused.value)
        assert "writable" not in str(refused.value)


def test_a_table_just_made_that_cannot_be_changed_says_why(drive: Path) -> None:
    with Table.from_tensor(drive / "table", VALUES) as made, pytest.raises(PermissionError) as refused:
        made.write(torch.tensor([0]), VALUES[:1])
    assert "the table was made without updatable=True; make it again by Table.from_tensor(" in str(refused.value)


def test_a_reader_changes_nothing(drive: Path, table: Table) -> None:
    table.close()
    with Table.open(drive / "table") as reader:
        for change in (lambda: reader.write(torch.tensor([0]), VALUES[:1]), reader.commit, reader.rollback):
            with pytest.raises(PermissionError, match="writable=True"):
                change()


def test_after_close_everything_is_refused(table: Table) -> None:
    table.close()
    table.close()
    ids = torch.tensor([0])
    for use in (
        lambda: table.read(ids), lambda: table.read_async(ids), lambda: table.prefetch(ids),
        lambda: table.write(ids, VALUES[:1]), table.commit, table.rollback, lambda: table.attributes,
        lambda: table.read_records(ids), lambda: table.write_records(ids, {"values": VALUES[:1]}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="closed"):
            use()


@pytest.mark.parametrize("updatable", [False, True])
def test_a_truncated_table_is_refused(drive: Path, updatable: bool) -> None:
    Table.from_tensor(drive / "table", VALUES, updatable=updatable).close()
    os.truncate(drive / "table" / "rows", 100)
    with pytest.raises(CorruptTable, match="100 bytes") as caught:
        Table.open(drive / "table")
    assert (caught.value.errno, caught.value.filename) == (errno.EBADMSG, str(drive / "table" / "rows"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"kind": "deepnvme table 1"}, "it is 'deepnvme table 1', and this version of the package reads 'deepnvme table 3'"),
        ({"rows": -1}, "its field 'rows' is wrong, Input should be greater than or equal to 0: '"),
        ({"rows": 1 << 70}, "'rows'"),
        ({"committed": "5"}, "'committed'"),
        ({"committed": 1 << 70}, "'committed'"),
        ({"reserved": 1 << 64}, "'reserved'"),
        ({"abandoned": [[1, 1 << 64]]}, r"'abandoned\.0\.1'"),
        ({"abandoned": [[5, 4]], "reserved": 9}, "the abandoned epochs 5 to 4 overlap"),
        ({"abandoned": [[2, 4], [4, 6]], "reserved": 9}, "the abandoned epochs 4 to 6 overlap"),
        ({"abandoned": [[2, 4]], "committed": 3, "reserved": 9}, "2 to 4 overlap, or have the last commit, 3"),
        ({"more": 1}, "'more'"),
        ({"chunk": 5}, "1 directories and the chunk 5"),
        ({"directories": 0}, "'directories'"),
        ({"version_bytes": 1 << 70}, "'version_bytes'"),
        ({"version_bytes": 0}, "version_bytes 0|no whole|row does not fit|and 200 rows need"),
        ({"version_bytes": 16}, "row does not fit"),
        ({"columns": []}, "'columns'"),
        ({"columns": [["values", "quint8", [3]]]}, "not quantized"),
        ({"columns": [["values", "float32", [1 << 62]]]}, "columns"),
        ({"columns": [["values", "float32", [0]]]}, "at least one byte"),
        ({"columns": [["values", "float32", [1 << 61] * 100_000]]}, "at most 64 items"),  # their product would take minutes
        ({"columns": [["values", "float32", [3]], ["values", "float32", [2]]]}, "must not have the name"),
        (b"", "it is no JSON: "),
        (b"{", "it is no JSON: "),
        (b"null", "an object"),
        (b"\xff\xfe", "it is no JSON: "),
    ],
)
@pytest.mark.parametrize("rows", [0, 200])
def test_a_damaged_manifest_is_refused_with_the_reason(
    drive: Path, damage: dict[str, object] | bytes, message: str, rows: int
) -> None:
    Table.create(drive / "table", rows, 3, torch.float32, values=lambda begin, end: VALUES[begin:end]).close()
    path = drive / "table" / "deepnvme-table.json"
    path.write_bytes(damage if isinstance(damage, bytes) else json.dumps(json.loads(path.read_text()) | damage).encode())
    with pytest.raises(CorruptTable, match=message) as caught:
        Table.open(drive / "table", writable=rows == 0)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize("shape", ["(-200, 3)", "(200, -3)", "(-200, -3)", "(-1,)"])
def test_negative_sizes_in_a_header_of_numpy_are_refused(drive: Path, shape: str) -> None:
    numpy.save(drive / "x.npy", VALUES.numpy())
    content = (drive / "x.npy").read_bytes()
    dictionary, padding = b"(200, 3), }", b" " * 10
    assert dictionary + padding in content
    damaged = f"{shape}, }}".encode().ljust(len(dictionary + padding))
    (drive / "x.npy").write_bytes(content.replace(dictionary + padding, damaged))
    with pytest.raises(CorruptTable, match=r"negative|must be positive"):
        Table.open(drive / "x.npy")


@pytest.mark.parametrize("shape", [-1, (-3, -1), (3, -1), 1 << 70])
def test_sizes_that_no_row_can_have_are_refused(drive: Path, shape: int | tuple[int, ...]) -> None:
    VALUES.numpy().tofile(drive / "raw")
    for attempt in (
        lambda: Table.open(drive / "raw", dtype=torch.float32, shape=shape),
        lambda: Table.create(drive / "table", 0, shape, torch.float32),
        lambda: Table.create(drive / "table", 3, 3, torch.float32, states={"sum": State(torch.int8, torch.Size([2, 0, -1]))}),
    ):
        with pytest.raises(ValueError, match=r"negative sizes|may have"):
            attempt()
    assert not (drive / "table").exists()


@pytest.mark.root
def test_a_read_only_drive_is_read_and_not_written(small_disk: Disk) -> None:
    Table.from_tensor(small_disk / "table", VALUES, updatable=True).close()
    assert os.system(f"mount -o remount,ro {small_disk.path}") == 0
    try:
        with Table.open(small_disk / "table") as table:
            assert torch.equal(table.read(torch.arange(200)), VALUES)
        for attempt in (
            lambda: Table.open(small_disk / "table", writable=True),
            lambda: Table.create(small_disk / "other", 5, (3,), torch.float32),
        ):
            with pytest.raises(OSError, match="Errno") as caught:
                attempt()
            assert caught.value.errno == errno.EROFS
    finally:
        os.system(f"mount -o remount,rw {small_disk.path}")


@pytest.mark.root
def test_a_table_that_does_not_fit_leaves_nothing(small_disk: Disk) -> None:
    free = small_disk.bytes_free()
    with pytest.raises(OSError, match="larger drive") as caught:
        Table.create(small_disk / "table", 1 << 20, (64,), torch.float32, states={"sum": State(torch.float32, (64,))})
    assert caught.value.errno == errno.ENOSPC
    assert not (small_disk / "table").exists()
    assert small_disk.bytes_free() == free
