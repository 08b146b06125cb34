"""What ds_io and ds_nvme_tune print, ask, and do about interrupts.

Results go to stdout or a file; progress, errors and questions to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import termios
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

from deepnvme._files import naming_file
from deepnvme.tools.report.ds_report import emit
from deepnvme.tools.tune.measure.fio import FioFailed
from deepnvme.tools.tune.measure.unsuitable import Unsuitable, first_line
from deepnvme.tools.tune.search.successive_halving import SearchProgress


@contextlib.contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Exit with one line on stderr if the ``with`` block fails: status 1, or 130 after SIGINT, SIGTERM or SIGHUP.

    Warnings are printed as one line each.

    Args:
        program: The name at the beginning of each line.
    """

    def say(message: object, *_: object, **__: object) -> None:
        """Print a warning as a note of the program."""
        print(f"{program}: note: {message}", file=sys.stderr)

    with _one_interrupt(), warnings.catch_warnings():
        warnings.simplefilter("once", RuntimeWarning)
        warnings.showwarning = say
        # The result says so itself, and what it means.
        warnings.filterwarnings("ignore", message="transfers of .* go through the page cache")
        try:
            yield
            return
        except (Unsuitable, FioFailed, OSError, ValueError, RuntimeError, MemoryError) as error:
            status, message = 1, first_line(error)
        except KeyboardInterrupt:
            status, message = 130, "interrupted; its files are removed"
        print(f"{program}: {message}", file=sys.stderr)
        sys.exit(status)


@contextlib.contextmanager
def _one_interrupt() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into one KeyboardInterrupt, and ignore further ones, so that files are removed in any case.

    Signals that somebody else handles or ignores are left as they are.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    taken = {number: each for number, each in handlers.items() if each in (signal.SIG_DFL, signal.default_int_handler)}

    def interrupt(number: int, frame: FrameType | None) -> None:
        """Ignore further signals, and raise KeyboardInterrupt for this one."""
        for each in taken:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, before in taken.items():
            if signal.getsignal(number) is interrupt:  # otherwise the process is ending, and goes on ignoring signals
                signal.signal(number, before)


@contextlib.contextmanager
def progress_shown(otherwise: SearchProgress, with_bar: bool) -> Iterator[SearchProgress]:
    """Provide a function that shows the current step on stderr, until the ``with`` block ends.

    Args:
        otherwise: What to use instead if stderr is not a terminal.
        with_bar: Whether to show the share that is done and the time that is left, too.
    """
    if not sys.stderr.isatty():
        yield otherwise
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    bar = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn()) if with_bar else ()
    columns = (*bar, TextColumn("{task.description}", markup=False))
    # Drawn only between transfers: the CPU time of a thread that draws during one would be counted.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as shown:
        task = shown.add_task("", total=1.0)
        yield lambda share, step: shown.update(task, completed=share, description=step, refresh=True)


def show_result(text: str, document: dict[str, Any], json_path: str | None) -> None:
    """Print a result as text, and write it as JSON if that is wanted.

    Args:
        text: The text for stdout.
        document: The same as JSON types.
        json_path: A file for the JSON; "-" for stdout instead of the text; None for none.

    Raises:
        OSError: If it cannot be written; names the file.
    """
    as_json = json.dumps(document, indent=2)
    emit(as_json if json_path == "-" else text)
    if json_path is not None and json_path != "-":
        write_out(as_json, json_path)


def can_ask() -> bool:
    """Return whether somebody is there to answer a question.

    That is, if all three streams are terminals, and the process is in the foreground: a background job that reads from its
    terminal is stopped. Who has interrupted the program already is not asked: further interrupts are ignored.
    """
    if any(stream is None or not stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        return False
    with contextlib.suppress(OSError):  # not the terminal that controls the process, which therefore has no background
        if os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
            return False
    return signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def ask(question: str) -> bool:
    """Ask a question on stderr, and return whether the answer is "y" or "yes". Blocks until there is one.

    The end of the input and an interrupt mean no.

    Args:
        question: What is asked; how to answer is added.
    """
    try:
        with contextlib.suppress(termios.error):
            termios.tcflush(sys.stdin, termios.TCIFLUSH)  # keys that were pressed before are no answer
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
    except (KeyboardInterrupt, OSError, UnicodeDecodeError):
        answer = ""
    if not answer.endswith("\n"):
        print(file=sys.stderr)
    return answer.strip().lower() in ("y", "yes")


def write_out(text: str, path: str) -> None:
    """Write a text and a line feed to a file. Raises OSError, which names the file."""
    with naming_file(path), open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")
