"""File systems that fail on command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support.faulty_filesystem import MODES, FaultyFilesystem, Mode, faulty_filesystem, obstacle


@pytest.fixture(params=MODES)
def faulty_disk(request: pytest.FixtureRequest, drive: Path) -> Iterator[FaultyFilesystem]:
    """In each mode in turn."""
    yield from _made(drive, request.param)


@pytest.fixture
def direct_disk(drive: Path) -> Iterator[FaultyFilesystem]:
    """Sees each read and write as it is made."""
    yield from _made(drive, "direct")


@pytest.fixture
def writeback_disk(drive: Path) -> Iterator[FaultyFilesystem]:
    """Sees what goes through the page cache when that is written back: at fsync and close."""
    yield from _made(drive, "writeback")


def _made(drive: Path, mode: Mode) -> Iterator[FaultyFilesystem]:
    missing = obstacle()
    if missing is not None:
        pytest.skip(missing)
    with faulty_filesystem(drive, mode) as disk:
        yield disk
