"""``deepnvme COMMAND``: the package's command-line tools under one name, also as ``python -m deepnvme COMMAND``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from .version import __version__

_COMMANDS = {
    "build": ("ops.build", "compile the ops now rather than at their first use"),
    "verify": ("checkpoint.verification", "check the structure of checkpoints, and their contents by their checksums"),
    "report": ("report", "what this machine offers (ds_report)"),
    "io": ("tune.io", "what a drive gives a tensor (ds_io)"),
    "tune": ("tune.sweep", "the best settings for a drive (ds_nvme_tune)"),
}
"""For each command, the module whose ``main`` takes the remaining arguments, and a one-line description."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command of the ``deepnvme`` program.

    Exits with status 2 if there is no command of that name, else with the command's own status.

    Args:
        arguments: The command and its arguments; None for ``sys.argv[1:]``.
    """
    listed = "\n".join(f"  {name:8} {what}" for name, (_, what) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        "deepnvme",
        description=f"{listed}\n\ndeepnvme COMMAND --help lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"deepnvme {__version__}")
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    rest.required = False  # otherwise the error about a missing command names the arguments, too
    chosen = parser.parse_args(arguments)
    command = importlib.import_module(f".{_COMMANDS[chosen.command][0]}", __package__).main
    try:
        try:
            command(chosen.arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # nobody reads any more, as in ``deepnvme verify *.pt | head -1``
        # Flushing at exit would fail again, and say so on stderr.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
