"""Read manifests, which may be damaged or not trusted, and check their content.

A manifest is a small JSON file that lists what other files contain. A store's manifest, and that of weights in a
store, has two lines: the first has format, version and the CRC-32 of the second, which has the fields. A table's
manifest is a single object. ``deepnvme.files.replacing.replace_durably`` writes manifests.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from deepnvme.files.regular_files import read_regular

Parsed = TypeVar("Parsed")
LONGEST_LINE = 64 << 10
"""Most bytes of the first line of a manifest that has two lines."""
MOST_DIMENSIONS = 64
"""Most sizes of a shape: torch computes with no more, and the product of a million sizes takes hours."""


def read_manifest(path: Path, most: int, parse: Callable[[bytes], Parsed], corrupt: Callable[[Path, str], OSError]) -> Parsed:
    """Read a manifest, parse it with ``parse`` and return the result. Blocks.

    Args:
        path: The manifest.
        most: Most bytes that the manifest may have.
        parse: Returns the content. Raises LookupError, RecursionError, TypeError or ValueError (such as pydantic's
            ValidationError) for damaged bytes.
        corrupt: Returns the error to raise if the manifest is damaged, from its path and the reason.

    Raises:
        FileNotFoundError: If there is no manifest.
        OSError: From reading; or what ``corrupt`` returns if the manifest is damaged, too large or not a regular file.
    """
    try:
        return parse(read_regular(path, most))
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        raise corrupt(path, str(error)) from error


def with_checksum(kind: tuple[str, int], fields: Mapping[str, Any]) -> bytes:
    """Return a manifest in JSON: a line with its format, its version and the CRC-32 of the other line, which has the fields."""
    body = json.dumps(fields, separators=(",", ":")).encode()  # in ASCII, which can escape half of a surrogate pair
    head = json.dumps({"format": kind[0], "version": kind[1], "crc32": zlib.crc32(body)}).encode()
    return b"%b\n%b\n" % (head, body)


def checked_fields(kind: tuple[str, int], data: bytes) -> Any:
    """Return the fields of a manifest that :func:`with_checksum` has made, after checking its format, version and CRC-32.

    Args:
        kind: The format and version that the manifest must have.
        data: The manifest.

    Raises:
        ValueError: If the manifest is damaged, or of another format or version.
        RecursionError: If the JSON is nested too deeply.
    """
    head, _, body = data.partition(b"\n")
    facts = json_object(head)
    found = facts.get("format"), facts.get("version")
    if found != kind:
        raise ValueError(f"expected format and version {kind}, got {found}")
    body = body.rstrip(b"\n")
    if facts.get("crc32") != zlib.crc32(body):
        raise ValueError(f"expected CRC-32 {facts.get('crc32')!r}, found {zlib.crc32(body)}")
    return json.loads(body)  # from_json of pydantic_core refuses names with half of a surrogate pair


def string(value: Any) -> str:
    """Return a value from JSON that has to be a string. Raises TypeError for any other value."""
    if type(value) is not str:
        raise TypeError(f"expected a string, got {type(value).__name__}")
    return value


def numbers(value: Any, most: int = 1 << 16) -> tuple[int, ...]:
    """Return a list from JSON as a tuple of integers. Raises TypeError unless it is a list of at most ``most``, of at least 0."""
    if type(value) is not list or len(value) > most:
        raise TypeError(f"expected a list of at most {most} numbers, got {type(value).__name__}")
    return tuple(map(number, value))


def number(value: Any) -> int:
    """Return a value from JSON that has to be an integer of at least 0. Raises TypeError for any other value."""
    if type(value) is not int or value < 0:
        raise TypeError(f"expected an integer of at least 0, got {value!r:.100}")
    return value


def json_object(line: bytes) -> dict[str, Any]:
    """Return the JSON object in one line.

    Raises ValueError if the line is too long or has something else, RecursionError if the JSON is nested too deeply.
    """
    if len(line) > LONGEST_LINE:
        raise ValueError(f"its first line has {len(line)} bytes, at most {LONGEST_LINE} are allowed")
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("expected an object")
    return fields
