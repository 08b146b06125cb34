"""Read the directory at the end of a zip archive, by the standard library's reader, within limits of memory."""

from __future__ import annotations

import os
import struct
import zipfile
from typing import BinaryIO, NamedTuple, cast

LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_ENDS = struct.Struct("<4s44xQ4s4xQ4x4s12xI2x")
"""The end of a directory with 64-bit numbers, its locator, and the end that all archives have."""

_REFUSED_FLAGS = 0x2061
"""Flags of encrypted data, patches, strongly encrypted data, and an encrypted directory."""
_UTF_8 = 0x800
_FOLDER = 0x10
"""File attribute of a folder. torch reads no data of a record that has it, whatever the record's name."""
_LARGEST = 64 << 20
"""Most bytes of a directory, enough for half a million records."""


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

    @property
    def inner_name(self) -> str:
        """Name within the folder that all records are in: "data/0" for a storage, "data.pkl" for the pickle."""
        return self.name.partition("/")[2]

    @property
    def key(self) -> str | None:
        """Key by which the pickle refers to this storage. None for a record that is not a storage."""
        name = self.inner_name
        return name[len("data/") :] if name.startswith("data/") else None

    def __str__(self) -> str:
        if self.inner_name == "data.pkl":
            return "the pickle"
        return f"record {self.inner_name}" if self.key is None else f"storage {self.key}"


class BadDirectory(ValueError):
    """The directory of a zip archive is missing, or contradicts itself or the size of the file."""


class _Part:
    """A part of a file, as ``zipfile`` reads it. Refuses to read more than a directory may have."""

    def __init__(self, file: BinaryIO, begin: int, end: int) -> None:
        self._file, self._begin, self._end = file, begin, end

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, relative to the part. Raises OSError before its beginning."""
        at = offset + (self._begin, self._file.tell(), self._end)[whence]
        if at < self._begin:
            raise OSError("before the beginning")  # how zipfile finds out that a file is too short
        return self._file.seek(at) - self._begin

    def tell(self) -> int:
        """Return the position, relative to the part."""
        return self._file.tell() - self._begin

    def read(self, nbytes: int = -1) -> bytes:
        """Read so many bytes, or all up to the end. Raises BadDirectory for more than a directory may have."""
        left = self._end - self._file.tell()
        wanted = max(left if nbytes < 0 else min(nbytes, left), 0)
        if wanted > _LARGEST:
            raise BadDirectory(f"its directory has more than {_LARGEST} bytes")
        return self._file.read(wanted)


def entries(file: BinaryIO, begin: int = 0, end: int | None = None) -> list[Record]:
    """Read the directory of an archive and return its records in the order of the file.

    Args:
        file: The file that the archive is in. Its position is changed.
        begin: Where the archive begins in the file.
        end: Where it ends. None for the end of the file.

    Raises:
        BadDirectory: If there is no valid directory, or two records share a name or bytes of the file.
        OSError: If the file cannot be read.
    """
    end = file.seek(0, os.SEEK_END) if end is None else end
    try:
        with zipfile.ZipFile(cast(BinaryIO, _Part(file, begin, end))) as archive:
            infos, start, after = archive.infolist(), archive.start_dir, end - len(archive.comment)
    except BadDirectory:
        raise
    except (zipfile.BadZipFile, NotImplementedError, ValueError, ArithmeticError, LookupError, struct.error) as error:
        if isinstance(error.__context__, OSError) and error.__context__.errno is not None:
            raise error.__context__ from None
        why = f"its directory cannot be read ({error}): the file was cut off at byte {end - begin}, or is damaged"
        raise BadDirectory(why) from error
    # torch's reader follows these numbers, which zipfile does not compare: it could find another directory than this.
    file.seek(max(begin, after - _ENDS.size))
    ends = file.read(after - file.tell()).rjust(_ENDS.size, b"\0")
    end_64, start_64, locator, at_64, kind, named = _ENDS.unpack(ends)
    if locator == b"PK\6\7":
        named = start_64 if end_64 == b"PK\6\6" and at_64 == after - _ENDS.size - begin else -1
    if kind != b"PK\5\6" or named != start:
        raise BadDirectory(f"its directory is at byte {start}, which is not where its end says")
    found = []
    after, last = 0, ""
    for info in sorted(infos, key=lambda info: info.header_offset):
        name, header, nbytes = info.filename, info.header_offset, info.compress_size
        if not name.isascii():
            name = os.fsdecode(info.orig_filename.encode("utf-8" if info.flag_bits & _UTF_8 else "cp437"))
        stored = info.compress_type == zipfile.ZIP_STORED
        readable = stored or info.compress_type == zipfile.ZIP_DEFLATED
        if info.flag_bits & _REFUSED_FLAGS or info.external_attr & _FOLDER or not readable:
            raise BadDirectory(f"record {name} is encrypted, a folder, or compressed in a way that torch does not read")
        if stored and nbytes != info.file_size:
            raise BadDirectory(f"record {name} is stored, and cannot have {info.file_size} bytes that take {nbytes}")
        if header < after:
            raise BadDirectory(f"record {name} begins at byte {header}, within record {last}")
        after, last = header + LOCAL_HEADER.size + len(name) + nbytes, name
        if after > end - begin:
            raise BadDirectory(f"record {name} should have {nbytes} bytes behind byte {header}, and the file has {end - begin}")
        found.append(Record(name, header, nbytes, info.CRC, stored))
    if len({record.name for record in found}) < len(found):
        raise BadDirectory("two records have the same name")
    return found


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
