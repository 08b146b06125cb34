"""Bytes that are appended are in the file, in their order, and errors of writes are not lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepnvme.drives.profiles import engine_for
from deepnvme.memory.alignment import PAGE
from deepnvme.transfer.appending import AppendedFile
from deepnvme.transfer.gather import CHUNK


def test_a_write_that_fails_is_raised(drive: Path, faulty: Any) -> None:
    engine = faulty("threads", error_every=1)
    memory = engine_for([drive], None)
    used = SimpleNamespace(open=engine.open, write=engine.write, fsync=engine.fsync, empty_pinned=memory.empty_pinned)
    appended = AppendedFile(used, drive / "file")  # type: ignore[arg-type]
    appended.append(bytes(100))
    with pytest.raises(OSError, match="file"):
        appended.flush()


def test_a_file_that_exists_is_not_overwritten(drive: Path) -> None:
    (drive / "file").write_bytes(b"1")
    with pytest.raises(FileExistsError):
        AppendedFile(engine_for([drive], None), drive / "file")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(sizes=st.lists(st.sampled_from([0, 1, 100, PAGE, CHUNK - 1, CHUNK, 4 * CHUNK + 5]), max_size=5), flushes=st.booleans())
def test_what_was_appended_is_in_the_file(drive: Path, sizes: list[int], flushes: bool) -> None:
    path, expected = drive / "file", b""
    path.unlink(missing_ok=True)
    appended = AppendedFile(engine_for([drive], None), path)
    for number, size in enumerate(sizes):
        piece = bytes([number + 1]) * size
        appended.append(piece)
        expected += piece
        if flushes:
            expected += bytes(appended.pad(PAGE))
            appended.flush()
            assert path.read_bytes() == expected
    appended.pad(PAGE)
    appended.flush()
    assert path.read_bytes() == expected + bytes(-len(expected) % PAGE)
    assert appended.position % PAGE == 0
