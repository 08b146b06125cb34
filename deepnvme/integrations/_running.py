"""Runs a program in this process as the ``python`` command would. Used by the launchers of integrations."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence


def run_program(program: Sequence[str], is_module: bool) -> None:
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
