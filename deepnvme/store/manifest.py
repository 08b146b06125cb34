"""What a persisted store knows of its tensors, as a file that is replaced as a whole or not at all.

Two lines of JSON: what the file is, with the CRC-32 of the other line; and the tensors. It lies in the store's first directory.
The others hold a membership each, a line of JSON that names that directory, so that none is taken for a store of its own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

from deepnvme._files import UnfitFile, read_regular
from deepnvme._interrupts import defer_interrupts

from .directory_lock import naming

MANIFEST_NAME = "deepnvme-store.json"
MEMBERSHIP_NAME = "deepnvme-store.member.json"
_FORMAT = "deepnvme tensor store"
_VERSION = 1

_LARGEST = 1 << 30
"""Most bytes of a manifest: enough for ten million tensors."""
_LONGEST_LINE = 64 << 10
"""Most bytes of a manifest's first line, and of a membership."""
_LONGEST_NAME = 64 << 10
"""Characters of a tensor's name, as it is in the file."""
# What publish() writes, and nothing else: JSON of any kind could take thirty times the file's size, and minutes.
_PLAIN = rf'"([^"\\\x00-\x1f]{{0,{_LONGEST_NAME}}})"'  # a pattern with escapes in it would take 60 bytes for each of them
_BEGIN = re.compile(rf'\{{"store":{_PLAIN},"directories":([0-9]+),"tensors":\{{')
_NAME = re.compile(_PLAIN)
_TENSOR = re.compile(r':\["([a-z0-9_]+)",\[([0-9,]*)\],\[')
_PART = re.compile(r"\[([0-9]+),([0-9]+),([0-9]+)\],?")
_TENSOR_END = re.compile(r'\],(?:null|\[([0-9,]*)\])\](?:,(?=")|(?=\}))')
_END = "}}"


class CorruptManifest(OSError):
    """A manifest or a membership cannot be what was written (EBADMSG), or not by this version of the package."""

    def __init__(self, path: Path, why: str) -> None:
        text = f"this is not a whole manifest of a tensor store: {why}; restore it, or remove it with the data beside it"
        super().__init__(errno.EBADMSG, text, str(path))


@dataclass(frozen=True)
class StoredTensor:
    """One tensor."""

    dtype: str
    """As torch names it, without "torch."."""
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int, int], ...]
    """(directory, offset, length) of each, in the tensor's order; the directory as an index into the store's."""
    checksums: tuple[int, ...] | None
    """The CRC-32 of the first part, of the first two, and so on."""


@dataclass(frozen=True)
class StoreManifest:
    store: str
    """The store's identity."""
    directories: int
    """How many the store has."""
    tensors: Mapping[str, StoredTensor]


@dataclass(frozen=True)
class StoreMembership:
    store: str
    index: int
    """Of the directory that holds this, among the store's."""
    first: str
    """The directory with the manifest, when this was written."""


def publish(directory: Path, manifest: StoreManifest) -> None:
    """Replace the directory's manifest. After a crash at any point the old one is there, or the new one; both are whole."""
    # Names may hold surrogates, which ASCII JSON keeps.
    for name in manifest.tensors:
        check_length(name)
    tensors = {name: [each.dtype, each.shape, each.parts, each.checksums] for name, each in manifest.tensors.items()}
    body = json.dumps({"store": manifest.store, "directories": manifest.directories, "tensors": tensors}, separators=(",", ":"))
    head = json.dumps({"format": _FORMAT, "version": _VERSION, "crc32": zlib.crc32(body.encode())})
    data = f"{head}\n{body}\n".encode()
    if len(data) > _LARGEST:
        raise ValueError(
            f"the manifest of {len(tensors)} tensors would have {len(data)} bytes, at most {_LARGEST} are allowed:"
            " use several stores"
        )
    _replace(directory / MANIFEST_NAME, data)


def load(directory: Path) -> StoreManifest | None:
    """The directory's manifest, or None if it has none. Raises CorruptManifest, or OSError from reading."""
    path = directory / MANIFEST_NAME
    try:
        data = _read_at_most(path, _LARGEST)
    except FileNotFoundError:
        return None
    head, _, body = data.partition(b"\n")
    facts = _parsed(path, head)
    kind = facts.get("format"), facts.get("version")
    if kind != (_FORMAT, _VERSION):
        raise CorruptManifest(path, f"expected format and version {(_FORMAT, _VERSION)}, got {kind}")
    body = body.rstrip(b"\n")
    if facts.get("crc32") != zlib.crc32(body):
        raise CorruptManifest(path, f"expected CRC-32 {facts.get('crc32')!r}, found {zlib.crc32(body)}")
    try:
        return _manifest(body.decode("ascii"))
    except ValueError as error:
        raise CorruptManifest(path, str(error)) from error


def join(directory: Path, membership: StoreMembership) -> None:
    """Write the directory's membership."""
    _replace(directory / MEMBERSHIP_NAME, json.dumps(asdict(membership)).encode() + b"\n")


def membership(directory: Path) -> StoreMembership | None:
    """The directory's, or None if it has none. Raises CorruptManifest, or OSError from reading."""
    path = directory / MEMBERSHIP_NAME
    try:
        fields = _parsed(path, _read_at_most(path, _LONGEST_LINE))
        return StoreMembership(str(fields["store"]), int(fields["index"]), str(fields["first"]))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptManifest(path, f"{type(error).__name__}: {error}") from error


def remove(directory: Path) -> None:
    """Remove the manifest, the membership and what an interrupted replacement has left, as far as they are there."""
    for name in (MANIFEST_NAME, MEMBERSHIP_NAME):
        for path in (directory / name, directory / (name + ".new")):
            with contextlib.suppress(FileNotFoundError), naming(directory / name):
                os.unlink(path)


def _manifest(text: str) -> StoreManifest:
    """Raises ValueError saying what is wrong."""
    begin = _BEGIN.match(text)
    if begin is None:
        raise ValueError("its second line does not begin with a store's identity and its directories")
    at = begin.end()
    tensors: dict[str, StoredTensor] = {}
    while text.startswith('"', at):
        name, at = string_at(text, at)
        found = _TENSOR.match(text, at)
        at = at if found is None else found.end()
        parts = []
        while (part := _PART.match(text, at)) is not None:
            parts.append((int(part[1]), int(part[2]), int(part[3])))
            at = part.end()
        end = _TENSOR_END.match(text, at)
        if found is None or end is None:
            raise ValueError(f"the entry of tensor {name!r:.200} is not well-formed at byte {at} of the second line")
        if name in tensors:
            raise ValueError(f"tensor {name!r:.200} is there twice, at byte {at} of the second line")
        at = end.end()
        tensors[name] = StoredTensor(found[1], _numbers(found[2]), tuple(parts), None if end[1] is None else _numbers(end[1]))
    if text[at:] != _END:
        raise ValueError(f"expected a tensor or the end at byte {at} of the second line")
    return StoreManifest(begin[1], int(begin[2]), tensors)


def check_length(name: str) -> None:
    """Raises ValueError for one that :func:`string_at` would not take."""
    if len(name) > _LONGEST_NAME // 12 and len(json.dumps(name)) > _LONGEST_NAME + 2:  # two escapes of six for a character
        text = f"what begins with {name[:40]!r} would have {len(json.dumps(name)) - 2} characters in the manifest"
        raise ValueError(f"{text}, and may have {_LONGEST_NAME}: choose something shorter")


def string_at(text: str, at: int) -> tuple[str, int]:
    """The string that begins there in JSON, and where it ends. Raises ValueError if none does, or one that is too long."""
    plain = _NAME.match(text, at)
    if plain is not None:
        return plain[1], plain.end()
    try:
        name, length = scanstring(text[at : at + _LONGEST_NAME + 2], 1, True)
    except ValueError as error:
        raise ValueError(f"the string at byte {at} of the second line is none, or longer than {_LONGEST_NAME}: {error}") from None
    return name, at + length


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def _read_at_most(path: Path, most: int) -> bytes:
    """The file's bytes. Raises CorruptManifest if there are more than ``most``, or it is no regular file."""
    try:
        return read_regular(path, most)
    except UnfitFile as error:
        raise CorruptManifest(path, str(error)) from None


def _parsed(path: Path, line: bytes) -> dict[str, Any]:
    if len(line) > _LONGEST_LINE:
        raise CorruptManifest(path, f"its first line has {len(line)} bytes, at most {_LONGEST_LINE} are allowed")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorruptManifest(path, str(error)) from error
    if not isinstance(fields, dict):
        raise CorruptManifest(path, "expected an object")
    return fields


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(path.name + ".new")
    with naming(path):
        try:
            with open(new, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(new, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new)
            raise
    try:
        with defer_interrupts():  # a descriptor that nobody knew of would stay open
            directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)  # the name is the directory's data
            finally:
                os.close(directory)
    except OSError as error:
        text = f"{error.strerror}: it was replaced, but its directory could not be flushed: after a crash it may be the old one"
        raise OSError(error.errno, text, str(path)) from error
