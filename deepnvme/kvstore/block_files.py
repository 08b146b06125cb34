"""The files of a block store: one on each drive, preallocated, with a header, a record for each slot, and the slots.

Each file stands alone: a file that is missing is made anew, and its blocks are misses. ``docs/formats.md`` has the format.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from deepnvme.files.manifest import checked_fields, number, string, with_checksum
from deepnvme.files.preallocation import preallocate
from deepnvme.files.regular_files import open_regular
from deepnvme.files.replacing import replacing, sync_directory, with_filename
from deepnvme.memory.alignment import ALIGNMENT, PAGE, padded
from deepnvme.telemetry.descriptions import size_for_people

FILE_NAME = "deepnvme-blocks"
RECORD_BYTES = 128
"""Bytes of a record; ``csrc/kvstore/records.h`` has its fields."""
_KIND = ("deepnvme blocks", 1)
_HEADERS = 2
"""Copies of the header, one page each: a damaged one does not lose the blocks."""
_MOST_SLOTS = (1 << 32) - 2


@dataclass(frozen=True)
class FileLayout:
    """Where the slots and records of each file are. The header of a file has these fields."""

    block_bytes: int
    """Most bytes of a block."""
    slots: int
    """Slots in the file."""
    slot_bytes: int
    """Bytes from one slot to the next."""
    fingerprint: str
    """What the user says that the blocks are of."""

    @property
    def records_begin(self) -> int:
        """Bytes from the start of the file to the first record."""
        return _HEADERS * PAGE

    @property
    def blocks_begin(self) -> int:
        """Bytes from the start of the file to the first slot."""
        return padded(self.records_begin + self.slots * RECORD_BYTES)

    @property
    def file_bytes(self) -> int:
        """Size of the file in bytes."""
        return self.blocks_begin + self.slots * self.slot_bytes

    @property
    def header(self) -> bytes:
        """One copy of the header."""
        return with_checksum(_KIND, asdict(self)).ljust(PAGE, b"\0")

    def __str__(self) -> str:
        size = f"{self.slots} slots for blocks of at most {self.block_bytes} bytes"
        return f"{size} and the fingerprint {self.fingerprint!r}"


def layout_for(capacity: int, files: int, block_bytes: int, fingerprint: str) -> FileLayout:
    """Return the layout of each of several files that together have at most ``capacity`` bytes.

    Raises:
        ValueError: If not even one block fits, a block is too large, or the fingerprint too long for the header.
    """
    if not 1 <= block_bytes <= 1 << 30:
        raise ValueError(f"block_bytes must be in [1, {1 << 30}], got {block_bytes}")
    slot_bytes = padded(block_bytes)
    slots = (capacity // files - _HEADERS * PAGE - ALIGNMENT) // (slot_bytes + RECORD_BYTES)
    layout = FileLayout(block_bytes, max(slots, 1), slot_bytes, fingerprint)
    if len(layout.header) > PAGE:
        raise ValueError(f"a fingerprint of {len(fingerprint)} characters does not fit into the header: give a hash of it")
    if slots < 1:
        least = size_for_people(files * layout.file_bytes)
        raise ValueError(
            f"a capacity of {capacity} bytes has no room for a block in each of {files} files: give at least {least}"
        )
    if slots * files > _MOST_SLOTS:
        raise ValueError(f"a store has at most {_MOST_SLOTS} slots, got {slots * files}: use several stores")
    return layout


def read_layout(path: Path) -> FileLayout | None:
    """Return the layout that a file's header has. None if there is no file, or only the beginning of one.

    Raises:
        OSError: From reading; with EBADMSG if all copies of the header are damaged.
    """
    try:
        with with_filename(path), open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            pages = [os.pread(file.fileno(), PAGE, copy * PAGE) for copy in range(_HEADERS)]
    except FileNotFoundError:
        return None
    reason = ""
    for page in pages:
        try:
            found = checked_fields(_KIND, page.rstrip(b"\0"))
            slots, slot_bytes = number(found["slots"]), number(found["slot_bytes"])
            layout = FileLayout(number(found["block_bytes"]), slots, slot_bytes, string(found["fingerprint"]))
            if not (1 <= slots <= _MOST_SLOTS and slot_bytes == padded(layout.block_bytes) > 0):
                raise ValueError(f"there cannot be {layout}, {slot_bytes} bytes apart")
            return layout
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = reason or str(error)
    if size < _HEADERS * PAGE:
        return None
    text = f"this is no file of blocks, or its header is damaged ({reason}): remove it, or choose another directory"
    raise OSError(errno.EBADMSG, text, str(path))


def prepare_file(directory: Path, wanted: FileLayout | None, read_only: bool, create: bool) -> FileLayout:
    """Make a directory's file if it is missing and may be made, and reserve all of its space. Blocks.

    Args:
        directory: The directory, locked by the caller unless ``read_only``.
        wanted: The layout that the file must have; None for the one that it has.
        read_only: Change nothing.
        create: Whether the file may be made.

    Returns:
        The layout.

    Raises:
        FileNotFoundError: If there is no file, and it may not be made.
        ValueError: If the file has another layout.
        OSError: From reading and writing; with ENOSPC if the drive has too little space.
    """
    path = directory / FILE_NAME
    found = read_layout(path)
    if found is None:
        if wanted is None or not create:
            hint = "" if read_only else ": give capacity and block_bytes to make one"
            raise FileNotFoundError(errno.ENOENT, f"there is no file of blocks{hint}", str(path))
        _create(path, wanted)
        return wanted
    if wanted is not None and found != wanted:
        raise ValueError(
            f"'{path}' has {found}, not {wanted}: open it with its own, choose another directory, or remove the file"
        )
    if not read_only:
        with with_filename(path), open(path, "r+b") as file:
            os.fchmod(file.fileno(), 0o600)
            _reserve(file.fileno(), os.fstat(file.fileno()).st_size, found, path)
    return found


def _create(path: Path, layout: FileLayout) -> None:
    """Make a file without blocks, readable and writable by its owner only. After a crash there is no file, or a whole one."""
    new = path.with_name(path.name + ".new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    with with_filename(path, instead=True), replacing(path, new):
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _reserve(descriptor, 0, layout, path)
            for copy in range(_HEADERS):
                os.pwrite(descriptor, layout.header, copy * PAGE)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_directory(path.parent)


def _reserve(descriptor: int, size: int, layout: FileLayout, path: Path) -> None:
    """Reserve the file's space past its present size. Raises OSError (ENOSPC) if there is too little."""
    preallocate(descriptor, size, layout.file_bytes, str(path), "give a smaller capacity, or use another drive")
