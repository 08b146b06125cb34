"""A table over several directories is opened by all of them, wherever they are. What does not belong together is refused."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from deepnvme.tables import Table

from ..support.files import copied

ROWS = torch.arange(200_000).view(-1, 10)
EVERY = torch.arange(len(ROWS))


@pytest.fixture
def original(drive: Path) -> list[Path]:
    directories = [drive / name for name in ("a", "b", "c")]
    Table.from_tensor(directories, ROWS, updatable=True).close()
    return directories


def change(directories: Sequence[Path], value: int) -> None:
    with Table.open(directories, writable=True) as table:
        table.write(EVERY, torch.full_like(ROWS, value))
        table.commit()


def check(directories: Path | Sequence[Path], rows: torch.Tensor) -> None:
    with Table.open(directories) as table:
        assert torch.equal(table.read(EVERY), rows)


def refused(directories: Path | Sequence[Path], *named: Path | str) -> None:
    """Opening them raises an error that names what is wrong, to be read and to be written."""
    for writable in (False, True):
        with pytest.raises(ValueError, match=".*".join(re.escape(str(each)) for each in named)):
            Table.open(directories, writable=writable)


def test_all_directories_are_given_in_the_order_of_the_table(original: list[Path]) -> None:
    first, second, third = original
    refused(first, first, "has 3 directories, got 1: give all")
    refused([first, third, second], third, "is not directory 1", first)
    with pytest.raises(FileNotFoundError, match=re.escape(str(second))):
        Table.open([second, first, third])
    check(original, ROWS)


def test_a_table_is_opened_where_it_was_copied_or_moved(original: list[Path], drive: Path) -> None:
    copies = copied(original, "copy")
    change(copies, -1)
    check(original, ROWS)
    moved = [copies[0], shutil.copytree(copies[1], drive / "new drive"), copies[2].rename(drive / "moved")]
    check(moved, torch.full_like(ROWS, -1))


def test_directories_of_tables_that_have_changed_are_not_mixed(original: list[Path]) -> None:
    """Those of a table and its copy, of copies from different times, and of different tables."""
    monday = copied(original, "monday")
    change(original, 1)
    tuesday = copied(original, "tuesday")
    change(original, 2)
    for ours, theirs in ((monday, original), (tuesday, original), (monday, tuesday), (tuesday, monday)):
        refused([ours[0], theirs[1], ours[2]], theirs[1], "as it is now", "copied or moved together")
    others = [each.with_name(f"other {each.name}") for each in original]
    Table.from_tensor(others, -ROWS, updatable=True).close()
    refused([*original[:2], others[2]], others[2], original[0])
    for directories, rows in ((monday, ROWS), (tuesday, torch.full_like(ROWS, 1)), (original, torch.full_like(ROWS, 2))):
        check(directories, rows)


@pytest.mark.parametrize("committed", [False, True])
def test_copies_made_after_a_writer_that_did_not_commit_are_not_mixed_later(original: list[Path], committed: bool) -> None:
    with Table.open(original, writable=True, memory_budget=0) as table:
        table.write(EVERY, -ROWS)  # more than memory has room for: some is written
        if committed:
            with table.session.lock:
                table.session.writer_here().prepare("common", {})
    copies = copied(original, "copy")
    change(original, 1)
    refused([copies[0], *original[1:]], original[1], copies[0])
    refused([original[0], *copies[1:]], copies[1])
    check(copies, ROWS)


@pytest.mark.parametrize("written", range(5))
def test_a_crash_while_the_identity_is_changed_leaves_the_table(
    written: int, original: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two memberships with both identities, the manifest, and the memberships without the former one."""
    copies = copied(original, "copy")
    calls = iter(range(100))

    def crash(path: Path, data: bytes) -> None:
        if next(calls) == written:
            raise KeyboardInterrupt
        path.write_bytes(data)

    with monkeypatch.context() as patch, Table.open(original, writable=True, memory_budget=0) as table:
        for module in ("deepnvme.files.identity", "deepnvme.tables.manifest"):
            patch.setattr(f"{module}.replace_durably", crash)
        with pytest.raises(KeyboardInterrupt):
            table.write(EVERY, -ROWS)
        table.session._release()  # as a process that ends
    check(original, ROWS)
    change(original, 3)
    refused([copies[0], *original[1:]], original[1], copies[0])
    check(original, torch.full_like(ROWS, 3))
    assert json.loads((original[1] / "deepnvme-table.member.json").read_text())["previous"] == ""


def test_a_manifest_that_may_be_in_force_and_then_fails_leaves_the_table(
    original: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the identity is changed, the manifest is replaced, with an error nevertheless; later it is not."""
    calls = iter(range(100))

    def fail(path: Path, data: bytes) -> None:
        if next(calls) == 0:
            path.write_bytes(data)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch, Table.open(original, writable=True) as table:
        patch.setattr("deepnvme.tables.manifest.replace_durably", fail)
        for _ in range(3):
            table.write(EVERY[:5], -ROWS[:5])
            with pytest.raises(OSError, match="Input/output error"):
                table.commit()
    check(original, ROWS)
