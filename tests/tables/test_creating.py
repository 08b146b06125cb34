"""A process that is killed while it makes a table leaves nothing that hinders the next one, which takes nothing from others."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from deepnvme.tables import Table

from ..support.interpreters import Interpreters

_KILLED = """
import os, signal, torch
from deepnvme.tables import Table, creating
calls = 0
def kill(*_):
    global calls
    calls += 1
    if calls == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
creating.{where} = kill
Table.create({paths}, 100, 4, torch.float32, values=lambda begin, end: torch.zeros(end - begin, 4))
"""


@pytest.mark.parametrize(
    ("where", "call"), [("preallocate", 1), *[("sync_directory", call) for call in (1, 2, 4)], ("save_manifest", 1)]
)
def test_a_table_is_made_where_a_process_was_killed_that_made_one(
    where: str, call: int, interpreters: Interpreters, drive: Path
) -> None:
    paths = [str(drive / "a"), str(drive / "b")]
    ended = interpreters.run(_KILLED.format(where=where, call=call, paths=paths))
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not (drive / "a" / "deepnvme-table.json").exists()
    with Table.create(paths, 100, 4, torch.float32, values=lambda begin, end: torch.ones(end - begin, 4)) as table:
        assert torch.equal(table.read(torch.arange(100)), torch.ones(100, 4))
    assert sorted(path.name for path in (drive / "b").iterdir() if path.name.startswith("rows")) == ["rows"]
    with pytest.raises(FileExistsError):
        Table.create(paths, 100, 4, torch.float32)
    with Table.open(drive / "a") as table:
        assert table.read(torch.tensor([99]))[0, 0] == 1


def test_rows_of_another_table_are_no_leftovers(interpreters: Interpreters, drive: Path) -> None:
    """Those of a second directory have no manifest beside them."""
    interpreters.run(_KILLED.format(where="sync_directory", call=4, paths=[str(drive / "a"), str(drive / "b")]))
    (drive / "b" / "rows").unlink()
    Table.create([drive / "c", drive / "d"], 100, 4, torch.float32).close()
    (drive / "d" / "rows").rename(drive / "b" / "rows")
    for paths in ([drive / "a", drive / "b"], [drive / "b"]):
        with pytest.raises(FileExistsError):
            Table.create(paths, 100, 4, torch.float32)
    assert (drive / "b" / "rows").exists()
