"""File systems that fail on command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import made_disk
from ..support.faulty_filesystem import MODES, FaultyFilesystem


@pytest.fixture(params=MODES)
def faulty_disk(request: pytest.FixtureRequest, drive: Path) -> Iterator[FaultyFilesystem]:
    """In each mode in turn."""
    yield from made_disk(drive, request.param)


@pytest.fixture
def writeback_disk(drive: Path) -> Iterator[FaultyFilesystem]:
    """Sees what goes through the page cache when that is written back: at fsync and close."""
    yield from made_disk(drive, "writeback")
