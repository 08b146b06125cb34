"""Run an unchanged program after :func:`enable`, which makes DeepSpeed use this package.

    python -m deepnvme.integrations.deepspeed [--swappers] [--checkpoint] train.py ...
    torchrun --nproc-per-node 2 -m deepnvme.integrations.deepspeed --swappers train.py ...
    deepspeed --module deepnvme.integrations.deepspeed --swappers train.py ...

Without options, only the ops are replaced.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from typing import NamedTuple

from . import enabling


class Launch(NamedTuple):
    """What to enable, and which program to run."""

    enable: dict[str, bool]
    """Keyword arguments for :func:`enable`."""
    is_module: bool
    """Whether the program is a module's name, as with ``python -m``, and not a script's path."""
    program: list[str]
    """``sys.argv`` of the program."""


def parse(arguments: Sequence[str]) -> Launch:
    """Parse the command line.

    Args:
        arguments: Command line without the program name.

    Raises:
        SystemExit: If the arguments are invalid. A message is printed, as by argparse.
    """
    parser = argparse.ArgumentParser(
        prog="python -m deepnvme.integrations.deepspeed",
        description="Run a program with DeepSpeed on deepnvme's ops.",
        allow_abbrev=False,
    )
    parser.add_argument("--swappers", action="store_true", help="deepnvme's swapper classes in ZeRO stage 3 too")
    parser.add_argument("--checkpoint", action="store_true", help="deepnvme's checkpoint engine for the fast writer too")
    parser.add_argument("-m", dest="is_module", action="store_true", help="the program is a module's name")
    # DeepSpeed's launcher inserts it before the arguments of the program it starts, which is this module.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a script or a module, and its arguments")
    parsed = parser.parse_args(arguments)
    program = parsed.program[1:] if parsed.program[:1] == ["--"] else list(parsed.program)
    if not program:
        parser.error("there is no program to run")
    if parsed.local_rank is not None:
        program.insert(1, f"--local_rank={parsed.local_rank}")
    return Launch({"swappers": parsed.swappers, "checkpoint": parsed.checkpoint}, parsed.is_module, program)


def main() -> None:
    """Run the program named on this process's command line. It sees only its own arguments in ``sys.argv``."""
    launch = parse(sys.argv[1:])
    enabling.enable(**launch.enable)
    _run(launch.program, launch.is_module)


def _run(program: Sequence[str], is_module: bool) -> None:
    """Run a script or module as ``__main__``. Blocks until the program ends. Raises what the program raises.

    Args:
        program: ``sys.argv`` of the program: the script's path or the module's name, then the arguments.
        is_module: Whether the program is given by a module's name, as with ``python -m``.
    """
    sys.argv = list(program)
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        if not getattr(sys.flags, "safe_path", False):  # with safe_path, sys.path[0] is not the launcher's folder
            sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
        runpy.run_path(program[0], run_name="__main__")
