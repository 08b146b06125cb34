"""What a .pt file holds: its records, where they lie, and what is wrong with them."""

from __future__ import annotations

import errno
import io
import os
import pickle
import struct
import zipfile
from dataclasses import dataclass
from typing import Any

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_DESCRIPTOR, _DESCRIPTOR_64 = 16, 24
_LARGE = 0xFFFFFFFF


class CorruptCheckpoint(OSError):
    """A file is not, or not wholly, what was saved (EBADMSG); the message says which part of it."""

    def __init__(self, path: str | os.PathLike[str], why: str) -> None:
        super().__init__(errno.EBADMSG, why, os.fspath(path))


@dataclass(frozen=True)
class StorageRecord:
    """The bytes of one storage."""

    key: str
    offset: int
    """Of its first byte in the file."""
    nbytes: int
    crc32: int
    """0: none was kept."""


@dataclass(frozen=True)
class Contents:
    """Of an archive that torch.save made."""

    storages: tuple[StorageRecord, ...]
    stored: bool
    """Whether the records lie in the file as they are, and not deflated."""
    byteorder: str
    script: bool
    """Whether it is a TorchScript archive."""


def is_zip(path: str | os.PathLike[str]) -> bool:
    """As torch.load tells the zip format from the older ones: by the first bytes."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\3\4"


def contents(path: str | os.PathLike[str]) -> Contents:
    """Read the directory of the archive. Raises CorruptCheckpoint, and OSError from reading."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            archive = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, struct.error, ValueError, EOFError) as error:
            raise CorruptCheckpoint(path, _what_is_missing(file, size) or f"it ends without a directory: {error}") from error
        storages = []
        stored, script = True, False
        byteorder = "little"
        for info in archive.infolist():
            _, _, name = info.filename.partition("/")
            stored = stored and info.compress_type == zipfile.ZIP_STORED
            script = script or name == "constants.pkl"
            if name == "byteorder":
                byteorder = archive.read(info).decode(errors="replace")
            if name.startswith("data/"):
                key = name[len("data/") :]
                file.seek(info.header_offset)
                head = file.read(_LOCAL_HEADER.size)
                if len(head) < _LOCAL_HEADER.size or head[:4] != b"PK\3\4":
                    raise CorruptCheckpoint(path, f"storage {key}: its header at byte {info.header_offset} is not one")
                _, name_length, extra_length = _LOCAL_HEADER.unpack(head)
                offset = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
                if offset + info.compress_size > size:
                    raise CorruptCheckpoint(path, _cut(key, info.file_size, offset, size))
                storages.append(StorageRecord(key, offset, info.file_size, info.CRC))
    return Contents(tuple(storages), stored, byteorder, script)


def _cut(key: str, nbytes: int, offset: int, size: int) -> str:
    found = max(0, size - offset)
    return f"storage {key} is cut off: expected {nbytes} bytes from byte {offset} on, found {found}; the file has {size}"


def _what_is_missing(file: io.BufferedReader, size: int) -> str | None:
    """Of an archive whose end is missing: the first storage that is not whole, by what the pickle says of it."""
    try:
        file.seek(0)
        at, numels = _data_of(file, 0), {}
        file.seek(at)
        stream = file.read(min(size, 1 << 30))
        referred = _Referred(io.BytesIO(stream))
        referred.load()
        numels = referred.nbytes
        header = at + stream.index(b"PK\3\4", referred.consumed)
        while header < size:
            offset = _data_of(file, header)
            file.seek(header + _LOCAL_HEADER.size)
            name = file.read(offset - header).split(b"FB")[0]
            _, _, short = name.decode(errors="replace").partition("/")
            if not short.startswith("data/"):
                file.seek(offset)
                header = offset + file.read(1 << 16).index(b"PK\3\4")
                continue
            key = short[len("data/") :].rstrip("\0\1")
            nbytes = numels[key]
            if offset + nbytes > size:
                return _cut(key, nbytes, offset, size)
            header = offset + nbytes + ((_DESCRIPTOR_64 if max(nbytes, header) >= _LARGE else _DESCRIPTOR) if nbytes else 0)
    except Exception:  # of a file that was never one of ours, or whose beginning is gone as well
        return None
    return None


def _data_of(file: io.BufferedReader, header: int) -> int:
    """Where the data of the record begins whose header is at ``header``."""
    file.seek(header)
    signature, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != b"PK\3\4":
        raise ValueError("no header")
    return int(header + _LOCAL_HEADER.size + name_length + extra_length)


class _Anything:
    """Stands for whatever a pickle makes: nothing of it is imported, or called."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Anything:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None: ...
    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, value: Any) -> None: ...
    def extend(self, values: Any) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> _Anything:
        return self


class _Referred(pickle.Unpickler):
    """Finds the storages that a pickle refers to."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._stream = stream
        self.nbytes: dict[str, int] = {}

    @property
    def consumed(self) -> int:
        return self._stream.tell()

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.endswith("Storage"):
            return _StorageKind(name)
        return _Anything

    def persistent_load(self, saved: Any) -> Any:
        _, kind, key, _, numel = saved
        self.nbytes[key] = numel * kind.itemsize
        return _Anything()


class _StorageKind:
    def __init__(self, name: str) -> None:
        import torch

        kind = getattr(torch, name, None)
        self.itemsize: int = 1 if kind is None or name == "UntypedStorage" else kind.dtype.itemsize
