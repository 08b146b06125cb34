"""Texts for people, above all for ``repr``: paths, budgets, sizes, and whether an object is closed.

A repr may be requested at any time: by a debugger in a constructor, in a forked child, after ``close()``. So it reads only
attributes that exist, takes no lock, waits for nothing, and leaves out parts that cannot be determined.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from deepnvme.telemetry.sizes import ByteCount

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def representation(thing: object, *parts: Callable[[], str]) -> str:
    """Return ``<Class part, part>``. Parts that are empty, or whose function raises, are left out.

    Args:
        thing: The object, for the name of its class.
        parts: Each returns a text.
    """
    texts = []
    for part in parts:
        try:
            texts.append(part())
        except Exception:  # an attribute that is not there yet, or a forked child
            continue
    said = ", ".join(filter(None, texts))
    return f"<{type(thing).__name__}{' ' if said else ''}{said}>"


def size_for_people(nbytes: ByteCount) -> str:
    """Return a number of bytes in powers of 1024: "0 bytes", "16 MiB", "1.5 GiB". A text is returned unchanged."""
    if isinstance(nbytes, str):
        return repr(nbytes)
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}"


def decimal_size(nbytes: int) -> str:
    """Return a number of bytes in the units of drives and reports, powers of 1000: "0.5 MB", "12.00 GB"."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def path_list(paths: Iterable[object]) -> str:
    """Return the paths for a message: each quoted and printable, joined by commas."""
    return ", ".join(f"'{printable(os.fsdecode(path) if isinstance(path, bytes) else path)}'" for path in paths)


def printable(text: object) -> str:
    """Return a text with control characters escaped, so that it stays on its line and no terminal interprets it.

    Line feeds, escape sequences and bytes that are not UTF-8, as in names of files, are written as ``repr`` writes them.
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in str(text))


def state_text(closed: bool, process: int | None = None) -> str:
    """Return the state of an object for its ``repr``: "closed", "of process ..." if another process made it, or "".

    Args:
        closed: Whether the object is closed.
        process: ID of the process that made the object; None if forked children may use it.
    """
    if process is not None and process != os.getpid():
        return f"of process {process}, not to be used in this one"
    return "closed" if closed else ""


def shorten(items: Iterable[str], most: int = 4, separator: str = ", ") -> str:
    """Return the first ``most`` items joined by ``separator``, and how many more there are."""
    items = list(items)
    rest = [f"and {len(items) - most} more"] if len(items) > most else []
    return separator.join([*items[:most], *rest])
