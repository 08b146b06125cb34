"""Read the directory at the end of a zip archive."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
END_64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR_64 = struct.Struct("<4sIQI")
END = struct.Struct("<4sHHHHIIH")

ZIP64 = 1
LARGE = 0xFFFFFFFF
"""Sizes and offsets from this value on do not fit into 4 bytes. They are stored as 8 bytes in an extra field."""
_LONGEST_COMMENT = 0xFFFF
_ENCRYPTED = 0x2061
"""Flags of encrypted data, patches, strongly encrypted data, and an encrypted directory."""
_FOLDER = 0x10
"""File attribute of a folder. torch reads no data of a record that has it, whatever the record's name."""
_NEWEST = 63
"""Newest version of the zip format that readers support: 6.3."""
_STORED, _DEFLATED = 0, 8
_LARGEST = 256 << 20
"""Most bytes of a directory, enough for two million records."""


class Record(NamedTuple):
    """One record of a zip archive. In a .pt file: a storage, the pickle, or a short record such as the version."""

    name: str
    header: int
    """Offset in the archive of the record's header, which the data follow."""
    nbytes: int
    """Bytes that the data take in the file."""
    crc32: int
    """CRC-32 of the data. 0 if none was recorded."""
    stored: bool
    """Whether the data are stored as they are. False if they are deflated."""
    whole: int
    """Bytes of the data after inflating."""

    @property
    def inner_name(self) -> str:
        """Name within the folder that all records are in: "data/0" for a storage, "data.pkl" for the pickle."""
        return self.name.partition("/")[2]

    @property
    def key(self) -> str | None:
        """Key by which the pickle refers to this storage. None for a record that is no storage."""
        name = self.inner_name
        return name[len("data/") :] if name.startswith("data/") else None

    def __str__(self) -> str:
        if self.inner_name == "data.pkl":
            return "the pickle"
        return f"record {self.inner_name}" if self.key is None else f"storage {self.key}"


class BadDirectory(ValueError):
    """The directory of a zip archive is missing, or contradicts itself or the size of the file."""


def entries(file: BinaryIO, begin: int = 0, end: int | None = None) -> list[Record]:
    """Read the directory of an archive and return its records in the order of the directory.

    Args:
        file: The file that the archive is in. Its position is changed.
        begin: Where the archive begins in the file.
        end: Where it ends. None for the end of the file.

    Raises:
        BadDirectory: If there is no valid directory.
    """
    size = (file.seek(0, os.SEEK_END) if end is None else end) - begin
    tail_at = max(0, size - _LONGEST_COMMENT - END.size - LOCATOR_64.size - END_64.size)
    file.seek(begin + tail_at)
    tail = file.read(size - tail_at)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or at + END.size > len(tail):
        raise BadDirectory(f"the directory at its end is missing: the file was cut off at byte {size}, or is no zip archive")
    _, *end_fields, _ = END.unpack_from(tail, at)
    disk, first_disk, here, count, nbytes, start = end_fields
    directory_end = tail_at + at
    if at >= LOCATOR_64.size and tail.startswith(b"PK\6\7", at - LOCATOR_64.size):
        _, end_disk, end_64, disks = LOCATOR_64.unpack_from(tail, at - LOCATOR_64.size)
        if not tail_at <= end_64 <= size - END_64.size or tail[end_64 - tail_at :][:4] != b"PK\6\6":
            raise BadDirectory(f"the end of the directory is not at byte {end_64}, where it should be")
        *_, disk, first_disk, here, count, nbytes, start = fields = END_64.unpack_from(tail, end_64 - tail_at)
        directory_end = end_64
        if end_64 + 12 + fields[1] != tail_at + at - LOCATOR_64.size:  # the size does not count what is before and of itself
            raise BadDirectory(f"the end of the directory, at byte {end_64}, cannot have {fields[1]} more bytes")
        for short, full, most in zip(end_fields, fields[4:], (*[0xFFFF] * 4, LARGE, LARGE), strict=True):
            if short not in (full, most):
                raise BadDirectory(f"the two ends of its directory contradict each other: one says {short}, the other {full}")
        if end_disk or disks != 1:
            raise BadDirectory(f"its directory should end on the first disk of 1, and ends on disk {end_disk} of {disks}")
    if nbytes > _LARGEST or count * ENTRY.size > nbytes:
        raise BadDirectory(f"its directory cannot have {count} records in {nbytes} bytes; at most {_LARGEST} bytes are read")
    if disk or first_disk or here != count:
        raise BadDirectory(f"{here} of its {count} records are on disk {disk}, the first is on disk {first_disk}: not all on 0")
    if start + nbytes != directory_end:
        raise BadDirectory(f"its directory should be at bytes {start} to {start + nbytes}, and ends at byte {directory_end}")
    file.seek(begin + start)
    try:
        found = _parse(file.read(nbytes), count, size)
    except struct.error as error:
        raise BadDirectory(f"its directory is damaged: {error}") from error
    _refuse_overlaps(found)
    deflated = next((record for record in found if not record.stored), None)
    if deflated is not None:  # checking one record is enough to tell a compressed archive from a damaged directory
        file.seek(begin + deflated.header)
        head = file.read(LOCAL_HEADER.size)
        data_of(head, deflated.header)
        if LOCAL_HEADER.unpack(head)[3] == _STORED:
            raise BadDirectory(f"its directory has record {deflated.name} as deflated, and the header before that as stored")
    return found


def _parse(directory: bytes, count: int, size: int) -> list[Record]:
    """Parse a directory and return its records.

    Args:
        directory: Bytes of the directory.
        count: Number of records.
        size: Bytes of the archive.

    Raises:
        BadDirectory: If the directory contradicts itself or the size of the archive.
        struct.error: If the directory is cut off.
    """
    found = []
    at = 0
    for _ in range(count):
        fields = ENTRY.unpack_from(directory, at)
        if fields[0] != b"PK\1\2":
            raise BadDirectory(f"its directory is damaged: no record's entry at byte {at} of it")
        _, _, needed, flags, method, _, _, crc32, nbytes, whole, *lengths, disk, _, external, header = fields
        name_length, extra_length, comment_length = lengths
        at += ENTRY.size
        try:
            name = directory[at : at + name_length].decode()
        except UnicodeDecodeError as error:
            raise BadDirectory(f"its directory is damaged: a record's name is not UTF-8: {error}") from error
        if needed & 0xFF > _NEWEST:
            raise BadDirectory(f"record {name} needs version {(needed & 0xFF) / 10} of the format, which ends at {_NEWEST / 10}")
        if external & _FOLDER:
            raise BadDirectory(f"record {name} is marked as a folder")
        if disk or flags & _ENCRYPTED or method not in (_STORED, _DEFLATED):
            raise BadDirectory(f"record {name} is on another disk, encrypted, or compressed in a way that torch does not read")
        at += name_length
        if LARGE in (nbytes, whole, header):
            numbers = _zip64(directory[at : at + extra_length])
            if len(numbers) < (whole, nbytes, header).count(LARGE):
                raise BadDirectory(f"its directory is damaged: record {name} lacks its size or its place")
            whole, nbytes, header = (numbers.pop(0) if field == LARGE else field for field in (whole, nbytes, header))
        at += extra_length + comment_length
        if header + LOCAL_HEADER.size + name_length + nbytes > size:
            raise BadDirectory(f"record {name} should have {nbytes} bytes behind byte {header}, and the file has {size}")
        if method == _STORED and nbytes != whole:
            raise BadDirectory(f"record {name} is stored, and cannot have {whole} bytes that take {nbytes}")
        found.append(Record(name, header, nbytes, crc32, method == _STORED, whole))
    if at != len(directory):
        raise BadDirectory(f"its directory is damaged: {count} records take {at} bytes of it, and it has {len(directory)}")
    return found


def _refuse_overlaps(found: Sequence[Record]) -> None:
    """Raise BadDirectory if two records share bytes of the file, or a name.

    With shared bytes, a small file could hold many records, each as large as the whole file.
    """
    end, last = 0, ""
    for record in sorted(found, key=lambda record: record.header):
        if record.header < end:
            raise BadDirectory(f"record {record.name} begins at byte {record.header}, within record {last}")
        end, last = record.header + LOCAL_HEADER.size + len(record.name) + record.nbytes, record.name
    if len({record.name for record in found}) < len(found):
        raise BadDirectory("two records have the same name")


def _zip64(extra: bytes) -> list[int]:
    """Return the 64-bit sizes and offset of a ZIP entry's Zip64 extra field, in order; an empty list if it has no such field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == ZIP64:
            return [number for (number,) in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + length // 8 * 8])]
        at += 4 + length
    return []


def data_of(head: bytes | bytearray, header: int) -> int:
    """Return the offset in the file at which the data of a record begin.

    Args:
        head: The first bytes of the record's header.
        header: Offset of the header in the file.

    Raises:
        BadDirectory: If this is not the header of a record.
    """
    if len(head) < LOCAL_HEADER.size or head[:4] != b"PK\3\4":
        raise BadDirectory(f"no record's header is at byte {header}")
    *_, name_length, extra_length = LOCAL_HEADER.unpack_from(head)
    return int(header + LOCAL_HEADER.size + name_length + extra_length)
