"""How long a user waits before the first byte moves: the cold build, the cached op, the report.

python benchmarks/startup.py --json startup.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from harness.figures import Spread, Verdict
from harness.other_load import OtherLoad
from harness.tables import verdict_table

# torch is the user's own import, made already by whoever has a tensor.
LOAD = """
import time
import torch
started = time.perf_counter()
from deepnvme.ops.op_builder import AsyncIOBuilder
AsyncIOBuilder().jit_load(verbose=False)
print(time.perf_counter() - started)
"""


class Failed(Exception):
    """A step did not work; the message is what it printed last."""


def run(*arguments: str, cache: Path) -> tuple[float, str]:
    """Run this interpreter; return the seconds it took and its output."""
    environment = {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": str(cache),
        # A compiler cache would make the cold build warm.
        "CCACHE_DISABLE": "1",
    }
    started = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        last_words = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise Failed("".join(last_words) or f"{arguments[0]} ended with {done.returncode}")
    return seconds, done.stdout


def load_seconds(cache: Path) -> float:
    """Seconds of loading the op in a fresh process."""
    _, output = run("-c", LOAD, cache=cache)
    return float(output.split()[-1])


def measure(rounds: int) -> list[Verdict]:
    """``rounds`` cold builds, and three times as many of the two that are quick."""
    with tempfile.TemporaryDirectory(prefix="startup-") as directory:
        # Reading torch from a cold drive is nobody's start-up but torch's.
        run("-c", "import torch", cache=Path(directory, "none"))
        builds = [load_seconds(Path(directory, f"build-{turn}")) for turn in range(rounds)]
        cache = Path(directory, "build-0")
        loads = [load_seconds(cache) for _ in range(3 * rounds)]
        reports = [run("-m", "deepnvme.report", cache=cache)[0] for _ in range(3 * rounds)]
    cpus = len(os.sched_getaffinity(0))
    return [
        Verdict(f"cold JIT build, {cpus} cores", Spread.of(builds), "at most", 22, "s"),
        Verdict("load from the cache, without torch's import", Spread.of(loads), "at most", 0.1, "s"),
        Verdict("ds_report, the whole process", Spread.of(reports), "at most", 0.5, "s"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=1, choices=range(1, 11), metavar="N", help="cold builds (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    given = parser.parse_args(arguments)
    # A terminated run removes its builds as an interrupted one does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    load = OtherLoad()
    try:
        verdicts = measure(given.rounds)
    except Failed as error:
        print(f"startup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(verdict_table(verdicts))
    if warning := load.warning():
        print(f"startup: warning: {warning}", file=sys.stderr)
    if given.json:
        document = {"benchmark": "startup", "targets": [verdict.as_json() for verdict in verdicts]}
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
