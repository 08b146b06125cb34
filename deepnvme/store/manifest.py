"""The file that lists a persisted store's tensors. It is always replaced as a whole.

The manifest is two lines of JSON: the first says what the file is, and has the CRC-32 of the second; the second lists the
tensors. It is in the store's first directory. Each of the other directories has a membership, one line of JSON that names the
first directory, so that none of them is mistaken for a store of its own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from deepnvme.files.regular_files import read_regular
from deepnvme.files.replacing import replacing, sync_directory, with_filename

Parsed = TypeVar("Parsed")
MANIFEST_NAME = "deepnvme-store.json"
"""Name of the manifest in the store's first directory."""
MEMBERSHIP_NAME = "deepnvme-store.member.json"
"""Name of the membership in each of the store's other directories."""
_KIND = "deepnvme tensor store", 1
"""Format and version."""

_LARGEST = 256 << 20
"""Most bytes of a manifest: enough for two million tensors. JSON of other people could take thirty times that in memory."""
_LONGEST_LINE = 64 << 10
"""Most bytes of a manifest's first line, and of a membership."""


class CorruptManifest(OSError):
    """A manifest or a membership is damaged (EBADMSG), or was not written by this version of the package."""

    def __init__(self, path: Path, why: str) -> None:
        text = f"this is not a whole manifest of a tensor store: {why}; restore it, or remove it with the data beside it"
        super().__init__(errno.EBADMSG, text, str(path))


class StoredTensor(NamedTuple):
    """One tensor in a manifest, which has these as a list."""

    dtype: str
    """Name of the dtype in torch, without "torch."."""
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int, int], ...]
    """(directory, offset, length) of each part, in the order of the tensor's bytes.

    The directory is an index into the store's directories; offset and length are in bytes.
    """
    checksums: tuple[int, ...] | None
    """Running CRC-32 values: of the first part, of the first two together, and so on. None if the store keeps none."""


@dataclass(frozen=True)
class StoreManifest:
    """What the manifest in a store's first directory says: which tensors there are, and where each lies."""

    store: str
    """The store's unique identity."""
    directories: int
    """Number of the store's directories."""
    tensors: Mapping[str, StoredTensor]
    """The tensors by name."""


@dataclass(frozen=True)
class StoreMembership:
    """What each further directory of a store says: whose directory it is, and where the manifest is."""

    store: str
    """The store's unique identity."""
    index: int
    """Index of the directory that this is in, among the store's directories."""
    first: str
    """The directory with the manifest, at the time when this was written."""
    directory: str = ""
    """The directory that this is in, at that time. Empty in stores that earlier versions of the package have made."""
    previous: str = ""
    """The identity that the manifest may have still, while the store is given a new one."""


def publish(directory: Path, manifest: StoreManifest) -> None:
    """Replace the directory's manifest, atomically and durably.

    After a crash at any point, either the old manifest or the new one is there, and it is whole.

    Raises:
        ValueError: If the manifest is too long.
        OSError: From writing.
    """
    data = two_lines(_KIND, {"store": manifest.store, "directories": manifest.directories, "tensors": dict(manifest.tensors)})
    if len(data) > _LARGEST:
        raise ValueError(
            f"the manifest of {len(manifest.tensors)} tensors would have {len(data)} bytes, at most {_LARGEST} are allowed:"
            " use several stores"
        )
    _replace(directory / MANIFEST_NAME, data)


def load(directory: Path) -> StoreManifest | None:
    """Return the directory's manifest, or None if it has none.

    Raises:
        CorruptManifest: If it is damaged.
        OSError: From reading.
    """
    return _loaded(directory / MANIFEST_NAME, _LARGEST, lambda data: _manifest(second_line(_KIND, data)))


def two_lines(kind: tuple[str, int], fields: Mapping[str, Any]) -> bytes:
    """Return a manifest in JSON: one line with its format, version and the CRC-32 of the other, and one with the fields."""
    body = json.dumps(fields, separators=(",", ":")).encode()  # in ASCII, which can escape half of a surrogate pair
    head = json.dumps({"format": kind[0], "version": kind[1], "crc32": zlib.crc32(body)}).encode()
    return b"%b\n%b\n" % (head, body)


def second_line(kind: tuple[str, int], data: bytes) -> Any:
    """Return the fields of a manifest that :func:`two_lines` has made, after checking its format, version and CRC-32.

    Args:
        kind: The format and version that it has to have.
        data: The manifest.

    Raises:
        ValueError: If it is damaged, or of another format or version.
        RecursionError: If it is nested too deeply.
    """
    head, _, body = data.partition(b"\n")
    facts = _parsed(head)
    found = facts.get("format"), facts.get("version")
    if found != kind:
        raise ValueError(f"expected format and version {kind}, got {found}")
    body = body.rstrip(b"\n")
    if facts.get("crc32") != zlib.crc32(body):
        raise ValueError(f"expected CRC-32 {facts.get('crc32')!r}, found {zlib.crc32(body)}")
    return json.loads(body)  # from_json of pydantic_core refuses names with half of a surrogate pair


def join(directory: Path, membership: StoreMembership) -> None:
    """Write the directory's membership, replacing any other, atomically and durably."""
    _replace(directory / MEMBERSHIP_NAME, json.dumps(asdict(membership)).encode() + b"\n")


def membership(directory: Path) -> StoreMembership | None:
    """Return the directory's membership, or None if it has none.

    Raises:
        CorruptManifest: If it is damaged.
        OSError: From reading.
    """
    return _loaded(directory / MEMBERSHIP_NAME, _LONGEST_LINE, _membership)


def remove(directory: Path) -> None:
    """Remove the manifest, the membership and the leftovers of an interrupted replacement, whichever exist."""
    for name in (MANIFEST_NAME, MEMBERSHIP_NAME):
        for path in (directory / name, directory / (name + ".new")):
            with contextlib.suppress(FileNotFoundError), with_filename(directory / name, instead=True):
                os.unlink(path)


def _loaded(path: Path, most: int, parse: Callable[[bytes], Parsed]) -> Parsed | None:
    """Return what ``parse`` makes of a file of at most ``most`` bytes; None if there is no file. Raises CorruptManifest."""
    try:
        return parse(read_regular(path, most))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise CorruptManifest(path, str(error)) from error


def _membership(data: bytes) -> StoreMembership:
    """Parse a membership. Raises ValueError or RecursionError."""
    fields = _parsed(data)
    try:
        more = str(fields.get("directory", "")), str(fields.get("previous", ""))
        return StoreMembership(str(fields["store"]), int(fields["index"]), str(fields["first"]), *more)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _manifest(fields: Any) -> StoreManifest:
    """Return the manifest that the second line says. Raises ValueError that says what is wrong."""
    try:
        tensors = {name: _tensor(*entry) for name, entry in fields["tensors"].items()}
        return StoreManifest(string(fields["store"]), number(fields["directories"]), tensors)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its second line is not as a store writes it: {type(error).__name__}: {error}") from None


def _tensor(dtype: Any, shape: Any, parts: Any, checksums: Any) -> StoredTensor:
    """Return a tensor of which the manifest says these. Raises TypeError or ValueError if they are something else."""
    places = tuple((directory, offset, length) for directory, offset, length in map(numbers, parts))
    return StoredTensor(string(dtype), numbers(shape), places, None if checksums is None else numbers(checksums))


def string(value: Any) -> str:
    """Return a value of JSON that has to be a string. Raises TypeError if it is something else."""
    if type(value) is not str:
        raise TypeError(f"expected a string, got {type(value).__name__}")
    return value


def numbers(value: Any) -> tuple[int, ...]:
    """Return a list of JSON as numbers. Raises TypeError if it is not a list of integers, each at least 0."""
    if type(value) is not list:
        raise TypeError(f"expected a list, got {type(value).__name__}")
    return tuple(map(number, value))


def number(value: Any) -> int:
    """Return a value of JSON that has to be an integer, not negative. Raises TypeError if it is something else."""
    if type(value) is not int or value < 0:
        raise TypeError(f"expected an integer of at least 0, got {value!r:.100}")
    return value


def _parsed(line: bytes) -> dict[str, Any]:
    """Return the JSON object in one line. Raises ValueError or RecursionError."""
    if len(line) > _LONGEST_LINE:
        raise ValueError(f"its first line has {len(line)} bytes, at most {_LONGEST_LINE} are allowed")
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("expected an object")
    return fields


def _replace(path: Path, data: bytes) -> None:
    """Replace the file's contents, atomically and durably."""
    new = path.with_name(path.name + ".new")
    with with_filename(path, instead=True), replacing(path, new), open(new, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    try:
        sync_directory(path.parent)  # makes the new name durable
    except OSError as error:
        text = f"{error.strerror}: it was replaced, but its directory could not be flushed: after a crash it may be the old one"
        raise OSError(error.errno, text, str(path)) from error
