"""Run an unchanged program after :func:`enable`: ``python -m deepnvme.integrations.tensornvme [-m] SCRIPT [ARGUMENTS]``."""

from __future__ import annotations

import argparse

from deepnvme.integrations._running import run_program

from . import enable


def main() -> None:
    """Run the program named on this process's command line. It sees only its own arguments in ``sys.argv``."""
    parser = argparse.ArgumentParser(
        prog="python -m deepnvme.integrations.tensornvme",
        description="Run a program whose tensornvme is this package's.",
        allow_abbrev=False,
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="the program is a module's name")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a script or a module, and its arguments")
    given = parser.parse_args()
    if not given.program:
        parser.error("there is no program to run")
    enable()
    run_program(given.program, given.is_module)


main()
