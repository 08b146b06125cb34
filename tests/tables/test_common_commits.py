"""Commits of several tables: all of them are at the same commit after a crash or an error at any point, and go on from there."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.engine import Engine
from deepnvme.nn import EmbeddingOnDisk
from deepnvme.tables import RowOptimizer, Table, writing
from deepnvme.tables.row_optimizer import CommonCommits

TABLES, ROWS = 3, 40
CHANGED = torch.tensor([3, 17, 39])
POINTS = [(call, when) for call in range(3 * TABLES) for when in ("before", "after")]
"""Manifests that are written with a commit, and the moments at which it ends: each table's epoch begins, each is prepared, and
each is committed."""
DECIDES = 2 * TABLES
"""Which of them decides."""


def created(drive: Path) -> list[Path]:
    paths = [drive / f"table{number}" for number in range(TABLES)]
    for path in paths:
        with Table.create(path, ROWS, 4, torch.int64) as table:
            table.commit({"round": 0})
    return paths


@contextlib.contextmanager
def opened(paths: list[Path]) -> Iterator[tuple[list[Table], CommonCommits]]:
    with contextlib.ExitStack() as stack:
        tables = [stack.enter_context(Table.open(path, writable=True)) for path in paths]
        yield tables, CommonCommits(tables)


def change_and_commit(tables: list[Table], commits: CommonCommits, number: int) -> None:
    for table in tables:
        table.write(CHANGED, torch.full((len(CHANGED), 4), number))
    commits.commit([{"round": number} for _ in tables])


def round_of(tables: list[Table]) -> int:
    """Which round all tables are at."""
    numbers = {table.attributes["round"] for table in tables}
    for table in tables:
        rows = table.read(torch.arange(ROWS))
        numbers |= set(rows[CHANGED].flatten().tolist())
        rows[CHANGED] = 0
        assert not rows.any()
    assert len(numbers) == 1
    return int(numbers.pop())


def at_save(monkeypatch: pytest.MonkeyPatch, call: int, when: str, happens: Callable[[], Any]) -> None:
    """Have something happen before or after a manifest is written for the n-th time."""
    save, calls = writing.save_manifest, iter(range(100))

    def patched(*arguments: Any) -> None:
        number = next(calls)
        if (number, when) == (call, "before"):
            happens()
        save(*arguments)
        if (number, when) == (call, "after"):
            happens()

    monkeypatch.setattr(writing, "save_manifest", patched)


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("call", "when"), POINTS)
def test_a_crash_leaves_all_tables_at_the_same_commit(call: int, when: str, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = created(drive)
    child = os.fork()
    if child == 0:
        try:
            with opened(paths) as (tables, commits):
                at_save(monkeypatch, call, when, lambda: os._exit(7))
                change_and_commit(tables, commits, 1)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    decided = (call, when) == (DECIDES, "after") or call > DECIDES
    for _ in range(2):  # who finds them next, and who comes after
        with opened(paths) as (tables, _):
            assert round_of(tables) == decided
    with opened(paths) as (tables, commits):
        change_and_commit(tables, commits, 2)
        assert round_of(tables) == 2
    with opened(paths) as (tables, _):
        assert round_of(tables) == 2


@pytest.mark.parametrize("then", ["commit", "rollback"])
@pytest.mark.parametrize(("call", "when"), POINTS)
def test_an_error_leaves_all_tables_at_the_same_commit(
    call: int, when: str, then: str, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = created(drive)
    with opened(paths) as (tables, commits):
        with monkeypatch.context() as patch:
            at_save(patch, call, when, no_space)
            with pytest.raises(OSError, match="No space"):
                change_and_commit(tables, commits, 1)
        if then == "commit":
            commits.commit([{"round": 1} for _ in tables])
        else:
            commits.rollback()
        expected = then == "commit" or call > DECIDES
        assert round_of(tables) == expected
    with opened(paths) as (tables, commits):
        assert round_of(tables) == expected
        change_and_commit(tables, commits, 2)
    with opened(paths) as (tables, _):
        assert round_of(tables) == 2


def test_a_prepared_commit_is_void_once_a_row_was_changed_by_someone_else(drive: Path) -> None:
    paths = created(drive)
    with opened(paths) as (tables, _):
        for table in tables:
            table.write(CHANGED, torch.ones(len(CHANGED), 4, dtype=torch.int64))
        for table in tables:
            with table.session.lock:
                table.session.writer_here().prepare("of all", {"round": 1})
        with tables[0].session.lock:
            tables[0].session.writer_here().commit({"round": 1}, "of all")
    with Table.open(paths[1], writable=True) as alone:
        alone.write(torch.tensor([0]), torch.full((1, 4), 9))
        alone.commit({"round": 0})
    with opened(paths) as (tables, _):
        assert [table.attributes["round"] for table in tables] == [1, 0, 1]
        changed = tables[1].read(torch.tensor([0, 3]))
        assert changed[:, 0].tolist() == [9, 0]


def test_a_training_waits_for_its_commit_to_be_finished(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bags = [EmbeddingOnDisk(ROWS, 4, path=drive / name, optimizer=torch.optim.SGD) for name in ("a", "b")]
    optimizer = RowOptimizer(torch.nn.ModuleList(bags), lr=1.0)
    before = [bag(CHANGED).detach() for bag in bags]

    def step() -> None:
        for bag in bags:
            bag(CHANGED).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with monkeypatch.context() as patch:
        at_save(patch, 4 + 1, "before", no_space)  # after the two epochs, both prepared and the first committed
        with pytest.raises(OSError, match="No space"):
            optimizer.commit({"steps": 1})
        patch.setattr(writing, "save_manifest", lambda *_: no_space())
        with pytest.raises(OSError, match="No space"):
            step()
    step()
    optimizer.rollback()
    assert optimizer.attributes == {"steps": 1}
    for bag, values in zip(bags, before, strict=True):
        assert torch.equal(bag(CHANGED), values - 1)


def test_a_decided_commit_is_finished_without_the_drive_being_flushed_again(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = created(drive)
    with opened(paths) as (tables, commits):
        at_save(monkeypatch, DECIDES, "after", lambda: fail_flushes(monkeypatch))
        change_and_commit(tables, commits, 1)
        assert round_of(tables) == 1
        monkeypatch.undo()
        change_and_commit(tables, commits, 2)
    with opened(paths) as (tables, _):
        assert round_of(tables) == 2


def fail_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Engine, "fsync", fsync)
