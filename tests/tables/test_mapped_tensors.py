"""State dicts are in files without names."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.tables.mapped_tensors import mapped_tensors

VALUES = torch.arange(1000 * 6, dtype=torch.float32).view(1000, 6)
COLUMNS = [(torch.float32, (6,))]


@pytest.mark.parametrize("unnamed", [True, False])
def test_no_file_has_a_name_while_it_is_written(unnamed: bool, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed would leave one as large as the table."""
    whole_open = os.open

    def refusing(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE and not unnamed:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return whole_open(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)
    names = []

    def values(begin: int, end: int) -> list[torch.Tensor]:
        names.extend(os.listdir(drive))
        return [VALUES[begin:end]]

    (found,) = mapped_tensors(drive, 1000, COLUMNS, values)
    assert torch.equal(found, VALUES)
    assert not names


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_directory_that_takes_no_file_is_named(code: int, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(path: Any, *more: Any, **named: Any) -> int:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(OSError, match="Errno") as caught:
        mapped_tensors(drive, 1000, COLUMNS, lambda begin, end: [VALUES[begin:end]])
    assert (caught.value.errno, caught.value.filename) == (code, str(drive))
