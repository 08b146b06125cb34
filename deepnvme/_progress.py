"""How far a long operation has come: told to a function, or shown to whoever looks at the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Literal

Progress = Callable[[int, int], None]
"""Told the bytes that are done, and those in all."""
Wanted = Progress | Literal[True] | None
"""True for a bar."""


def counting(progress: Progress | None, total: int) -> Callable[[int], None]:
    """To be told the bytes of each part that is done, in one thread: tells ``progress`` all that are, of ``total``."""
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    return count


@contextlib.contextmanager
def following(progress: Wanted, what: str) -> Iterator[Progress | None]:
    """What to tell how far it has come. The bar is on stderr, where that is a terminal, and gone in the end."""
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
