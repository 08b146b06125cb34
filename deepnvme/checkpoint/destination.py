"""Where a saved file goes: its path, and the steps before and after it is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ._shared_engine import shared_engine
from .publication import Publication


@dataclass(frozen=True)
class Destination:
    """The path that a file is saved to, with the steps before it is written and after it is published."""

    path: Path
    """Path of the file."""
    fsync: bool
    """Whether the file is flushed to stable storage before it gets its name."""

    def begin(self, nbytes: int) -> Publication:
        """Return the publication that the file is written through.

        Args:
            nbytes: Size of the file in bytes.
        """
        return Publication(self.path, nbytes, shared_engine(), fsync=self.fsync)

    def end(self) -> None:
        """Do what follows publication; here nothing. An error of this step says that the file is saved."""
