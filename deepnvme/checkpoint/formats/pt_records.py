"""Read the directory and the records of a .pt file, and report which part of the file is damaged."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch.serialization import LoadEndianness, get_default_load_endianness

from deepnvme.files.regular_files import open_regular
from deepnvme.files.replacing import with_filename
from deepnvme.memory.host import address_range
from deepnvme.telemetry.descriptions import shorten

from .pickle_scan import refusal_reason
from .pt_pickle import Place, unpickled
from .zip_directory import LOCAL_HEADER, BadDirectory, Record, data_of, entries


class CorruptCheckpoint(OSError):
    """A file is damaged, cut off, or not a checkpoint. An OSError (EBADMSG) whose message says which part is damaged.

    Args:
        path: The file.
        why: What is wrong. Also the attribute ``why``.
    """

    def __init__(self, path: str | os.PathLike[str], why: str) -> None:
        super().__init__(errno.EBADMSG, why, os.fspath(path))
        self.why = why

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle the error, and those of subclasses, by what the message says."""
        return _corrupt_checkpoint, (type(self), self.filename, self.why)


def _corrupt_checkpoint(kind: type[CorruptCheckpoint], path: str, why: str) -> CorruptCheckpoint:
    """Return a copy of an error, of the class ``kind``."""
    error = kind.__new__(kind)
    CorruptCheckpoint.__init__(error, path, why)
    return error


class WrongChecksum(CorruptCheckpoint):
    """The bytes of a storage or of the pickle do not match the checksum that was saved.

    Args:
        path: The file.
        record: The damaged record.
        offset: Where the record's data begin in the file, in bytes.
        crc32: CRC-32 of the data in the file.
    """

    def __init__(self, path: str | os.PathLike[str], record: Record, offset: int, crc32: int) -> None:
        where = f"{record}, {record.nbytes} bytes from byte {offset} on"
        super().__init__(path, f"{where}: expected CRC-32 {record.crc32:08x}, found {crc32:08x}")


@dataclass(frozen=True)
class PtRecords:
    """The directory of an archive that torch.save wrote."""

    storages: tuple[Record, ...]
    """The storages in the order of the file."""
    pickle: Record
    """The record of the pickle."""
    others: tuple[Record, ...]
    """All other records, such as the version and the byte order."""
    stored: bool
    """Whether all records are stored as they are. False if any is deflated."""
    storages_readable: bool
    """Whether the storages' bytes in the file are those in memory: not deflated, and little-endian."""


class StoragePlaces:
    """Where the data of the storages of a file are, by their keys in the pickle.

    Args:
        path: The file.
        found: Its directory.

    Raises:
        CorruptCheckpoint: If a record's header is damaged, or the data would end past the end of the file.
    """

    def __init__(self, path: str | os.PathLike[str], found: PtRecords) -> None:
        self._path = path
        offsets = data_offsets(path, found.storages)
        self.places = {str(record.key): (record, offset) for record, offset in zip(found.storages, offsets, strict=True)}
        """The record and the offset in the file of each storage."""

    def place(self, key: str, nbytes: int) -> tuple[Record, int]:
        """Return the record and the offset in the file of a storage. Raises CorruptCheckpoint if it does not have this size."""
        record, offset = self.places.get(key, (None, 0))
        if record is None:
            raise CorruptCheckpoint(self._path, f"storage {key}: expected {nbytes} bytes, found none")
        if record.nbytes != nbytes:
            why = f"storage {key} at byte {offset}: expected {nbytes} bytes, found {record.nbytes}"
            raise CorruptCheckpoint(self._path, why)
        return record, offset


class UnreadStorages:
    """Storages with addresses but without memory. Their addresses tell where their bytes are in the file.

    Args:
        path: The file.
        storages: Where its storages are.
    """

    def __init__(self, path: str | os.PathLike[str], storages: StoragePlaces) -> None:
        self._storages = storages
        self._size = os.path.getsize(path)
        self._addresses: Any = address_range(self._size).untyped_storage()

    def place(self, key: str, nbytes: int, location: str) -> torch.UntypedStorage:
        """Return a storage for a key of the pickle; see :func:`unpickled`."""
        _, offset = self._storages.place(key, nbytes)
        if not nbytes:
            return torch.UntypedStorage(0, device="cpu")  # type: ignore[no-untyped-call]
        unread: torch.UntypedStorage = self._addresses[offset : offset + nbytes]
        return unread

    def offset_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the offset in the file of one of these storages, or None for any other."""
        if storage.device.type != "cpu" or not storage.nbytes():
            return None
        inside = storage.data_ptr() - self._addresses.data_ptr()
        return inside if 0 <= inside < self._size else None


def unpickle(path: str | os.PathLike[str], stream: bytes, place: Place, weights_only: bool, **options: Any) -> Any:
    """Return the object of a file's pickle. The arguments are those of :func:`unpickled`, after the path for errors.

    Raises:
        CorruptCheckpoint: If a tensor is larger than its storage.
        Exception: Whatever unpickling or ``place`` raises.
    """
    try:
        return unpickled(stream, place, weights_only, **options)
    except RuntimeError as error:
        if "resize storage that is not resizable" in str(error):  # torch has no type of its own for it
            raise CorruptCheckpoint(path, "a tensor is larger than its storage") from error
        raise


def is_zip(path: str | os.PathLike[str]) -> bool:
    """Return whether the file begins like a zip archive. torch.load tells .pt files from the older formats in the same way."""
    with with_filename(path), open_regular(path) as file:
        return file.read(4) == b"PK\3\4"


def is_pickle(path: str | os.PathLike[str]) -> bool:
    """Return whether the file begins like a pickle of protocol 2 or higher, as files of torch before 1.6 do.

    False for a safetensors file, although that may begin with the same byte.
    """
    with with_filename(path), open_regular(path) as file:
        head = file.read(9)
    return len(head) == 9 and head[:1] == b"\x80" and head[8:] != b"{"


def records_of(path: str | os.PathLike[str]) -> PtRecords:
    """Read the directory of an archive that torch.save wrote. Blocks.

    Raises:
        CorruptCheckpoint: If the directory is damaged or lacks records that torch.save writes, or is TorchScript's.
        OSError: If the file cannot be read.
    """
    with open_regular(path) as file:
        try:
            found = entries(file)
        except BadDirectory as error:
            raise CorruptCheckpoint(path, str(error)) from error
    records = {record.name.partition("/")[2]: record for record in found}
    if "constants.pkl" in records:
        raise CorruptCheckpoint(path, "it is a TorchScript archive, which holds programs: use torch.jit.load, if you trust it")
    folder = f"{found[0].name.partition('/')[0]}/" if found else ""
    if (
        "data.pkl" not in records
        or not {"version", ".data/version"} & records.keys()
        or not all(record.name.startswith(folder) for record in found)
    ):
        names = shorten([record.name for record in found])
        raise CorruptCheckpoint(path, f"torch.save has not written it, with data.pkl and version in one folder: it has {names}")
    byteorder = b"big" if get_default_load_endianness() is LoadEndianness.BIG else b"little"
    if "byteorder" in records and records["byteorder"].stored:
        byteorder = read_record(path, records["byteorder"]._replace(nbytes=min(records["byteorder"].nbytes, 9)))
        if byteorder not in (b"little", b"big"):
            raise CorruptCheckpoint(path, f"record byteorder cannot be {byteorder!r}")
    stored = all(record.stored for record in found)
    others = tuple(record for name, record in records.items() if name != "data.pkl" and not name.startswith("data/"))
    storages = tuple(record for name, record in records.items() if name.startswith("data/"))
    return PtRecords(storages, records["data.pkl"], others, stored, stored and byteorder == b"little")


def read_record(path: str | os.PathLike[str], record: Record) -> bytes:
    """Return the data of a stored record. Blocks.

    Raises:
        CorruptCheckpoint: If the record is damaged or cut off. WrongChecksum if its bytes differ from those that were saved.
    """
    with open_regular(path) as file:
        offset = _data_offset(path, file, record)
        file.seek(offset)
        data = file.read(record.nbytes)
    if record.crc32 and (crc := zlib.crc32(data)) != record.crc32:
        raise WrongChecksum(path, record, offset, crc)
    return data


def check_pickle(path: str | os.PathLike[str], found: PtRecords) -> bytes:
    """Return the pickle, after checking its checksum, and that unpickling it would not waste memory or time.

    The pickle of an archive with deflated records, which torch reads, is neither checked here nor returned.

    Raises:
        CorruptCheckpoint: If the bytes differ from those that were saved, or no pickler writes them: see
            :func:`refusal_reason`.
    """
    stream = read_record(path, found.pickle) if found.stored else b""
    if found.stored:
        refuse_wasteful(path, stream)
    return stream


def refuse_wasteful(path: str | os.PathLike[str], stream: bytes) -> None:
    """Raise CorruptCheckpoint for a pickle that must not be unpickled; see :func:`refusal_reason`."""
    why = refusal_reason(stream)
    if why is not None:
        raise CorruptCheckpoint(path, f"the pickle {why}")


DAMAGE = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError, struct.error,
)  # fmt: skip
"""Types of the errors that unpickling raises for damaged bytes, besides UnpicklingError."""


def data_offsets(path: str | os.PathLike[str], records: Iterable[Record]) -> list[int]:
    """Return the offsets in the file at which the data of the records begin.

    Raises:
        CorruptCheckpoint: If a record's header is damaged, or the data would end past the end of the file.
    """
    with open_regular(path) as file:
        return [_data_offset(path, file, record) for record in records]


def _data_offset(path: str | os.PathLike[str], file: BinaryIO, record: Record) -> int:
    """Return the offset in the file at which a record's data begin. Raises like :func:`data_offsets`."""
    file.seek(record.header)
    expected = os.fsencode(record.name)
    head = file.read(LOCAL_HEADER.size + len(expected))
    try:
        offset = data_of(head, record.header)
    except BadDirectory as error:
        raise CorruptCheckpoint(path, str(error)) from error
    name = head[LOCAL_HEADER.size :]
    if name != expected or head[26:28] != len(expected).to_bytes(2, "little"):  # the length of the name
        raise CorruptCheckpoint(path, f"{record}: the header at byte {record.header} names it {name!r}, and not {record.name!r}")
    size = os.fstat(file.fileno()).st_size
    if offset + record.nbytes > size:
        why = f"{record} should have {record.nbytes} bytes from byte {offset} on, and the file ends at byte {size}"
        raise CorruptCheckpoint(path, why)
    return offset
