"""A commit is whole: beside a writer, readers see one commit's rows; after a kill at any time the table is the last commit."""

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

from deepnvme.tables import Table

from ..support.interpreters import Interpreters

ROWS, WIDTH = 400, 300  # 2400 bytes: versions of several sectors, which can be torn


def commits_in(rows: torch.Tensor) -> list[int]:
    """The numbers of the commits that rows are of: each value is its number."""
    return torch.unique(rows).tolist()


def numbered(directories: list[Path], **more: object) -> Table:
    values = torch.ones(ROWS, WIDTH, dtype=torch.int64)
    return Table.from_tensor(directories, values, updatable=True, **more)  # type: ignore[arg-type]


def test_a_reader_sees_the_last_commit_only(drive: Path) -> None:
    ids = torch.arange(ROWS)
    with numbered([drive / "a", drive / "b"], memory_budget=0) as writer, Table.open(drive / "a") as reader:
        for number in range(2, 6):
            reader.pin(ids[:10])
            writer.write(ids, torch.full((ROWS, WIDTH), number))
            assert commits_in(reader.read(ids)) == [number - 1]
            future = reader.read_async(ids)
            writer.commit({"number": number})
            assert commits_in(future.result()) == [number]
            assert commits_in(reader.read(ids)) == [number]
            assert commits_in(reader.read_records(ids)["values"]) == [number]
            assert reader.attributes == {"number": number}
            assert reader.stats().pinned_rows == 10
            writer.write(ids, torch.full((ROWS, WIDTH), -1))
            writer.rollback()
            assert commits_in(reader.read(ids)) == [number]


def test_a_future_is_of_one_commit_though_another_read_has_gone_on(drive: Path) -> None:
    ids = torch.arange(ROWS)
    with numbered([drive / "table"], memory_budget=0) as writer, Table.open(drive / "table") as reader:
        future = reader.read_async(ids)
        for number in (2, 3):
            writer.write(ids, torch.full((ROWS, WIDTH), number))
            writer.commit()
        assert commits_in(reader.read(ids[:1])) == [3]
        assert commits_in(future.result()) == [3]


@pytest.mark.parametrize("budget", [0, 16 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_beside_a_writer_that_commits_in_a_loop_every_read_is_of_one_commit(drive: Path, budget: int, threads: int) -> None:
    ids = torch.arange(ROWS)
    stopped = threading.Event()
    with numbered([drive / "a", drive / "b"], memory_budget=256 << 10) as writer:

        def write() -> int:
            number = 1
            while not stopped.is_set():
                number += 1
                writer.write(ids, torch.full((ROWS, WIDTH), number))
                writer.commit()
                writer.write(ids[: ROWS // 2], torch.full((ROWS // 2, WIDTH), -number))
                if number % 3 == 0:
                    writer.rollback()
                writer.write(ids, torch.full((ROWS, WIDTH), -number))
            return number

        with Table.open(drive / "a", memory_budget=budget) as shared, concurrent.futures.ThreadPoolExecutor(threads + 1) as pool:

            def look(seed: int) -> list[list[int]]:
                generator = random.Random(seed)
                found = []
                deadline = time.monotonic() + 1.0
                while time.monotonic() < deadline:
                    some = ids[generator.randrange(ROWS) :: generator.choice([1, 7])]
                    if generator.random() < 0.3:
                        shared.prefetch(some)
                    rows = shared.read(some) if generator.random() < 0.5 else shared.read_async(some).result()
                    found.append(commits_in(rows))
                return found

            writing = pool.submit(write)
            try:
                found = [each for reads in pool.map(look, range(threads)) for each in reads]
            finally:
                stopped.set()
            last = writing.result()
        assert all(len(each) == 1 and 0 < each[0] <= last for each in found), [each for each in found if len(each) != 1][:3]
        assert len(found) > 3


def test_a_reader_that_is_opened_while_a_writer_commits_sees_one_commit(drive: Path) -> None:
    ids = torch.arange(ROWS)
    stopped = threading.Event()
    with numbered([drive / "table"], memory_budget=256 << 10) as writer:

        def write() -> None:
            number = 1
            while not stopped.is_set():
                number += 1
                writer.write(ids, torch.full((ROWS, WIDTH), number))
                writer.commit()

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(20):
                with Table.open(drive / "table") as reader:
                    assert len(commits_in(reader.read(ids))) == 1
        finally:
            stopped.set()
            thread.join()


def test_threads_of_a_writer_never_read_half_a_row(drive: Path) -> None:
    ids = torch.arange(ROWS)
    stopped = threading.Event()
    with numbered([drive / "table"], memory_budget=0) as table, concurrent.futures.ThreadPoolExecutor(1) as pool:

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


def kill_writers(interpreters: Interpreters, directories: list[Path], times: int, seed: int) -> None:
    generator = random.Random(seed)
    numbered(directories, memory_budget=0).close()
    committed = 1
    for turn in range(times):
        child = interpreters.start(_WRITER.format(directory=str(directories[0]), seed=seed + turn, rows=ROWS, width=WIDTH))
        interpreters.wait_for("committed" if turn % 3 == 0 else "ready")
        time.sleep(generator.random() * 0.2)
        os.kill(child, signal.SIGKILL)
        said = interpreters.wait(child)
        assert said.returncode == -signal.SIGKILL, said.stderr
        committed = max(
            [committed, *(int(line.split()[1]) for line in said.stdout.splitlines() if line.startswith("committed "))]
        )
        with Table.open(directories[0]) as table:
            found = commits_in(table.read(torch.arange(ROWS)))
            assert found in ([committed], [committed + 1]), "the last commit, or the one that it did not come to say"
            assert table.attributes.get("number", 1) == found[0]
        committed = found[0]
    assert committed > 1


def test_after_a_kill_the_table_is_its_last_commit(interpreters: Interpreters, drive: Path) -> None:
    kill_writers(interpreters, [drive / "a", drive / "b"], 3, 1)


@pytest.mark.slow
def test_after_dozens_of_kills_the_table_is_its_last_commit(interpreters: Interpreters, drive: Path) -> None:
    kill_writers(interpreters, [drive / "table"], 15, 100)


def test_what_a_writer_prepares_does_not_empty_the_memory_of_a_reader(drive: Path) -> None:
    ids = torch.arange(50)
    with Table.create(drive / "table", 100, 4, torch.int64) as writer, Table.open(drive / "table") as reader:
        writer.commit({"step": 1})
        assert reader.attributes == {"step": 1}
        reader.read(ids)
        writer.write(ids, torch.ones(50, 4, dtype=torch.int64))
        with writer.session.lock:
            writer.session.writer_here().prepare("with others", {"step": 2})
        misses = reader.stats().misses
        rows = reader.read(ids)
        assert isinstance(rows, torch.Tensor)
        assert not rows.any()
        assert reader.stats().misses == misses
        assert reader.attributes == {"step": 1}
        with writer.session.lock:
            writer.session.writer_here().commit({"step": 2}, "with others")
        assert reader.attributes == {"step": 2}  # without a read
        rows = reader.read(ids)
        assert isinstance(rows, torch.Tensor)
        assert (rows == 1).all()


def test_a_future_that_nobody_asked_knows_that_too_much_was_changed_to_be_remembered(drive: Path) -> None:
    rows = 200_000  # more than RowCache remembers
    with Table.create(drive / "table", rows, 1, torch.int64, memory_budget=1 << 20) as table:
        future = table.read_async(torch.arange(0, rows, 1000))
        for value in (1, 2):
            table.write(torch.arange(rows), torch.full((rows, 1), value))
        table.commit()
        assert set(future.result().flatten().tolist()) <= {0, 2}
        read = table.read(torch.arange(rows))
        assert isinstance(read, torch.Tensor)
        assert (read == 2).all()
