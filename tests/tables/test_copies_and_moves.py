"""A table that was copied or moved is opened by all its directories. What does not belong together is refused, and unchanged."""

from __future__ import annotations

import json
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


def change(directories: Path | Sequence[Path], value: int) -> None:
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


def test_a_copy_opened_by_its_first_directory_does_not_write_into_the_original(original: list[Path]) -> None:
    copies = copied(original, "copy")
    refused(copies[0], copies[0], "was copied or moved", "Give all 3", original[0])
    change(copies, -1)
    check(original[0], ROWS)
    change(original[0], -2)
    check(copies[0], torch.full_like(ROWS, -1))  # whose manifest knows by now where it is
    check(original[0], torch.full_like(ROWS, -2))


def test_a_moved_table_is_opened_by_all_directories(original: list[Path]) -> None:
    moved = [each.rename(each.with_name(f"moved {each.name}")) for each in original]
    refused(moved[0], moved[0], "was copied or moved")
    check(moved, ROWS)
    change(moved, 5)
    check(moved[0], torch.full_like(ROWS, 5))


@pytest.mark.parametrize("rows", [70, 20_000])
@pytest.mark.parametrize("updatable", [False, True])
def test_another_order_is_refused(drive: Path, updatable: bool, rows: int) -> None:
    """Also where the files have different sizes."""
    directories = [drive / name for name in "abc"]
    Table.from_tensor(directories, ROWS[:rows], updatable=updatable).close()
    first, second, third = (each.rename(each.with_name(f"moved {each.name}")) for each in directories)
    with pytest.raises(ValueError, match=f"'{third}' is directory 2 .from 0. of its table, and was given as directory 1"):
        Table.open([first, third, second])
    with pytest.raises(FileNotFoundError):
        Table.open([second, first, third])
    with Table.open([first, second, third]) as table:
        assert torch.equal(table.read(EVERY[:rows]), ROWS[:rows])


@pytest.mark.parametrize("places", [(1, 2, 0), (0, 2, 1)], ids=str)
def test_directories_that_have_exchanged_places_are_opened_in_the_order_of_the_table(
    original: list[Path], places: tuple[int, ...]
) -> None:
    """As when drives are mounted the other way round."""
    for each in original:
        each.rename(each.with_name(f"away {each.name}"))
    now = [original[place] for place in places]
    for each, place in zip(original, now, strict=True):
        each.with_name(f"away {each.name}").rename(place)
    if places[0] != 0:
        refused(now[0], now[0], "was copied or moved")
    check(now, ROWS)
    change(now, -1)
    check(now[0], torch.full_like(ROWS, -1))


def test_directories_of_a_table_and_of_its_copy_are_not_mixed(original: list[Path]) -> None:
    """Neither before one of them is changed, nor after."""
    copies = copied(original, "copy")
    mixtures = [[copies[0], *original[1:]], [original[0], copies[1], original[2]], [*copies[:2], original[2]]]
    for value in (None, 1, 2):
        for mixture in mixtures:
            refused(mixture, "give")
        if value is not None:
            change(copies if value == 1 else original, value)
    check(copies, torch.full_like(ROWS, 1))
    check(original, torch.full_like(ROWS, 2))


def test_copies_of_different_times_are_not_mixed(original: list[Path]) -> None:
    monday = copied(original, "monday")
    change(original[0], 1)
    tuesday = copied(original, "tuesday")
    refused([monday[0], *tuesday[1:]], tuesday[1], monday[0], "copied or moved together")
    refused([tuesday[0], tuesday[1], monday[2]], monday[2], tuesday[0])
    check(monday, ROWS)
    check(tuesday, torch.full_like(ROWS, 1))


def test_one_directory_is_moved_to_another_drive(original: list[Path]) -> None:
    copy = original[1].with_name("new drive")
    shutil.copytree(original[1], copy)
    moved = [original[0], copy, original[2]]
    refused(moved, copy, original[1], "move", original[1], "away")
    shutil.rmtree(original[1])
    with pytest.raises(FileNotFoundError, match=f"'{original[0]}' is not where it was.*give all 3") as missing:
        Table.open(original[0])
    assert missing.value.filename == str(original[1])
    change(moved, 7)
    check(original[0], torch.full_like(ROWS, 7))


def test_a_link_to_where_it_was_is_no_move(original: list[Path]) -> None:
    link = original[0].with_name("link")
    link.symlink_to(original[0])
    check(link, ROWS)


def test_a_table_of_one_directory_is_opened_anywhere(drive: Path) -> None:
    Table.from_tensor(drive / "a", ROWS, updatable=True).close()
    shutil.copytree(drive / "a", drive / "b")
    change(drive / "b", 1)
    check(drive / "a", ROWS)
    check((drive / "b").rename(drive / "c"), torch.full_like(ROWS, 1))


def test_rows_of_another_table_are_refused(original: list[Path], drive: Path) -> None:
    others = [drive / name for name in ("d", "e", "f")]
    Table.from_tensor(others, -ROWS, updatable=True).close()
    shutil.copy(others[1] / "rows", original[1] / "rows")
    refused(original[0], original[1], "another table")


@pytest.mark.parametrize("committed", [False, True])
def test_a_writer_that_ended_in_its_first_commit_leaves_a_table_that_is_opened(original: list[Path], committed: bool) -> None:
    for value in range(2):
        table = Table.open(original[0], writable=True, memory_budget=0)
        table.write(EVERY, torch.full_like(ROWS, value))  # more than memory has room for: some is written
        if committed:
            with table.session.lock:
                table.session.writer_here().prepare("common", {})
        table.close()
        assert json.loads((original[0] / "deepnvme-table.json").read_text())["previous"]
        check(original, ROWS)
    change(original, 3)
    assert json.loads((original[0] / "deepnvme-table.json").read_text())["previous"] == []
    check(original, torch.full_like(ROWS, 3))


def test_copies_made_after_a_writer_that_did_not_commit_are_not_mixed_later(original: list[Path]) -> None:
    with Table.open(original[0], writable=True, memory_budget=0) as table:
        table.write(EVERY, -ROWS)
    copies = copied(original, "copy")
    change(original[0], 1)
    refused([copies[0], *original[1:]], original[1], copies[0])
    refused([original[0], *copies[1:]], copies[1])
    check(copies, ROWS)


def test_readers_go_on_while_a_writer_gives_the_table_a_new_identity(original: list[Path]) -> None:
    with Table.open(original[0]) as reader:
        for value in range(3):
            change(original[0], value)
            check(original[0], torch.full_like(ROWS, value))
            assert torch.equal(reader.read(EVERY), torch.full_like(ROWS, value))
