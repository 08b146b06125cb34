"""A commit is whole: after a kill at any time the table is the last commit."""

from __future__ import annotations

import concurrent.futures
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from deepnvme.files.directory_lock import StoreLocked
from deepnvme.tables import Table

from ..support.interpreters import Interpreters

ROWS, WIDTH = 400, 300  # 2400 bytes: versions of several sectors, which can be torn


def commits_in(rows: torch.Tensor) -> list[int]:
    """The numbers of the commits that rows are of: each value is its number."""
    return torch.unique(rows).tolist()


def numbered(path: Path, **more: object) -> Table:
    values = torch.ones(ROWS, WIDTH, dtype=torch.int64)
    return Table.from_tensor(path, values, updatable=True, **more)  # type: ignore[arg-type]


def test_a_table_is_open_to_one_writer_or_to_readers(drive: Path) -> None:
    ids = torch.arange(ROWS)
    with numbered(drive / "table") as writer:
        writer.write(ids, torch.full((ROWS, WIDTH), 2))
        for writable in (False, True):
            with pytest.raises(StoreLocked, match=r"the Table of this process.*commit\(\) what is to be kept"):
                Table.open(drive / "table", writable=writable)
        writer.commit({"number": 2})
    with Table.open(drive / "table") as reader, Table.open(drive / "table") as other:
        for each in (reader, other):
            assert commits_in(each.read(ids)) == [2]
            assert each.attributes == {"number": 2}
        with pytest.raises(StoreLocked, match="is open for reading by the Table of this process"):
            Table.open(drive / "table", writable=True)
        assert commits_in(reader.read(ids)) == [2]
    Table.open(drive / "table", writable=True).close()


def test_threads_of_a_writer_never_read_half_a_row(drive: Path) -> None:
    ids = torch.arange(ROWS)
    stopped = threading.Event()
    with numbered(drive / "table", memory_budget=0) as table, concurrent.futures.ThreadPoolExecutor(1) as pool:

        def read() -> int:
            torn = 0
            while not stopped.is_set():
                future = table.read_async(ids)
                rows = future.result()
                torn += int((rows != rows[:, :1]).any())
            return torn

        reading = pool.submit(read)
        try:
            for number in range(2, 40):
                table.write(ids, torch.full((ROWS, WIDTH), number))
                if number % 3 == 0:
                    table.commit()
        finally:
            stopped.set()
        assert reading.result() == 0


# Writes its number to all rows of each commit, and others to some of the next; says so when it is committed.
_WRITER = """
import random, torch
from deepnvme.tables import Table
generator = random.Random({seed})
ids = torch.arange({rows})
with Table.open({directory!r}, writable=True, memory_budget=generator.choice([0, 128 << 10, 64 << 20])) as table:
    number = table.attributes.get("number", 1)
    assert torch.unique(table.read(ids)).tolist() == [number], "it begins with something else"
    print("ready", flush=True)
    while True:
        number += 1
        table.write(ids, torch.full(({rows}, {width}), number))
        table.commit({{"number": number}})
        print("committed", number, flush=True)
        if generator.random() < 0.3:
            table.write(ids, torch.full(({rows}, {width}), -number))
            table.rollback()
        some = ids[:: generator.randrange(1, 9)]
        table.write(some, torch.full((len(some), {width}), -number))
"""


def kill_writers(interpreters: Interpreters, path: Path, times: int, seed: int) -> None:
    generator = random.Random(seed)
    numbered(path, memory_budget=0).close()
    committed = 1
    for turn in range(times):
        child = interpreters.start(_WRITER.format(directory=str(path), seed=seed + turn, rows=ROWS, width=WIDTH))
        interpreters.wait_for("committed" if turn % 3 == 0 else "ready")
        time.sleep(generator.random() * 0.2)
        os.kill(child, signal.SIGKILL)
        said = interpreters.wait(child)
        assert said.returncode == -signal.SIGKILL, said.stderr
        committed = max(
            [committed, *(int(line.split()[1]) for line in said.stdout.splitlines() if line.startswith("committed "))]
        )
        with Table.open(path) as table:
            found = commits_in(table.read(torch.arange(ROWS)))
            assert found in ([committed], [committed + 1]), "the last commit, or the one that it did not come to say"
            assert table.attributes.get("number", 1) == found[0]
        committed = found[0]
    assert committed > 1


def test_after_a_kill_the_table_is_its_last_commit(interpreters: Interpreters, drive: Path) -> None:
    kill_writers(interpreters, drive / "table", 3, 1)


def test_a_future_that_nobody_asked_knows_that_too_much_was_changed_to_be_remembered(drive: Path) -> None:
    rows = 200_000  # more than RowCache remembers
    with Table.create(drive / "table", rows, 1, torch.int64, memory_budget=1 << 20) as table:
        future = table.read_async(torch.arange(0, rows, 1000))
        for value in (1, 2):
            table.write(torch.arange(rows), torch.full((rows, 1), value))
        table.commit()
        assert set(future.result().flatten().tolist()) <= {0, 2}
        assert (table.read(torch.arange(rows)) == 2).all()
