"""Manifest of a persistent store: the file that lists the store's tensors. It is always replaced as a whole.

The manifest is in the store's first directory. It is two lines of JSON: the first has the format, its version and the CRC-32
of the second; the second lists the tensors. Each of the other directories has a membership file, one line of JSON that names
the first directory, so that none of these directories is mistaken for a store of its own: see :mod:`deepnvme.files.identity`.

1. A manifest or a membership is replaced as a whole: after a crash, either the old one or the new one is there.
2. A manifest is published after the data files were flushed, so every part that it lists is on the drive.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deepnvme.files.manifest import MOST_DIMENSIONS, checked_fields, number, numbers, read_manifest, string, with_checksum
from deepnvme.files.replacing import replace_durably, with_filename

MANIFEST_NAME = "deepnvme-store.json"
"""Name of the manifest in the store's first directory."""
MEMBERSHIP_NAME = "deepnvme-store.member.json"
"""Name of the membership in each of the store's other directories."""
_KIND = "deepnvme tensor store", 1
"""Format and version in the first line of a manifest."""

_LARGEST = 256 << 20
"""Largest manifest in bytes, enough for two million tensors.

The limit bounds memory: JSON from an untrusted file could take thirty times its size in memory.
"""


class CorruptManifest(OSError):
    """A manifest or a membership is damaged (EBADMSG), or was not written by this version of the package."""

    def __init__(self, path: Path, why: str) -> None:
        text = f"this is not a whole manifest of a tensor store: {why}; restore it, or remove it with the data beside it"
        super().__init__(errno.EBADMSG, text, str(path))


class StoredTensor(NamedTuple):
    """Manifest entry of one tensor. In the file, the fields are one JSON list."""

    dtype: str
    """Name of the dtype in torch, without "torch."."""
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int, int], ...]
    """(directory, offset, length) of each part, in the order of the tensor's bytes.

    The directory is an index into the store's directories; offset and length are in bytes.
    """
    checksums: tuple[int, ...] | None
    """Running CRC-32 values: of the first part, of the first two together, and so on. None if the store keeps none."""


@dataclass(frozen=True)
class StoreManifest:
    """Contents of the manifest in a store's first directory: which tensors the store has, and where each is stored."""

    store: str
    """The store's unique identity."""
    directories: int
    """Number of the store's directories."""
    tensors: Mapping[str, StoredTensor]
    """The tensors by name."""


def publish(directory: Path, manifest: StoreManifest) -> None:
    """Replace the directory's manifest, atomically and durably.

    After a crash at any point, either the old manifest or the new one is there, and it is whole.

    Raises:
        ValueError: If the manifest is too long.
        OSError: From writing.
    """
    data = with_checksum(_KIND, {"store": manifest.store, "directories": manifest.directories, "tensors": dict(manifest.tensors)})
    if len(data) > _LARGEST:
        raise ValueError(
            f"the manifest of {len(manifest.tensors)} tensors would have {len(data)} bytes, at most {_LARGEST} are allowed:"
            " use several stores"
        )
    replace_durably(directory / MANIFEST_NAME, data)


def load(directory: Path) -> StoreManifest | None:
    """Return the directory's manifest, or None if it has none.

    Raises:
        CorruptManifest: If it is damaged.
        OSError: From reading.
    """
    with contextlib.suppress(FileNotFoundError):
        return read_manifest(
            directory / MANIFEST_NAME, _LARGEST, lambda data: _manifest(checked_fields(_KIND, data)), CorruptManifest
        )
    return None


def remove(directory: Path) -> None:
    """Remove the manifest, the membership and the leftovers of an interrupted replacement, whichever exist."""
    for name in (MANIFEST_NAME, MEMBERSHIP_NAME):
        for path in (directory / name, directory / (name + ".new")):
            with contextlib.suppress(FileNotFoundError), with_filename(directory / name, instead=True):
                os.unlink(path)


def _manifest(fields: Any) -> StoreManifest:
    """Return the manifest parsed from its second line. Raises ValueError saying which field is wrong."""
    try:
        tensors = {name: _tensor(*entry) for name, entry in fields["tensors"].items()}
        return StoreManifest(string(fields["store"]), number(fields["directories"]), tensors)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its second line is not as a store writes it: {type(error).__name__}: {error}") from None


def _tensor(dtype: Any, shape: Any, parts: Any, checksums: Any) -> StoredTensor:
    """Return the manifest entry with these fields. Raises TypeError or ValueError for a field of another type."""
    places = tuple((directory, offset, length) for directory, offset, length in map(numbers, parts))
    return StoredTensor(string(dtype), numbers(shape, MOST_DIMENSIONS), places, None if checksums is None else numbers(checksums))
