"""The argument parser and the types of options that ds_io and ds_nvme_tune share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from deepnvme.tools.tune.sizes import parse_size
from deepnvme.version import __version__


class Parser(argparse.ArgumentParser):
    """An argument parser with ``--version`` and no abbreviations. Its errors are one line, with a hint at ``--help``."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(program, description=description, allow_abbrev=False)
        self.add_argument("--version", action="version", version=f"deepnvme {__version__}")

    def error(self, message: str) -> NoReturn:
        """Print the message to stderr and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists the options)\n")


# Types of options: each parses a text, and raises argparse.ArgumentTypeError if it is wrong.


def size(text: str) -> int:
    """Return the bytes of a size such as "400M"."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def directory(text: str) -> Path:
    """Return the path of a directory; refuses the empty string only."""
    if not text:
        raise argparse.ArgumentTypeError("must be a directory, got ''")
    return Path(text)


def output_directory(text: str) -> Path:
    """Return the path of a directory that exists, or may be made."""
    path = directory(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"'{path}' is not a directory")
    return path


def output_file(text: str) -> str:
    """Return the path of a file to write, in a directory that exists; "-" is refused."""
    path = Path(text)
    if text == "-":
        raise argparse.ArgumentTypeError("must be a file, got '-'")
    if not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory '{path.parent}'")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"'{path}' is a directory, not a file")
    return text


def output_file_or_stdout(text: str) -> str:
    """Return the path of a file to write as :func:`output_file` does, or "-" for stdout."""
    return text if text == "-" else output_file(text)


def natural(text: str, least: int = 0) -> int:
    """Return a whole number of at least ``least``."""
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least {least}, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    return natural(text, 1)


def add_json_option(parser: argparse._ActionsContainer, purpose: str) -> None:
    """Add ``--json [FILE]`` to a parser or a group of its options; without FILE the value is "-", which stands for stdout."""
    parser.add_argument("--json", type=output_file_or_stdout, nargs="?", const="-", metavar="FILE", help=purpose)
