"""Output of ds_io and ds_nvme_tune: results to stdout or a file, errors as one line on stderr; and handling of interrupts."""

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
    """Exit with one line on stderr if the ``with`` block fails: status 1, or 130 after SIGINT, SIGTERM or SIGHUP.

    Warnings are printed as one line each.

    Args:
        program: The name at the beginning of each line.
    """

    def say(message: object, *_: object, **__: object) -> None:
        print(f"{program}: note: {message}", file=sys.stderr)

    with _one_interrupt(), warnings.catch_warnings():
        warnings.simplefilter("once", RuntimeWarning)
        warnings.showwarning = say
        # The result says so itself, and what it means.
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
    """Turn SIGINT, SIGTERM and SIGHUP into one KeyboardInterrupt, and ignore further ones, so that files are removed in any case.

    Signals that somebody else handles or ignores are left as they are.
    """
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
            if signal.getsignal(number) is interrupt:  # otherwise the process is ending, and goes on ignoring signals
                signal.signal(number, before[number])


def _say(program: str, message: str, status: int) -> int:
    """Print a message to stderr, and return ``status``."""
    print(f"{program}: {message}", file=sys.stderr)
    return status


def write_out(text: str, path: str) -> None:
    """Write a text and a line feed to a file, or to stdout if ``path`` is "-". Raises OSError, which names the file."""
    if path == "-":
        emit(text)
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error  # the error of a write does not name the file


def emit(text: str) -> None:
    """Print a text to stdout; characters that its encoding lacks are escaped.

    Does nothing if stdout was closed from the start, or nobody reads the pipe any more. Raises other OSErrors.
    """
    if sys.stdout is None:  # closed before the start: ds_io ... >&-
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        # Flushing the rest of the buffer at exit would fail again, and change the exit status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # for example "ds_io ... | head"
            raise
