"""Where the records of a zip archive lie, and the headers between them: as torch's writer lays them out, record for record.

Records are stored, not deflated, each from a multiple of an alignment on. The headers of one are padded with an extra field until
its data begins there. Sizes and checksums follow the data ("data descriptor"), and stand again in the directory at the end.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
DESCRIPTOR = struct.Struct("<4sIII")
DESCRIPTOR_64 = struct.Struct("<4sIQQ")
ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
END_64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR_64 = struct.Struct("<4sIQI")
END = struct.Struct("<4sHHHHIIH")

_DESCRIPTOR_FOLLOWS = 0x0008
_UTF8 = 0x0800
ZIP64 = 1
LARGE = 0xFFFFFFFF
"""From here on a size or an offset has its 8 bytes in an extra field."""
_PADDING = b"FB"
_ZIP64_END_SIZE = 44
_MADE_BY, _NEEDED = 0x031E, 45


class Record(NamedTuple):
    """A place in the archive."""

    header: bytes
    """What stands before its data, after that of the record before."""
    padding: int
    """Bytes after the header, before the data, of no meaning."""
    offset: int
    """Of the data, from the archive's first byte."""


class ZipLayout:
    """Records one after the other, then :meth:`end`."""

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._position = 0
        self._before = b""  # the descriptor of the last record
        self._entries: list[bytes] = []

    def add(self, name: str, nbytes: int, crc32: int) -> Record:
        """Place a record of so many bytes."""
        header_at = self._position
        raw = name.encode()
        flags = _UTF8 | (_DESCRIPTOR_FOLLOWS if nbytes else 0)
        large, far = nbytes >= LARGE, header_at >= LARGE
        extra = b""
        if large or far:
            numbers = ((nbytes, nbytes) if large else ()) + ((header_at,) if far else ())
            extra = struct.pack(f"<HH{len(numbers)}Q", ZIP64, 8 * len(numbers), *numbers)
        begin = header_at + LOCAL_HEADER.size + len(raw) + len(extra) + 4
        padding = -begin % self._alignment
        header = LOCAL_HEADER.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(raw), len(extra) + 4 + padding)
        field = struct.pack("<2sH", _PADDING, padding)
        before = b"".join((self._before, header, raw, extra, field))
        offset = begin + padding
        if not nbytes:
            self._before = b""
        elif large or far:
            self._before = DESCRIPTOR_64.pack(b"PK\7\10", crc32, nbytes, nbytes)
        else:
            self._before = DESCRIPTOR.pack(b"PK\7\10", crc32, nbytes, nbytes)
        small = min(nbytes, LARGE)
        self._entries.append(
            ENTRY.pack(
                b"PK\1\2", 0, 0, flags, 0, 0, 0, crc32, small, small, len(raw), len(extra), 0, 0, 0, 0, min(header_at, LARGE)
            )
            + raw
            + extra
        )
        self._position = offset + nbytes + len(self._before)
        return Record(before, padding, offset)

    def end(self) -> bytes:
        """What follows the data of the last record."""
        directory = b"".join(self._entries)
        count, start, size = len(self._entries), self._position, len(directory)
        return b"".join(
            (
                self._before,
                directory,
                END_64.pack(b"PK\6\6", _ZIP64_END_SIZE, _MADE_BY, _NEEDED, 0, 0, count, count, size, start),
                LOCATOR_64.pack(b"PK\6\7", 0, start + size, 1),
                END.pack(b"PK\5\6", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), size, min(start, LARGE), 0),
            )
        )
