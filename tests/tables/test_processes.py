"""Tables in workers of a DataLoader, in copies that were pickled, and in forked children."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import shutil
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from deepnvme.files.directory_lock import StoreLocked
from deepnvme.tables import Table

from ..support.patience import PATIENCE

VALUES = torch.arange(6000.0).view(2000, 3)
IDS = torch.arange(2000)


class Rows(Dataset[torch.Tensor]):
    def __init__(self, table: Table) -> None:
        self.table = table

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.table.read(IDS[index * 100 : (index + 1) * 100])


def in_child(program: Callable[[], object]) -> None:
    """Run it in a forked child, which must not fail or hang."""
    child = os.fork()
    if child == 0:
        try:
            program()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    timer = threading.Timer(PATIENCE, os.kill, (child, 9))
    timer.start()
    status = os.waitpid(child, 0)[1]
    timer.cancel()
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader_read_the_table(drive: Path, context: str) -> None:
    with Table.from_tensor(drive / "table", VALUES, memory_budget=8 << 10) as table:
        table.read(IDS)  # its engine has threads by now
        loader = DataLoader(Rows(table), batch_size=None, num_workers=2, multiprocessing_context=context)
        assert torch.equal(torch.cat(list(loader)), VALUES)
        assert torch.equal(table.read(IDS), VALUES)


def test_a_pickled_table_opens_itself_again_to_be_read(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(drive)
    with Table.from_tensor("table", VALUES, updatable=True, memory_budget=12345) as table:
        pickled = pickle.dumps(table)
        with pytest.raises(StoreLocked, match="the Table of this process"):
            copy.deepcopy(table)
    monkeypatch.chdir("/")
    with pickle.loads(pickled) as other, copy.deepcopy(other) as copied:
        assert torch.equal(other.read(IDS), VALUES)
        assert torch.equal(copied.read(IDS), VALUES)
        assert other.memory_budget == 12345
        assert not other.writable


def test_a_pickled_raw_file_is_the_same(drive: Path) -> None:
    path = drive / "rows"
    path.write_bytes(b"head" + VALUES.numpy().tobytes())
    with Table.open(path, dtype=torch.float32, shape=(3,), offset=4) as table, pickle.loads(pickle.dumps(table)) as other:
        assert torch.equal(other.read(IDS), VALUES)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_of_a_writer_is_refused_and_changes_nothing(drive: Path) -> None:
    with Table.from_tensor(drive / "table", VALUES, updatable=True, memory_budget=0) as table:
        table.write(IDS, VALUES + 1)
        future = table.read_async(IDS)

        def child(use: Callable[[], object]) -> None:
            for _ in range(2):
                with pytest.raises(StoreLocked, match="in use by the Table of process"):
                    use()
            table.close()

        for use in (lambda: table.read(IDS), future.result, lambda: table.write(IDS, VALUES)):
            in_child(functools.partial(child, use))
        in_child(table.close)
        in_child(lambda: None)
        assert torch.equal(future.result(), VALUES + 1)
        table.commit()
    with Table.open(drive / "table", writable=True) as table:
        assert torch.equal(table.read(IDS), VALUES + 1)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_that_is_forked_while_another_thread_uses_the_table_can_use_it(drive: Path) -> None:
    stopped = threading.Event()
    Table.from_tensor(drive / "table", VALUES, updatable=True).close()
    with Table.open(drive / "table", memory_budget=0) as table:

        def use() -> None:
            while not stopped.is_set():
                table.read(IDS)

        thread = threading.Thread(target=use)
        thread.start()
        future = table.read_async(IDS)

        def child() -> None:
            assert torch.equal(table.read(IDS[:100]), VALUES[:100])
            assert torch.equal(future.result(), VALUES), "what its parent has started, it reads itself"

        try:
            for _ in range(5):
                in_child(child)
        finally:
            stopped.set()
            thread.join()


def test_a_table_is_opened_where_it_was_copied_or_moved(drive: Path) -> None:
    Table.from_tensor(drive / "a", VALUES, updatable=True).close()
    shutil.copytree(drive / "a", drive / "b")
    with Table.open(drive / "b", writable=True) as table:
        table.write(IDS, VALUES + 1)
        table.commit()
    for path, values in ((drive / "a", VALUES), ((drive / "b").rename(drive / "c"), VALUES + 1)):
        with Table.open(path) as table:
            assert torch.equal(table.read(IDS), values)
