"""Tables on file systems that fail on command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support.faulty_filesystem import FaultyFilesystem, faulty_filesystem, obstacle


@pytest.fixture
def direct_disk(drive: Path) -> Iterator[FaultyFilesystem]:
    """Sees each read and write as it is made."""
    missing = obstacle()
    if missing is not None:
        pytest.skip(missing)
    with faulty_filesystem(drive, "direct") as disk:
        yield disk
