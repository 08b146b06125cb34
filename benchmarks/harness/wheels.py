"""Wheels of this package, to compare with what is installed: unpacked, not installed."""

from __future__ import annotations

import shutil
from pathlib import Path

from harness.workloads import ContenderFailed


def unpack_wheel(wheel: Path, directory: Path) -> None:
    """Raises ContenderFailed if it is no wheel, or not there."""
    try:
        shutil.unpack_archive(wheel, directory, "zip")
    except (OSError, shutil.ReadError) as error:
        raise ContenderFailed(f"'{wheel}' is no wheel: {error}") from error
