"""What a file is saved as."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ._shared_engine import shared_engine
from .publication import Publication


@dataclass(frozen=True)
class Destination:
    """A file's name, and what is done when it begins to be written and when it is there."""

    path: Path
    fsync: bool

    def begin(self, nbytes: int) -> Publication:
        """Of a file of so many bytes."""
        return Publication(self.path, nbytes, shared_engine(), fsync=self.fsync)

    def end(self) -> None:
        """After it is published; an error says so."""
