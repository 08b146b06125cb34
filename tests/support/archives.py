"""Archives as torch.save writes them: compared, and packed again."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

from deepnvme.checkpoint.formats.zip_directory import data_of, entries


def without_identity(data: bytes) -> bytes:
    """With zeros for what torch.save draws from a hash of its own: 40 digits, and their CRC-32, which stands there twice."""
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        record = next(record for record in opened.infolist() if record.filename.endswith(".data/serialization_id"))
    at = data_of(data[record.header_offset :][:30], record.header_offset)  # not read(), which refuses what has no checksum
    digits, crc = data[at : at + 40], record.CRC.to_bytes(4, "little")
    assert re.fullmatch(rb"\d{40}", digits)
    assert data.count(digits) == 1
    return data[:at] + (bytes(40) + data[at + 40 :]).replace(crc, bytes(4), 2)


def assert_identical(found: bytes, expected: bytes) -> None:
    """But for the identity that torch.save draws."""
    found, expected = without_identity(found), without_identity(expected)
    if found != expected:
        at = next((at for at, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected)))
        raise AssertionError(f"{found[at - 20 : at + 40]!r} instead of {expected[at - 20 : at + 40]!r} at byte {at}")


def place_of(path: Path, record: str) -> int:
    """Where the data of a record begin."""
    with path.open("rb") as file:
        header = next(entry.header for entry in entries(file) if entry.name.endswith(record))
        file.seek(header)
        return data_of(file.read(30), header)


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """Return a copy of an archive beside it, with each record as ``change`` returns it for its name and data, or without it."""
    copy = path.with_suffix(".rewritten")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(copy, "w") as new:
        for name in old.namelist():
            data = change(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
    return copy


def big_endian(name: str, data: bytes) -> bytes:
    """For :func:`rewritten`: the archive says that its storages are big-endian."""
    return b"big" if name.endswith("byteorder") else data


def rezipped(path: Path, compression: int = zipfile.ZIP_STORED, folder: str | None = None) -> None:
    """As another program packs the records again, in alphabetical order."""
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, data in sorted(records.items()):
            new.writestr(name if folder is None else f"{folder}/{name.partition('/')[2]}", data)
