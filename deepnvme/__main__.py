"""``deepnvme COMMAND``: the package's command-line tools under one name, also as ``python -m deepnvme COMMAND``."""

from __future__ import annotations

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
        arguments: The command and its arguments; None for those of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage(), file=sys.stdout if words else sys.stderr)
        sys.exit(0 if words else 2)
    if words[0] in ("-V", "--version"):
        print(f"deepnvme {__version__}")
        sys.exit(0)
    if words[0] not in _COMMANDS:
        print(f"deepnvme: there is no command {words[0]!r}; there is {', '.join(_COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    command = importlib.import_module(f".{_COMMANDS[words[0]][0]}", __package__).main
    try:
        command(words[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads any more, as in ``deepnvme verify *.pt | head -1``
        # Flushing at exit would fail again, and say so on stderr.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _usage() -> str:
    """Return the text that ``--help`` prints."""
    lines = [f"  {name:8} {what}" for name, (_, what) in _COMMANDS.items()]
    end = "deepnvme COMMAND --help lists a command's options, deepnvme --version prints the version."
    return "\n".join(["usage: deepnvme COMMAND ...", "", *lines, "", end])


if __name__ == "__main__":
    main()
