"""What the benchmarks' command lines have in common: options, the file of figures, and an end that is tidy."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from deepnvme.tools.tune.folder import NotMeasurable
from harness.other_load import OtherLoad
from harness.workloads import ContenderFailed

Progress = Callable[[str], None]


class Parser(argparse.ArgumentParser):
    """``--dir``, ``--json``, and what a benchmark adds. ``about``: its docstring, of which the first paragraph is shown."""

    def __init__(self, about: str | None) -> None:
        super().__init__(description=about.split("\n\n")[0] if about else None)
        self.add_argument(
            "--dir", type=Path, default=Path.cwd(), help="a directory on the drive to measure (default: the current one)"
        )
        self.add_argument("--json", type=Path, metavar="FILE", help="write every figure and verdict there")

    def add_deepspeed_python(self) -> None:
        self.add_argument("--deepspeed-python", metavar="PATH", help="an interpreter that has DeepSpeed, to compare with")

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """``dir`` is a directory and absolute, ``json`` can be made, and ``deepspeed_python`` run; or the program ends with 2."""
        given = self.parse_args(arguments)
        if not given.dir.is_dir():
            self.error(f"--dir: '{given.dir}' is not a directory")
        given.dir = given.dir.resolve()
        if given.json and not given.json.resolve().parent.is_dir():
            self.error(f"--json: '{given.json.parent}' is not a directory")
        if getattr(given, "deepspeed_python", None) is not None:
            # Absolute, because it is started elsewhere; a link is not followed: a virtual environment's interpreter is one.
            found = shutil.which(given.deepspeed_python)
            if found is None:
                self.error(f"--deepspeed-python: '{given.deepspeed_python}' cannot be run")
            given.deepspeed_python = os.path.abspath(found)
        return given


def print_step(step: str) -> None:
    print(f"  {step}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def measuring(program: str) -> Iterator[str]:
    """Provide the time at which the benchmark starts, in ISO format.

    What stops a benchmark within is told in one line, and ends the program: with 1, or 130 where it was interrupted. At the end a
    line on stderr says so if other processes have kept the machine busy.
    """
    # A terminated run puts files and system settings back as an interrupted one does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    load = OtherLoad()
    try:
        yield datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        if warning := load.warning():
            print(f"{program}: warning: {warning}", file=sys.stderr)
    except (NotMeasurable, ContenderFailed) as error:
        sys.exit(f"{program}: {error}")
    except KeyboardInterrupt:
        print(f"{program}: interrupted; its files are removed", file=sys.stderr)
        sys.exit(130)


def write_json(path: Path | None, document: dict[str, Any]) -> None:
    """Where a file was asked for."""
    if path:
        path.write_text(json.dumps(document, indent=1) + "\n")
