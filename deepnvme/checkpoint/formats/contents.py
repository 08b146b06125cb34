"""What a .pt file holds: its records, and what is wrong with them."""

from __future__ import annotations

import bisect
import contextlib
import errno
import io
import os
import pickle
import re
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch.serialization import LoadEndianness, get_default_load_endianness

from deepnvme._files import naming_file

from .missing_records import what_is_missing
from .pickle_scan import PickleScan, names_only_plain, why_wasteful
from .zip_directory import BadDirectory, data_of, entries
from .zip_layout import LOCAL_HEADER


class CorruptCheckpoint(OSError):
    """A file is not, or not wholly, what was saved (EBADMSG); the message says which part of it."""

    def __init__(self, path: str | os.PathLike[str], why: str) -> None:
        super().__init__(errno.EBADMSG, why, os.fspath(path))
        self.why = why


@dataclass(frozen=True)
class Record:
    """The bytes of one storage, or of the pickle."""

    key: str | None
    """The storage's; None: the pickle."""
    header: int
    """Where in the file its header begins; the bytes follow."""
    nbytes: int
    crc32: int
    """0: none was kept."""
    name: str = ""
    """Of a record that is neither a storage nor the pickle."""
    whole: int = 0
    """Bytes when they are inflated."""

    def __str__(self) -> str:
        if self.name:
            return f"record {self.name}"
        return "the pickle" if self.key is None else f"storage {self.key}"


class WrongChecksum(CorruptCheckpoint):
    """A storage, or the pickle, is there with other bytes than were saved."""

    def __init__(self, path: str | os.PathLike[str], record: Record, offset: int, crc32: int) -> None:
        super().__init__(
            path,
            f"{record}, {record.nbytes} bytes from byte {offset} on:"
            f" expected CRC-32 {record.crc32:08x}, found {crc32:08x}",
        )


@dataclass(frozen=True)
class ArchiveContents:
    """Of an archive that torch.save made."""

    storages: tuple[Record, ...]
    """In the order of the file."""
    pickle: Record
    stored: bool
    """Whether the records lie in the file as they are, and not deflated."""
    byteorder: str
    script: bool
    """Whether it is a TorchScript archive."""

    def holding(self, offset: int) -> Record | None:
        """The storage whose bytes are at an offset."""
        at = bisect.bisect(self.storages, offset, key=_header) - 1
        return self.storages[at] if at >= 0 else None


def _header(record: Record) -> int:
    return record.header


def is_zip(path: str | os.PathLike[str]) -> bool:
    """As torch.load tells the zip format from the older ones: by the first bytes."""
    with naming_file(path), open(path, "rb") as file:
        return file.read(4) == b"PK\3\4"


def is_pickle(path: str | os.PathLike[str]) -> bool:
    """Of protocol 2 or higher, as torch's older formats. No safetensors file, although one may begin with that byte."""
    with naming_file(path), open(path, "rb") as file:
        head = file.read(9)
    return len(head) == 9 and head[:1] == b"\x80" and head[8:] != b"{"


def refuse_damaged_beginning(path: str | os.PathLike[str]) -> None:
    """Raise CorruptCheckpoint for a file that ends as a zip archive and does not begin as one."""
    with open(path, "rb") as file, contextlib.suppress(BadDirectory):
        beginning = file.read(4)
        if entries(file) and beginning != b"PK\3\4":
            raise CorruptCheckpoint(path, f"it ends as a zip archive, and begins with {beginning!r}")


def contents(path: str | os.PathLike[str]) -> ArchiveContents:
    """Read the directory of the archive. Raises CorruptCheckpoint, and OSError from reading."""
    with open(path, "rb") as file:
        try:
            found = entries(file)
        except BadDirectory as error:
            raise CorruptCheckpoint(path, what_is_missing(path) or str(error)) from error
        storages = []
        stored, script = True, False
        stream = Record(None, 0, 0, 0)
        byteorder = "big" if get_default_load_endianness() is LoadEndianness.BIG else "little"
        first, _, _ = found[0].name.partition("/") if found else ("", "", "")
        missing = {"data.pkl", "version"}
        for entry in found:
            stored = stored and entry.stored
            folder, _, name = entry.name.partition("/")
            if folder != first:
                raise CorruptCheckpoint(path, f"record {entry.name} is in another folder than {first}, where the first one is")
            missing.discard("version" if name == ".data/version" else name)
            if name.startswith("data/"):
                storages.append(Record(name[len("data/") :], entry.header, entry.nbytes, entry.crc32, whole=entry.whole))
            elif name == "data.pkl":
                stream = Record(None, entry.header, entry.nbytes, entry.crc32, whole=entry.whole)
            elif name == "constants.pkl":
                script = True
            elif name in _FACTS and entry.stored:
                text = _fact(path, file, Record(None, entry.header, entry.nbytes, entry.crc32, name))
                if not _FACTS[name].fullmatch(text):
                    raise CorruptCheckpoint(path, f"record {name} cannot be {text[:20]!r}")
                byteorder = text.decode() if name == "byteorder" else byteorder
    if missing:
        raise CorruptCheckpoint(path, f"it has no record {min(missing)}, which all have that torch.save wrote")
    return ArchiveContents(tuple(sorted(storages, key=_header)), stream, stored, byteorder, script)


_FACTS = {
    "version": re.compile(rb"\d{1,18}\s*"),
    ".data/version": re.compile(rb"\d{1,18}\s*"),
    "byteorder": re.compile(rb"little|big"),
    ".format_version": re.compile(rb"\d{1,18}"),
    ".storage_alignment": re.compile(rb"\d{1,18}"),
}
"""Records that torch reads beside the pickle, and what they can be."""
_LONGEST_FACT = 64


def _fact(path: str | os.PathLike[str], file: BinaryIO, record: Record) -> bytes:
    if record.nbytes > _LONGEST_FACT:
        raise CorruptCheckpoint(path, f"{record} should have {record.nbytes} bytes, and may have {_LONGEST_FACT}")
    offset = data_offset(path, file.fileno(), record)
    file.seek(offset)
    text = file.read(record.nbytes)
    if record.crc32 and zlib.crc32(text) != record.crc32:
        raise WrongChecksum(path, record, offset, zlib.crc32(text))
    return text


def check_pickle(path: str | os.PathLike[str], found: ArchiveContents) -> None:
    """That its bytes are those that were saved, and no more than a pickler writes for what they make: before anything is made
    of them. Raises CorruptCheckpoint."""
    record = found.pickle
    if not found.stored:
        return
    with open(path, "rb") as file:
        offset = data_offset(path, file.fileno(), record)
        file.seek(offset)
        stream = file.read(record.nbytes)
    if record.crc32 and (crc := zlib.crc32(stream)) != record.crc32:
        raise WrongChecksum(path, record, offset, crc)
    if not found.script:  # its pickles are of another pickler, with no such limits
        refuse_wasteful(path, stream)


def refuse_wasteful(path: str | os.PathLike[str], stream: bytes) -> None:
    """Raise CorruptCheckpoint for a pickle that must not be unpickled; see :func:`why_wasteful`."""
    why = why_wasteful(stream)
    if why is not None:
        raise CorruptCheckpoint(path, f"the pickle {why}")


def scan_of(path: str | os.PathLike[str], file: BinaryIO, found: ArchiveContents) -> PickleScan:
    """Of the file's pickle, to be loaded. Raises CorruptCheckpoint."""
    file.seek(data_offset(path, file.fileno(), found.pickle))
    return PickleScan(file, found.pickle.nbytes)


def is_plain(path: str | os.PathLike[str], found: ArchiveContents) -> bool:
    """Whether unpickling looks at no storage's contents, so that they may be read afterwards. Raises CorruptCheckpoint."""
    with open(path, "rb") as file:
        file.seek(data_offset(path, file.fileno(), found.pickle))
        stream = file.read(found.pickle.nbytes)
    if names_only_plain(stream):
        return True
    scan = PickleScan(io.BytesIO(stream), len(stream))
    try:
        scan.load()
    except Exception:  # another's pickle, or one that torch is going to refuse
        return False
    return scan.plain


def refuse_damaged(path: str | os.PathLike[str], found: ArchiveContents, error: Exception, plain: bool | None = None) -> None:
    """Raise CorruptCheckpoint if the archive is why torch could not load it: what is wrong with its records, or ``error`` where
    that can have no other reason. ``plain``: whether the pickle is, where that is known; nothing of what a plain one names raises
    anything over a file as it was saved."""
    if isinstance(error, (OSError, MemoryError, torch.OutOfMemoryError)):
        return
    if found.stored:
        _refuse_records(path, found, error)
    if is_damage(error) and not found.script and (is_plain(path, found) if plain is None else plain):
        raise CorruptCheckpoint(path, f"torch cannot load it: {type(error).__name__}: {error}") from error


def _refuse_records(path: str | os.PathLike[str], found: ArchiveContents, error: Exception) -> None:
    data_offsets(path, found.storages)
    with open(path, "rb") as file:
        scan = scan_of(path, file, found)
        with contextlib.suppress(Exception):  # what was wrong with the pickle is said by who could not load it
            scan.load()
        there = {record.key: record for record in found.storages}
        for key, nbytes in scan.nbytes.items():
            record = there.get(key)
            if record is None:
                raise CorruptCheckpoint(path, f"storage {key}: expected {nbytes} bytes, found none") from error
            if record.nbytes != nbytes:
                raise wrong_size(path, found, data_offset(path, file.fileno(), record), nbytes) from error


def is_damage(error: Exception) -> bool:
    """Whether unpickling raises it for bytes that nobody has pickled. UnpicklingError is not: it also says what weights_only
    refuses."""
    return isinstance(error, DAMAGE) and not isinstance(error, (pickle.UnpicklingError, torch.OutOfMemoryError))


DAMAGE = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError, struct.error,
)  # fmt: skip
"""What unpickling raises for bytes that nobody has pickled, beside UnpicklingError."""


def wrong_size(path: str | os.PathLike[str], found: ArchiveContents, offset: int, nbytes: int) -> CorruptCheckpoint:
    """The error for a storage at an offset that should have so many bytes."""
    record = found.holding(offset)
    key, there = ("?", 0) if record is None else (record.key, record.nbytes)
    return CorruptCheckpoint(path, f"storage {key} at byte {offset}: expected {nbytes} bytes, found {there}")


def read_at(descriptor: int, memory: memoryview, offset: int) -> int:
    """Fill the memory with bytes of the file from ``offset`` on, less only where the file ends. Returns how many. Raises OSError.

    A single preadv may return less in the middle of a file, as some network and FUSE file systems do.
    """
    count = 0
    while count < len(memory) and (more := os.preadv(descriptor, [memory[count:]], offset + count)):
        count += more
    return count


def data_offset(path: str | os.PathLike[str], descriptor: int, record: Record) -> int:
    """Where the data of a record begin. Raises CorruptCheckpoint, also where they would not be wholly in the file."""
    header = bytearray(LOCAL_HEADER.size)
    try:
        count = read_at(descriptor, memoryview(header), record.header)
        offset = data_of(bytes(header[:count]), record.header)
    except BadDirectory as error:
        raise CorruptCheckpoint(path, str(error)) from error
    size = os.fstat(descriptor).st_size
    if offset + record.nbytes > size:
        why = f"{record} should have {record.nbytes} bytes from byte {offset} on, and the file ends at byte {size}"
        raise CorruptCheckpoint(path, why)
    return offset


def data_offsets(path: str | os.PathLike[str], records: Iterable[Record]) -> list[int]:
    """Where their bytes begin. Raises CorruptCheckpoint."""
    with open(path, "rb") as file:
        return [data_offset(path, file.fileno(), record) for record in records]
