"""A process that is killed while it makes a table leaves rows that are refused, not taken for a table."""

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
creating.{where} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Table.create({path!r}, 100, 4, torch.float32, values=lambda begin, end: torch.zeros(end - begin, 4))
"""


@pytest.mark.parametrize("where", ["reserve", "sync_directory", "save_manifest"])
def test_rows_that_a_killed_process_has_left_are_to_be_removed(where: str, interpreters: Interpreters, drive: Path) -> None:
    path = drive / "table"
    ended = interpreters.run(_KILLED.format(where=where, path=str(path)))
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    with pytest.raises(FileNotFoundError):
        Table.open(path)
    with pytest.raises(FileExistsError, match="not made to the end: open it, or remove it") as caught:
        Table.create(path, 100, 4, torch.float32)
    assert caught.value.filename == str(path / "rows")
    (path / "rows").unlink()
    with Table.create(path, 100, 4, torch.float32, values=lambda begin, end: torch.ones(end - begin, 4)) as table:
        assert torch.equal(table.read(torch.arange(100)), torch.ones(100, 4))
