"""Progress of long operations: reported to a function, or shown as a bar on the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Literal

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes in all."""
Wanted = Progress | Literal[True] | None
"""A function to report progress to, True for a bar on the terminal, or None for neither."""


def counting(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Return a function that adds up the bytes of finished parts and reports their sum.

    The returned function takes the bytes of one part. It must be called from one thread only.

    Args:
        progress: Called with the bytes done so far and ``total``, after each part; None for nothing.
        total: Bytes of all parts.
    """
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    return count


@contextlib.contextmanager
def following(progress: Wanted, what: str) -> Iterator[Progress | None]:
    """Provide the function to report progress to, or None if progress is not wanted.

    For ``True``, a bar is shown on stderr if that is a terminal, and removed at the end.

    Args:
        progress: What the user asked for.
        what: Label of the bar.
    """
    if progress is not True:
        yield progress
        return
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
