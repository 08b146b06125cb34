"""``deepnvme build``: compiles the ops before they are first used, as in the making of a container's image."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .op_builder import ALL_OPS, AsyncIOBuilder


def main(arguments: Sequence[str] | None = None) -> None:
    """Build each op that can work on this machine, unless the cache has it, and print its path. Blocks for seconds.

    Exits with status 1 and the reason on stderr if async_io, which the package cannot do without, cannot be built and loaded.

    Args:
        arguments: Command-line arguments; None for ``sys.argv[1:]``.
    """
    parser = argparse.ArgumentParser(
        prog="deepnvme build",
        description="Compile the ops now rather than when they are first used, and print where they are kept:"
        " TORCH_EXTENSIONS_DIR, or else the user's cache directory. What is built already is only looked up.",
    )
    parser.parse_args(arguments)
    for name, builder in ALL_OPS.items():
        if builder.sources():
            try:
                builder.load()
            except (RuntimeError, ImportError, OSError, ValueError) as error:
                if name == AsyncIOBuilder.NAME:
                    sys.exit(f"deepnvme build: {error}")
                print(f"{name}: not built, {error}")
            else:
                print(f"{name}: {builder.existing_build()}")
