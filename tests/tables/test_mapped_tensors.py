"""State dicts are in files without names, also where a file system has not these, or the table's directory cannot be written."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.nn import EmbeddingOnDisk
from deepnvme.tables.mapped_tensors import mapped_tensors

VALUES = torch.arange(1000 * 6, dtype=torch.float32).view(1000, 6)
COLUMNS = [(torch.float32, (6,))]


def refusing_open(monkeypatch: pytest.MonkeyPatch, refused: Path, code: int, named_too: bool = False) -> None:
    """Have no file without a name be made in a directory; or none at all."""
    whole_open = os.open

    def refusing(path: Any, flags: int, *more: Any, **named: Any) -> int:
        unnamed = flags & os.O_TMPFILE == os.O_TMPFILE and Path(path) == refused
        if unnamed or (named_too and flags & os.O_CREAT and Path(path).parent == refused):
            raise OSError(code, os.strerror(code))
        return whole_open(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)


@pytest.mark.parametrize("code", [None, errno.EOPNOTSUPP, errno.EISDIR])
def test_no_file_has_a_name_while_it_is_written(code: int | None, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed would leave one as large as the table."""
    if code is not None:
        refusing_open(monkeypatch, drive, code)
    names = []

    def values(begin: int, end: int) -> list[torch.Tensor]:
        names.extend(os.listdir(drive))
        return [VALUES[begin:end]]

    (found,) = mapped_tensors(drive, 1000, COLUMNS, values)
    assert torch.equal(found, VALUES)
    assert not names


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_table_on_a_read_only_mount_has_a_state_dict(
    code: int, drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"weight": VALUES}, drive / "weights.pt")
    embedding = EmbeddingOnDisk.from_pretrained(drive / "weights.pt")
    refusing_open(monkeypatch, drive, code, named_too=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert torch.equal(embedding.state_dict()["weight"], VALUES)
    embedding.table.close()


def test_a_full_drive_is_no_reason_for_another_directory(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing_open(monkeypatch, drive, errno.ENOSPC)
    with pytest.raises(OSError, match="No space") as caught:
        mapped_tensors(drive, 1000, COLUMNS, lambda begin, end: [VALUES[begin:end]])
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(drive))
