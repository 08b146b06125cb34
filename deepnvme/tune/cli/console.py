"""How ds_io and ds_nvme_tune speak: results on stdout or in a file, what goes wrong in one line, interrupts once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from types import FrameType

from deepnvme.tune.measure.fio import FioFailed
from deepnvme.tune.measure.folder import Unsuitable


@contextlib.contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """What goes wrong inside is told in one line on stderr, with status 1; an interrupt, also by SIGTERM or SIGHUP, with 130."""

    def say(message: object, *_: object, **__: object) -> None:
        print(f"{program}: note: {message}", file=sys.stderr)

    with _one_interrupt(), warnings.catch_warnings():
        warnings.simplefilter("once", RuntimeWarning)
        warnings.showwarning = say
        # Said in the result, with what it means for it.
        warnings.filterwarnings("ignore", message="transfers of .* go through the page cache")
        try:
            yield
        except (Unsuitable, FioFailed, OSError, ValueError, RuntimeError, MemoryError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            sys.exit(_say(program, lines[0], 1))
        except KeyboardInterrupt:
            sys.exit(_say(program, "interrupted; its files are removed", 130))


@contextlib.contextmanager
def _one_interrupt() -> Iterator[None]:
    """What would end the process is a KeyboardInterrupt, once: impatience does not keep it from removing its files."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    taken = [number for number in numbers if before[number] in (signal.SIG_DFL, signal.default_int_handler)]

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in taken:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            if signal.getsignal(number) is interrupt:  # else the process is ending, and is left to
                signal.signal(number, before[number])


def _say(program: str, message: str, status: int) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return status


def write_out(text: str, path: str) -> None:
    """``path``: a file, or "-" for stdout. Raises OSError naming the file."""
    if path == "-":
        emit(text)
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error  # a failed write does not name it


def emit(text: str) -> None:
    """Print, whatever the encoding of stdout, and although nobody may read on."""
    if sys.stdout is None:  # closed from the start: ds_io ... >&-
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        # What is left in the buffer would fail once more, with a status of Python's own, when it is flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # as with "ds_io ... | head"
            raise
