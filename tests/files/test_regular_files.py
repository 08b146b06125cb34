"""What an archive can have put in a file's place is neither waited for nor read without end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from deepnvme.files.regular_files import NotARegularSmallFile, read_regular
from deepnvme.files.replacing import with_filename


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 1 << 20])
def test_a_file_is_read_whole(tmp_path: Path, nbytes: int) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    content = os.urandom(nbytes)
    path.write_bytes(content)
    link.symlink_to(path)
    assert read_regular(path, nbytes) == read_regular(str(link), 1 << 30) == content


def test_one_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(NotARegularSmallFile, match="it has 1099511627776 bytes, and may have 1000"):
        read_regular(path, 1000)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/urandom"])
def test_a_device_is_not_read(tmp_path: Path, device: str) -> None:
    path = tmp_path / "file"
    path.symlink_to(device)
    with pytest.raises(NotARegularSmallFile, match="no regular file"):
        read_regular(path, 1 << 40)


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    os.mkfifo(path)
    with pytest.raises(NotARegularSmallFile, match="no regular file"):
        read_regular(path, 1000)


def test_every_oserror_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        read_regular(tmp_path / "file", 1000)
    with pytest.raises(IsADirectoryError) as directory:
        read_regular(tmp_path, 1000)
    assert (missing.value.filename, directory.value.filename) == (str(tmp_path / "file"), str(tmp_path))

    def fail(descriptor: int) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))  # as read(2) fails: without a name

    path = tmp_path / "file"
    path.write_bytes(b"content")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", fail)
        with pytest.raises(OSError, match="Input/output error") as failed:
            read_regular(path, 1000)
    assert (failed.value.errno, failed.value.filename) == (errno.EIO, str(path))


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), OSError(errno.EIO, "broken", "a.tmp", None, "b")])
def test_an_error_names_one_file(error: OSError) -> None:
    with pytest.raises(OSError, match=r"^\[Errno 5\] broken: 'a'$") as raised, with_filename("a", instead=True):
        raise error
    assert (raised.value.filename, raised.value.filename2) == ("a", None)
