"""Files and directories that one may not read or write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

UNPRIVILEGED = """
import deepnvme, errno
engine = deepnvme.Engine()
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
def error_of(call):
    try:
        call()
    except OSError as error:
        return type(error).__name__, os.path.basename(error.filename)
    return "no error"
tensor = torch.ones(10000)
drive = {drive!r} + "/"
"""


@pytest.fixture
def unprivileged(drive: Path) -> str:
    """The beginning of a program without root's rights, whose directory is writable."""
    drive.chmod(0o777)
    return UNPRIVILEGED.format(drive=str(drive))


@pytest.mark.parametrize(("mode", "call"), [
    (0o000, "engine.read(tensor, drive + 'file')"),
    (0o200, "engine.read(tensor, drive + 'file')"),
    (0o400, "engine.write(tensor, drive + 'file')"),
    (0o200, "engine.open(drive + 'file', 'r+')"),
    (0o000, "engine.fsync(drive + 'file')"),
    (0o000, "op.aio_handle().sync_pread(tensor, drive + 'file')"),
])  # fmt: skip
def test_what_the_permissions_forbid_is_a_permission_error(
    interpreters: Any, unprivileged: str, drive: Path, mode: int, call: str
) -> None:
    (drive / "file").write_bytes(bytes(50_000))
    (drive / "file").chmod(mode)
    if os.geteuid() == 0:
        os.chown(drive / "file", 65534, 65534)
    interpreters.run(unprivileged + f"""
assert error_of(lambda: {call}) == ("PermissionError", "file"), error_of(lambda: {call})
""").check()  # fmt: skip
    (drive / "file").chmod(0o600)
    assert (drive / "file").read_bytes() == bytes(50_000)


def test_a_directory_that_may_not_be_written_gets_no_file(interpreters: Any, unprivileged: str, drive: Path) -> None:
    (drive / "directory").mkdir(mode=0o555)
    interpreters.run(unprivileged + """
assert error_of(lambda: engine.write(tensor, drive + "directory/new")) == ("PermissionError", "new")
""").check()  # fmt: skip
    assert not list((drive / "directory").iterdir())


def test_a_directory_that_may_not_be_entered_hides_its_files(interpreters: Any, unprivileged: str, drive: Path) -> None:
    (drive / "directory").mkdir()
    (drive / "directory" / "file").write_bytes(bytes(50_000))
    (drive / "directory").chmod(0o000)
    interpreters.run(unprivileged + """
assert error_of(lambda: engine.read(tensor, drive + "directory/file")) == ("PermissionError", "file")
""").check()  # fmt: skip
    (drive / "directory").chmod(0o700)


def test_a_descriptor_may_write_what_its_path_no_longer_may(interpreters: Any, unprivileged: str, drive: Path) -> None:
    """The second way to the file, opened anew for what the first cannot do, is refused. The first is enough."""
    interpreters.run(unprivileged + """
descriptor = os.open(drive + "file", os.O_WRONLY | os.O_CREAT, 0o400)
handle = op.aio_handle()
handle.async_pwrite(tensor, descriptor)
assert handle.wait() == 1
""").check()  # fmt: skip
    assert (drive / "file").stat().st_size == 40_000
