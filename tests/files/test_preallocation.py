"""Space that is taken before it is written to: who fails to get it is told of which file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from deepnvme.files import preallocation
from deepnvme.files.preallocation import preallocate


@pytest.fixture
def descriptor(drive: Path) -> int:
    return os.open(drive / "file", os.O_RDWR | os.O_CREAT)


def failing(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("call", ["fstatvfs", "ftruncate"])
def test_a_call_that_fails_names_the_file(descriptor: int, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with os.fdopen(descriptor):
        monkeypatch.setattr(preallocation.libc, "fallocate", unsupported)
        monkeypatch.setattr(preallocation.os, call, failing)
        with pytest.raises(OSError, match="named") as caught:
            preallocate(descriptor, 0, 4096, "named", "make room")
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, "named")


def unsupported(*_: object) -> int:
    import ctypes

    ctypes.set_errno(errno.EOPNOTSUPP)
    return -1
