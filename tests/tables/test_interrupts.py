"""Ctrl-C at many points of what a table does: it works afterwards, and has lost nothing."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepnvme.tables import Table

from ..faults.torture.interruption import Interruption

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

ROWS, WIDTH = 300, 130
IDS = torch.arange(ROWS)


def rows_of(number: int) -> torch.Tensor:
    return torch.full((ROWS, WIDTH), number)


def points_of(operation: Callable[[], object]) -> int:
    with Interruption(0) as counted:
        operation()
    return counted.passed


def interrupted(number: int, operation: Callable[[], object]) -> bool:
    """Run it with Ctrl-C at that point. Returns whether it was interrupted."""
    with contextlib.suppress(KeyboardInterrupt), Interruption(number):
        operation()
        return False
    return True


def _reads(drive: Path, points: int, updatable: bool = False) -> None:
    values = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH)
    with Table.from_tensor([drive / "a", drive / "b"], values, updatable=updatable, memory_budget=64 << 10) as table:
        generator = random.Random(2)

        def use() -> None:
            table.prefetch(IDS[:200])
            future = table.read_async(IDS[::3])
            table.read(IDS[::2])
            future.result()
            table.pin(IDS[:20])
            table.unpin()

        count = points_of(use)
        for _ in range(points):
            out = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
            interrupted(generator.randrange(1, count + 1), use)
            if interrupted(generator.randrange(1, count + 1), lambda out=out: table.read(IDS, out)):  # type: ignore[misc]
                out.zero_()  # used for something else
                assert torch.equal(table.read(IDS), values)
                assert not out.any(), "rows came to memory that was given for a read that was interrupted"
            assert torch.equal(table.read(IDS), values)


def _changes(drive: Path, points: int) -> None:
    with Table.from_tensor([drive / "a", drive / "b"], rows_of(1), updatable=True, memory_budget=0) as table:
        generator = random.Random(3)
        committed = number = 1

        def commit() -> None:
            table.write(IDS, rows_of(number))
            table.commit({"number": number})

        number = 2
        count = points_of(commit)
        committed = number
        for turn in range(points):
            number += 1
            interrupted(generator.randrange(1, count + 1), commit)
            with Table.open(drive / "a") as reader:  # as after a crash
                found = torch.unique(reader.read(IDS)).tolist()
                assert found in ([committed], [number]), (turn, found)
                assert reader.attributes["number"] == found[0]
                # What is there may be in force, though the writer has not heard of it.
            if turn % 3 == 0:
                interrupted(generator.randrange(1, count + 1), table.rollback)
                table.rollback()
                assert torch.unique(table.read(IDS)).tolist() in ([committed], [number])
                committed = int(table.read(IDS[:1])[0, 0])
            elif turn % 3 == 1:
                table.write(IDS[::2], rows_of(-number)[::2])
                assert table.read(IDS[::2]).eq(-number).all()
                table.write(IDS, rows_of(number))
                table.commit({"number": number})
                committed = number
            else:
                table.write(IDS, rows_of(number))
                assert torch.unique(table.read(IDS)).tolist() == [number]
                table.commit({"number": number})
                committed = number
            with Table.open(drive / "a") as reader:
                assert torch.unique(reader.read(IDS)).tolist() == [committed]
        gc.collect()


def _readers(drive: Path, points: int) -> None:
    with (
        Table.from_tensor(drive / "table", rows_of(1), updatable=True, memory_budget=1 << 20) as writer,
        Table.open(drive / "table") as reader,
    ):
        count = points_of(lambda: reader.read(IDS))
        generator = random.Random(4)
        for number in range(2, points + 2):
            writer.write(IDS, rows_of(number))
            writer.commit()
            interrupted(generator.randrange(1, 2 * count), lambda: reader.read(IDS))
            assert torch.unique(reader.read(IDS)).tolist() == [number], "a reader has missed a commit"


def _openings(drive: Path, points: int) -> None:
    values = rows_of(5)

    def create() -> None:
        Table.from_tensor([drive / "a", drive / "b"], values, updatable=True).close()

    count = points_of(create)
    generator = random.Random(5)
    for _ in range(points):
        if (drive / "a" / "deepnvme-table.json").exists():
            with contextlib.suppress(KeyboardInterrupt), Interruption(generator.randrange(1, count)):
                Table.open(drive / "a", writable=True).close()
            gc.collect()
            with Table.open(drive / "a", writable=True) as table:
                assert torch.equal(table.read(IDS), values)
            for path in [*(drive / "a").iterdir(), *(drive / "b").iterdir()]:
                path.unlink()
        interrupted(generator.randrange(1, count + 1), create)
        gc.collect()


def _updatable_reads(drive: Path, points: int) -> None:
    _reads(drive, points, updatable=True)


CASES = {"reads": _reads, "updatable reads": _updatable_reads, "changes": _changes, "readers": _readers, "openings": _openings}


@pytest.mark.parametrize("case", CASES)
def test_a_table_works_after_ctrl_c(drive: Path, case: str) -> None:
    CASES[case](drive, 6)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_table_works_after_ctrl_c_at_many_points(drive: Path, case: str) -> None:
    CASES[case](drive, 40)
