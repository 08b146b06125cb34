"""``deepnvme build``: compiles the ops before they are first used, as in the making of a container's image."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .op_builder import ALL_OPS, OpBuilder

_REQUIRED = ("async_io",)
"""Ops that the package cannot do without. Other ops are built only where they would work."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Build ops into the cache, or find them there, and print the path of each. Blocks for as long as the compiler takes.

    Exits with status 1 and the reason on stderr if async_io, or an op that the arguments name, cannot be built and loaded
    here.

    Args:
        arguments: Command-line arguments; None for those of this process.
    """
    ops = {name: builder for name, builder in ALL_OPS.items() if builder.sources()}
    parser = argparse.ArgumentParser(
        prog="deepnvme build",
        description="Compile the ops now rather than when they are first used, and print where they are kept:"
        " TORCH_EXTENSIONS_DIR, or else the user's cache directory. What is built already is only looked up.",
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"of {', '.join(ops)}; by default all that would work here")
    parser.add_argument("--verbose", action="store_true", help="print the compiler's commands")
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.ops if name not in ops]
    if unknown:
        parser.error(f"there is no op {unknown[0]!r}; there is {', '.join(ops)}")
    required = tuple(chosen.ops) or _REQUIRED
    failed = False
    for name in chosen.ops or ops:
        problem = _build(ops[name], chosen.verbose)
        if problem and name in required:
            failed = True
            print(f"deepnvme build: {problem}", file=sys.stderr)
        elif problem:
            print(f"{name}: not built, {problem}")
        else:
            print(f"{name}: {ops[name].existing_build()}")
    sys.exit(1 if failed else 0)


def _build(builder: OpBuilder, verbose: bool) -> str:
    """Build and load an op. Returns why that is not possible; empty if it was done."""
    try:
        builder.load(verbose)
    except (RuntimeError, ImportError, OSError, ValueError) as error:
        return str(error)
    return ""
