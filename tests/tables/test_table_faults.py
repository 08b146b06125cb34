"""Drives that fail: what can be read is read, what was written is not lost, and the last commit stays."""

from __future__ import annotations

import contextlib
import errno
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme import Engine
from deepnvme.tables import FailedRow, RowsUnreadable, Table

from ..support.faulty_filesystem import FaultyFilesystem

VALUES = torch.arange(4000 * 100, dtype=torch.int32).view(4000, 100)  # rows of 400 bytes
EVERY_ROW = torch.arange(4000)


class BrokenUnits:
    """The future of a transfer of units, some of which cannot be read."""

    def __init__(self, future: Any, path: str, failed: list[int]) -> None:
        self._future, self._path, self._failed = future, path, failed

    def done(self) -> bool:
        return bool(self._future.done())

    def exception(self, timeout: float | None = None) -> OSError | None:
        self._future.exception(timeout)
        error = OSError(errno.EIO, "Input/output error", self._path)
        error.indices = self._failed  # type: ignore[attr-defined]
        return error if self._failed else None


@pytest.fixture
def broken_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of 512 bytes in the second page of the file cannot be read: rows 10 to 20 are in it, of 400 bytes."""
    sound = Engine.gather

    def gather(self: Engine, source: Any, ids: torch.Tensor, out: torch.Tensor, **more: Any) -> Any:
        failed = [index for index, unit in enumerate(ids.tolist()) if 8 <= unit < 16]
        return BrokenUnits(sound(self, source, ids, out, **more), source.path, failed)

    monkeypatch.setattr(Engine, "gather", gather)


@pytest.mark.usefixtures("broken_page")
def test_of_a_broken_page_only_its_rows_are_lost(drive: Path) -> None:
    with Table.from_tensor(drive / "table", VALUES) as table:
        ids = torch.tensor([3999, 12, 0, 12, 40, 20, 11])
        out = torch.zeros(7, 100, dtype=torch.int32)
        with pytest.raises(RowsUnreadable, match="row 11 at offset 4400, and 2 other rows") as caught:
            table.read(ids, out)
        path = str(drive / "table" / "rows")
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, path)
        assert caught.value.failed == tuple(FailedRow(row, path, row * 400) for row in (11, 12, 20))
        assert torch.equal(out[[0, 2, 4]], VALUES[[3999, 0, 40]])


@pytest.mark.usefixtures("broken_page")
def test_prefetched_rows_raise_when_they_are_read(drive: Path) -> None:
    with Table.from_tensor(drive / "table", VALUES) as table:
        table.prefetch(EVERY_ROW[:100])
        future = table.read_async(EVERY_ROW[:100])
        for read in (lambda: table.read(EVERY_ROW[:100]), future.result, future.result):
            with pytest.raises(RowsUnreadable) as caught:
                read()
            assert [each.row for each in caught.value.failed] == list(range(10, 21))
        assert torch.equal(table.read(EVERY_ROW[50:]), VALUES[50:])


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("budget", [0, 1 << 20, 64 << 20])
def test_writes_that_fail_are_raised_and_lose_nothing(direct_disk: FaultyFilesystem, error: int, budget: int) -> None:
    ids = EVERY_ROW[:1000]
    with Table.from_tensor(direct_disk / "table", VALUES[:1000], updatable=True, memory_budget=budget) as table:
        written = 0

        def write_all() -> None:
            nonlocal written
            for begin in range(0, 1000, 10):
                table.write(ids[begin : begin + 10], VALUES[begin : begin + 10] + 1)
                written = begin + 10
            table.commit()

        direct_disk.fail("write", error, times=-1, name="rows")
        with pytest.raises(OSError, match="Errno") as caught:
            write_all()
        assert caught.value.errno == error
        with pytest.raises(OSError, match="Errno"):
            table.commit()
        found = table.read(ids)
        assert torch.equal(found[:written], VALUES[:written] + 1)
        direct_disk.heal()
        for _ in range(100):  # a write may still say that an earlier one has failed
            with contextlib.suppress(OSError):
                table.write(ids[written:], VALUES[written:1000] + 1)
                break
        table.commit()
    with Table.open(direct_disk / "table") as table:
        assert torch.equal(table.read(ids), VALUES[:1000] + 1)
    caught.value.__traceback__ = None
    del caught
    gc.collect()


@pytest.mark.parametrize("operation", ["create", "write", "fsync", "rename", "fsyncdir"])
def test_a_full_drive_at_commit_leaves_the_last_one_and_the_changes(direct_disk: FaultyFilesystem, operation: str) -> None:
    ids = EVERY_ROW[:200]
    name = "*" if operation == "fsyncdir" else "deepnvme-table*"
    with Table.from_tensor(direct_disk / "table", VALUES[:200], updatable=True, memory_budget=0) as table:
        table.write(ids, VALUES[:200] + 1)
        table.commit()
        for turn in (2, 3):
            table.write(ids, VALUES[:200] + turn)
            direct_disk.fail(operation, errno.ENOSPC, times=1, name=name)
            with pytest.raises(OSError, match="Errno") as caught:
                table.commit({"turn": turn})
            assert caught.value.errno == errno.ENOSPC
            caught.value.__traceback__ = None
            assert direct_disk.heal() == [f"{operation}:ENOSPC"]
            assert torch.equal(table.read(ids), VALUES[:200] + turn)
            table.write(ids[:100], VALUES[:100] - turn)
            expected = torch.cat([VALUES[:100] - turn, VALUES[100:200] + turn])
            table.commit({"turn": turn})
            assert torch.equal(table.read(ids), expected)
    with Table.open(direct_disk / "table") as reader:
        assert torch.equal(reader.read(ids), expected)
        assert reader.attributes == {"turn": 3}
    del caught
    gc.collect()


@pytest.mark.parametrize("then", ["close", "rollback"])
def test_a_commit_that_may_be_in_force_is_whole(direct_disk: FaultyFilesystem, then: str) -> None:
    """Its manifest is there, and only the flush of its name has failed. What is written next must not be a part of it."""
    ids = EVERY_ROW[:200]
    with Table.from_tensor(direct_disk / "table", VALUES[:200], updatable=True, memory_budget=0) as table:
        table.write(ids, VALUES[:200] + 1)
        direct_disk.fail("fsyncdir", times=1)
        with pytest.raises(OSError, match="Errno") as caught:
            table.commit()
        caught.value.__traceback__ = None
        expected = VALUES[:200] + 1
        if then == "rollback":
            table.rollback()
            expected = VALUES[:200]
        table.write(ids, VALUES[:200] + 2)  # some of it is written
        assert table.stats().rows_written > 200
        if then == "close":
            expected = VALUES[:200]  # the commit before, since nobody has said that this one is
    with Table.open(direct_disk / "table", writable=True) as table:
        assert torch.equal(table.read(ids), expected)
    del caught
    gc.collect()


def test_after_a_flush_that_failed_nothing_is_committed_until_rollback(direct_disk: FaultyFilesystem) -> None:
    ids = EVERY_ROW[:200]
    with Table.from_tensor(direct_disk / "table", VALUES[:200], updatable=True, memory_budget=0) as table:
        table.write(ids, VALUES[:200] + 1)
        direct_disk.fail("fsync", times=1, name="rows")
        for _ in range(3):  # a second flush would not say what the first has lost
            with pytest.raises(OSError, match="Errno") as caught:
                table.commit()
            assert caught.value.errno == errno.EIO
        caught.value.__traceback__ = None
        table.rollback()
        assert torch.equal(table.read(ids), VALUES[:200])
        table.write(ids, VALUES[:200] + 2)
        table.commit()
    with Table.open(direct_disk / "table") as table:
        assert torch.equal(table.read(ids), VALUES[:200] + 2)
    del caught
    gc.collect()


@pytest.mark.parametrize("operation", ["create", "write", "fsync", "rename", "fsyncdir", "fallocate"])
def test_a_table_that_cannot_be_made_leaves_nothing(direct_disk: FaultyFilesystem, operation: str) -> None:
    skip = 0
    while True:
        direct_disk.fail(operation, errno.ENOSPC, skip=skip, times=1)
        with contextlib.suppress(OSError):
            Table.from_tensor(direct_disk / "table", VALUES, updatable=True).close()
        met = direct_disk.heal()
        if not met:
            break
        gc.collect()
        if not (direct_disk / "table" / "deepnvme-table.json").exists():
            assert not (direct_disk / "table" / "rows").exists()
        else:  # only the flush of its name has failed, or the name of who locks it was not written
            for path in (direct_disk / "table").iterdir():
                path.unlink()
        skip += 1
    assert skip > 0
    with Table.open(direct_disk / "table") as table:
        assert torch.equal(table.read(EVERY_ROW), VALUES)


def test_a_table_is_closed_though_its_files_cannot_be(direct_disk: FaultyFilesystem) -> None:
    table = Table.from_tensor(direct_disk / "table", VALUES, updatable=True)
    direct_disk.fail("flush", times=-1)
    try:
        table.close()
    except OSError as error:
        error.__traceback__ = None
    direct_disk.heal()
    table.close()
    Table.open(direct_disk / "table", writable=True).close()  # nobody has its lock


def test_reads_that_failed_for_a_while_go_on(direct_disk: FaultyFilesystem) -> None:
    with Table.from_tensor(direct_disk / "table", VALUES, memory_budget=0) as table:
        for _ in range(3):
            direct_disk.fail("read", times=-1, name="rows")
            for _ in range(40):  # more than there are parts of staging memory
                with pytest.raises(RowsUnreadable) as caught:
                    table.read(EVERY_ROW[::500])
                assert caught.value.errno == errno.EIO
            caught.value.__traceback__ = None
            direct_disk.heal()
            assert torch.equal(table.read(EVERY_ROW), VALUES)
    del caught
    gc.collect()
