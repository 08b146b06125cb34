"""The identity at the end of each file of rows.

It says to which table the file belongs, which of the table's files it is, and how many bytes one version of a row has. The
invariants of identities are in :mod:`deepnvme.files.identity`.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from deepnvme.engine import Engine, File, Future
from deepnvme.files.identity import refuse_mixture, same_place
from deepnvme.files.regular_files import open_regular
from deepnvme.memory.alignment import padded

from .layout import TableLayout
from .manifest import ROWS_NAME, CorruptTable, Epochs

_BYTES = 4096
"""Bytes of an identity. It is padded to one sector if the drive's sectors are larger."""
LARGEST_SECTOR = 64 << 10
"""Most bytes of padding that a file may have behind its identity."""
_IDENTITY = re.compile(rb"deepnvme table ([0-9a-f]{32}) file ([0-9]{1,9}) versions of ([0-9]{1,15}) bytes\n")


def file_bytes(layout: TableLayout, volume: int) -> int:
    """Return the size of a file of rows, with its identity."""
    return _offset(layout, volume) + _BYTES


def _offset(layout: TableLayout, volume: int) -> int:
    return padded(layout.bytes_in(volume), _BYTES)


def write_identity(engine: Engine, files: Sequence[File], layout: TableLayout, identity: str) -> list[Future]:
    """Start writing an identity to the end of each of a table's files, in whole sectors; return at once."""
    futures = []
    for volume, file in enumerate(files):
        text = f"deepnvme table {identity} file {volume} versions of {layout.version_bytes} bytes\n".encode()
        memory = mmap.mmap(-1, max(_BYTES, file.sector_size))  # whole pages: the engine would keep memory to copy others through
        memory.write(text)
        futures.append(engine.write(torch.frombuffer(memory, dtype=torch.uint8), file, _offset(layout, volume)))
    return futures


def check_identity(layout: TableLayout, epochs: Epochs) -> None:
    """Check that each file of the layout is that file of the manifest's table. Blocks.

    Raises:
        ValueError: If a file belongs to another table, or the files are in another order.
        CorruptTable: If the end of a file is missing, or versions of rows have another size than in the manifest.
        OSError: From reading.
    """
    for volume, path in enumerate(layout.files):
        found, number, version_bytes = _identity_in(path)
        known = (epochs.identity, *epochs.previous)
        if not found:
            why = f"it has {path.stat().st_size} bytes, and does not end with the identity of a table"
            raise CorruptTable(path, f"{why}; {layout.rows_in(volume)} rows need {file_bytes(layout, volume)}")
        if found not in known:
            raise ValueError(
                f"the rows in '{path.parent}' are not those of the table in '{layout.files[0].parent}' as it is now, but of"
                " another table, or of a copy from before or after a change: give directories that were copied or moved together"
            )
        if version_bytes != layout.version_bytes:
            raise CorruptTable(path, f"versions of rows have {version_bytes} bytes, and {layout.version_bytes} in the manifest")
        if number != volume:
            raise ValueError(
                f"'{path.parent}' is directory {number} (from 0) of its table, and was given as directory {volume}: give the"
                " directories in the order in which the table was created"
            )


def directories_of(given: Sequence[Path], layout: TableLayout, epochs: Epochs) -> list[Path]:
    """Return the directories of a table, in the table's order, wherever they are now.

    Args:
        given: The first directory, or all of them.
        layout: From the manifest in the first directory, with the file paths that it recorded.
        epochs: From the same manifest.

    Raises:
        FileNotFoundError: If only the first directory is given, and another one is not at its recorded path.
        ValueError: If only the first directory is given, and it is not at its recorded path; or if the directories are a
            mixture of a table and its copy.
    """
    recorded = [path.parent for path in layout.files]
    first, count = given[0], len(recorded)
    if len(given) > 1 and len(given) != count:
        raise ValueError(f"the table in '{first}' has {count} directories, got {len(given)}")
    if count == 1:
        return list(given)
    in_order = (is_file_of(place / ROWS_NAME, volume, epochs) for volume, place in enumerate(recorded))
    if set(given) == set(recorded) and all(in_order):  # given in any order, and no drives have exchanged their places
        return recorded
    in_place = [same_place(each, place) for each, place in zip(given, recorded, strict=False)]
    if len(given) == 1 and in_place[0]:
        for place in recorded[1:]:
            if not (place / ROWS_NAME).exists():
                text = f"a directory of the table in '{first}' is not where it was; if it was moved, give all {count} directories"
                raise FileNotFoundError(errno.ENOENT, text, str(place))
        return [first, *recorded[1:]]
    listed = ", ".join(f"'{each}'" for each in recorded)
    if len(given) == 1:
        raise ValueError(
            f"the table in '{first}' was copied or moved: its manifest was written in '{recorded[0]}'. Give all {count}"
            f" directories that it has now, in the order of those that it had: {listed}"
        )
    refuse_mixture(given, recorded, lambda volume, place: is_file_of(place / ROWS_NAME, volume, epochs))
    return list(given)


def is_file_of(path: Path, volume: int, epochs: Epochs) -> bool:
    """Return whether the identity at the end of a file is that of the manifest's table, with this volume number."""
    try:
        found, number, _ = _identity_in(path)
    except OSError:
        return False
    return number == volume and found in (epochs.identity, *epochs.previous)


def _identity_in(path: Path) -> tuple[str, int, int]:
    """Read the identity at the end of a file of rows. Raises OSError.

    Returns:
        The identity of the table, "" if the file has none; the number of the file among the table's files; and the bytes of
        one version of a row.
    """
    with open_regular(path) as file:
        file.seek(max(os.fstat(file.fileno()).st_size - LARGEST_SECTOR - _BYTES, 0))
        found = list(_IDENTITY.finditer(file.read()))
    return (found[-1][1].decode(), int(found[-1][2]), int(found[-1][3])) if found else ("", 0, 0)
