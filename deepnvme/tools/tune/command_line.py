"""Command-line code that ds_io and ds_nvme_tune share: option types, output, errors and interrupts.

Results go to stdout or a file; progress and errors to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from pydantic import BaseModel

from deepnvme.files.replacing import with_filename
from deepnvme.telemetry.descriptions import printable
from deepnvme.telemetry.sizes import parse_size
from deepnvme.tools.report import emit
from deepnvme.version import __version__

from .folder import NotMeasurable, first_line

GIB = 1 << 30
"""Bytes of a GiB, which DeepSpeed calls a GB."""


class Parser(argparse.ArgumentParser):
    """An argument parser with ``--version`` and no abbreviations. Its errors are one line, with a hint at ``--help``."""

    def __init__(self, program: str, description: str) -> None:
        units = "Sizes: K, M, G and T are powers of 1024 (400M, 400MiB), KB, MB, GB and TB of 1000. Rates: GB/s is 10^9 bytes."
        super().__init__(program, description=description, epilog=units, allow_abbrev=False)
        self.add_argument("--version", action="version", version=f"deepnvme {__version__}")

    def error(self, message: str) -> NoReturn:
        """Print the message to stderr and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists the options)\n")


# Types of options: each parses a text, and raises argparse.ArgumentTypeError if it is wrong.


def size(text: str) -> int:
    """Parse a size such as "400M" and return it in bytes."""
    found = parse_size(text)
    if not found:
        raise argparse.ArgumentTypeError(f"must be a size such as 4096, 128K, 400M or 1G, got {text!r}")
    return found


def directory(text: str) -> Path:
    """Parse the path of a directory. Refuses only the empty string; the directory need not exist."""
    if not text:
        raise argparse.ArgumentTypeError("must be a directory, got ''")
    return Path(text)


def output_file(text: str) -> str:
    """Parse the path of an output file, whose directory must exist; "-" stands for stdout."""
    path = Path(text)
    if text != "-" and not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory '{path.parent}'")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"'{path}' is a directory, not a file")
    return text


def natural(text: str, least: int = 0) -> int:
    """Parse a whole number of at least ``least``."""
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least {least}, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    return natural(text, 1)


def add_json_option(parser: argparse._ActionsContainer) -> None:
    """Add ``--json [FILE]`` to a parser or a group of its options; without FILE the value is "-", which stands for stdout."""
    purpose = "write everything as JSON: to FILE, or instead of the text to stdout"
    parser.add_argument("--json", type=output_file, nargs="?", const="-", metavar="FILE", help=purpose)


# Output.


def size_text(size: int) -> str:
    """Return the shortest text for a number of bytes that :func:`size` parses exactly: "400M", "4097"."""
    for shift, unit in ((40, "T"), (30, "G"), (20, "M"), (10, "K")):
        if size and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return str(size)


def show_result(text: str, document: dict[str, Any], json_path: str | None) -> None:
    """Print a result as text, and write it as JSON if a path is given.

    Args:
        text: The result as text, for stdout.
        document: The result for JSON. Values may be dataclasses (written as objects), settings and paths.
        json_path: File for the JSON; "-" to print the JSON instead of the text; None to write no JSON.

    Raises:
        OSError: If the file cannot be written. The error names the file.
    """
    as_json = json.dumps(document, indent=2, default=_plain)
    emit(as_json if json_path == "-" else text)
    if json_path is not None and json_path != "-":
        write_out(as_json, json_path)


def _plain(value: Any) -> Any:
    """Convert a value that json cannot encode: settings and dataclasses to a dict, everything else to a str."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    return dict(vars(value)) if dataclasses.is_dataclass(value) else str(value)


def write_out(text: str, path: str) -> None:
    """Write a text and a line feed to a file. Raises an OSError that names the file."""
    with with_filename(path), open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")


# Errors and interrupts.


@contextlib.contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Exit with one line on stderr if the ``with`` block fails: status 1, or 130 after SIGINT, SIGTERM or SIGHUP.

    The first of these signals raises KeyboardInterrupt and the next ones are ignored, so that files are removed in any case.
    Signals that other code already handles or ignores keep their handlers. Each warning is printed as one line.

    Args:
        program: The program's name. Each line begins with it.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    taken = [number for number, each in before.items() if each in (signal.SIG_DFL, signal.default_int_handler)]

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in taken:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in taken:
        signal.signal(number, interrupt)
    with warnings.catch_warnings():
        warnings.simplefilter("once", RuntimeWarning)
        warnings.showwarning = lambda message, *rest, **more: print(f"{program}: note: {printable(message)}", file=sys.stderr)
        # The result says so itself, and what it means.
        warnings.filterwarnings("ignore", message="transfers of .* go through the page cache")
        try:
            yield
            return
        except (NotMeasurable, OSError, ValueError, RuntimeError, MemoryError) as error:
            status, message = 1, first_line(error)
        except KeyboardInterrupt:
            status, message = 130, "interrupted; its files are removed"
        finally:
            for number in taken:
                if signal.getsignal(number) is interrupt:  # otherwise the process is ending, and goes on ignoring signals
                    signal.signal(number, before[number])
    print(f"{program}: {printable(message)}", file=sys.stderr)
    sys.exit(status)
