"""Progress of long operations: reported to a function, or shown on a terminal or in a notebook.

``DEEPNVME_PROGRESS=off`` in the environment silences everything except progress that ``progress=True`` asks for. Nothing is
written to stdout or to a log. If stderr is neither a terminal nor a notebook's, only the single lines of :func:`notice`
appear.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Literal

from deepnvme.telemetry.descriptions import printable

Progress = Callable[[int, int], None]
"""Function that is called with the bytes (or steps) done so far, and the total."""
ProgressOption = Progress | bool | None
"""The ``progress`` argument of long operations.

A function to report progress to; True to show progress from the beginning; None to show it on a terminal or in a notebook
once the operation has taken two seconds; False for no progress.
"""
Unit = Literal["bytes", "steps"]

_SHOW_AFTER_SECONDS = 2.0
"""Seconds after which progress is shown if the caller left ``progress`` at None."""
_CANNOT_WRITE = (OSError, ValueError)
"""Errors of writing to a terminal that is gone or a stream that is closed. They do not fail the operation."""
_REDRAW_INTERVAL_SECONDS = 0.1
"""Least seconds between two updates of the line, because a notebook keeps every update it is sent."""


def count_bytes(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Return a function that adds up the bytes of finished parts and reports their sum.

    The returned function takes the bytes of one part. It must be called from one thread only.

    Args:
        progress: Called with the bytes done so far and ``total``, after each part; None for nothing.
        total: Bytes of all parts.
    """
    done = 0

    def count(nbytes: int) -> None:
        """Add the bytes of a finished part, and report the sum."""
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    return count


@contextlib.contextmanager
def shown_progress(progress: ProgressOption, what: str, unit: Unit = "bytes") -> Iterator[Progress | None]:
    """Provide the function to report progress to, or None if nobody would see the progress.

    Progress is shown on stderr, if that is a terminal or a notebook's, and removed at the end. With ``progress=None`` it
    appears after two seconds, in the first process of a machine only, and not with ``DEEPNVME_PROGRESS=off``.

    Args:
        progress: What the user asked for.
        what: Label of the bar.
        unit: What is counted.
    """
    if callable(progress):
        yield progress
        return
    if (silenced() or os.environ.get("LOCAL_RANK", "0") not in ("", "0")) if progress is None else not progress:
        yield None
        return
    if not _is_watched():
        yield None
        return
    shown: _Line | None = None
    began = time.monotonic()
    due = began + (0.0 if progress else _SHOW_AFTER_SECONDS)

    def show(done: int, total: int) -> None:
        """Update the display, or create it once the operation has taken long enough."""
        nonlocal shown
        with contextlib.suppress(*_CANNOT_WRITE):
            if shown is None:
                # What is about to end is not worth showing any more.
                if time.monotonic() < due or (progress is None and done >= total):
                    return
                shown = _Line(printable(what), unit, began)
            shown.update(done, total)

    try:
        yield show
    finally:
        if shown is not None:
            with contextlib.suppress(*_CANNOT_WRITE):
                shown.close()


def notice(text: str) -> None:
    """Write one line to stderr, unless ``DEEPNVME_PROGRESS=off`` or stderr is closed."""
    if sys.stderr is None or silenced():
        return
    with contextlib.suppress(*_CANNOT_WRITE):
        print(f"deepnvme: {printable(text)}", file=sys.stderr, flush=True)


def silenced() -> bool:
    """Return whether ``DEEPNVME_PROGRESS`` is "off" or "0": only output that an argument asks for is shown."""
    return os.environ.get("DEEPNVME_PROGRESS", "").lower() in ("off", "0")


def _is_watched() -> bool:
    """Return whether stderr is a terminal, or that of a notebook's kernel (Jupyter, VS Code, Colab)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    with contextlib.suppress(*_CANNOT_WRITE):
        return sys.stderr is not None and (getattr(shell, "kernel", None) is not None or sys.stderr.isatty())
    return False


class _Line:
    """A line on a terminal or in a notebook, rewritten by carriage returns."""

    def __init__(self, what: str, unit: Unit, began: float) -> None:
        self._what, self._unit, self._began = what, unit, began
        self._drawn = 0.0
        self._width = 0

    def update(self, done: int, total: int) -> None:
        """Show how much is done and the speed, unless the line was updated less than 0.1 s ago."""
        now = time.monotonic()
        if now - self._drawn < _REDRAW_INTERVAL_SECONDS and done < total:
            return
        self._drawn = now
        figures = f"{done}/{total}" if self._unit == "steps" else f"{done / 1e9:.1f} of {total / 1e9:.1f} GB"
        seconds = now - self._began
        if self._unit == "bytes" and seconds >= _REDRAW_INTERVAL_SECONDS:
            figures += f", {done / seconds / 1e9:.1f} GB/s"
        self._write(f"{self._what}: {figures}")

    def _write(self, text: str) -> None:
        """Replace the line's text, cut to the width of the terminal, since a wrapped line could not be replaced."""
        text = text[: shutil.get_terminal_size().columns - 1]
        print("\r" + text.ljust(self._width), end="", file=sys.stderr, flush=True)
        self._width = len(text)

    def close(self) -> None:
        """Blank the line."""
        self._write("")
        self._write("")
