"""What a .pt file holds: its records, and what is wrong with them."""

from __future__ import annotations

import bisect
import contextlib
import errno
import io
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO

from torch.serialization import LoadEndianness, get_default_load_endianness

from .cut_off import what_is_missing
from .pickle_scan import PickleScan, names_only_plain
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

    def __str__(self) -> str:
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
class Contents:
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
    with open(path, "rb") as file:
        return file.read(4) == b"PK\3\4"


def contents(path: str | os.PathLike[str]) -> Contents:
    """Read the directory of the archive. Raises CorruptCheckpoint, and OSError from reading."""
    with open(path, "rb") as file:
        try:
            found = entries(file)
        except BadDirectory as error:
            raise CorruptCheckpoint(path, what_is_missing(path) or str(error)) from error
        storages = []
        stored, script = True, False
        pickle = Record(None, 0, 0, 0)
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
                storages.append(Record(name[len("data/") :], entry.header, entry.nbytes, entry.crc32))
            elif name == "data.pkl":
                pickle = Record(None, entry.header, entry.nbytes, entry.crc32)
            elif name == "constants.pkl":
                script = True
            elif name == "byteorder" and entry.stored:
                file.seek(data_offset(path, file.fileno(), entry.header))
                byteorder = file.read(entry.nbytes).decode(errors="replace")
    if missing:
        raise CorruptCheckpoint(path, f"it has no record {min(missing)}, which all have that torch.save wrote")
    return Contents(tuple(sorted(storages, key=_header)), pickle, stored, byteorder, script)


def check_pickle(path: str | os.PathLike[str], found: Contents) -> None:
    """That its bytes are those that were saved: before anything is made of them. Raises WrongChecksum."""
    record = found.pickle
    if not (record.crc32 and found.stored):
        return
    with open(path, "rb") as file:
        offset = data_offset(path, file.fileno(), record.header)
        file.seek(offset)
        crc = zlib.crc32(file.read(record.nbytes))
    if crc != record.crc32:
        raise WrongChecksum(path, record, offset, crc)


def scan_of(path: str | os.PathLike[str], file: BinaryIO, found: Contents) -> PickleScan:
    """Of the file's pickle, to be loaded. Raises CorruptCheckpoint."""
    file.seek(data_offset(path, file.fileno(), found.pickle.header))
    return PickleScan(file)


def is_plain(path: str | os.PathLike[str], found: Contents) -> bool:
    """Whether unpickling looks at no storage's contents, so that they may be read afterwards. Raises CorruptCheckpoint."""
    with open(path, "rb") as file:
        file.seek(data_offset(path, file.fileno(), found.pickle.header))
        stream = file.read(found.pickle.nbytes)
    if names_only_plain(stream):
        return True
    scan = PickleScan(io.BytesIO(stream))
    try:
        scan.load()
    except Exception:  # another's pickle, or one that torch is going to refuse
        return False
    return scan.plain


def check_storages(path: str | os.PathLike[str], found: Contents) -> None:
    """That all are there which the pickle refers to, for a file that could not be loaded. Raises CorruptCheckpoint."""
    with open(path, "rb") as file:
        scan = scan_of(path, file, found)
        with contextlib.suppress(Exception):  # what was wrong with the pickle is said by who could not load it
            scan.load()
    there = {record.key for record in found.storages}
    for key, nbytes in scan.nbytes.items():
        if key not in there:
            raise CorruptCheckpoint(path, f"storage {key}: expected {nbytes} bytes, found none")


def data_offset(path: str | os.PathLike[str], descriptor: int, header: int) -> int:
    """Where the data begin of the record whose header is at ``header``. Raises CorruptCheckpoint."""
    try:
        return data_of(os.pread(descriptor, LOCAL_HEADER.size, header), header)
    except BadDirectory as error:
        raise CorruptCheckpoint(path, str(error)) from error


def data_offsets(path: str | os.PathLike[str], records: Iterable[Record]) -> list[int]:
    """Where their bytes begin. Raises CorruptCheckpoint."""
    with open(path, "rb") as file:
        return [data_offset(path, file.fileno(), record.header) for record in records]
