"""The process in which a part is attacked, try by try; each one's outcome is a line of JSON on standard output.

``python -m tests.faults.torture.one_part PART --seed 1 --first 17 --tries 1 --dir /mnt/nvme`` makes one try again by itself.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import ModuleType

from . import Leaked, Torn

GRACE_SECONDS = 5
"""After which a try that is too long has printed where its threads are, and is killed."""
_TIMES = 4
"""How often a try must leave more behind to count as a leak."""


def part_named(name: str) -> ModuleType:
    """A module of ``parts``, or of another package here that the name begins with."""
    return importlib.import_module("." + (name if "." in name else f"parts.{name}"), __package__)


def missing(part: ModuleType) -> str | None:
    """What this machine lacks for it."""
    reason: str | None = part.requires() if hasattr(part, "requires") else None
    return reason


def held() -> dict[str, int]:
    """What this process holds, by kind."""
    from deepnvme.swap import buffer_pool

    gc.collect()
    status = Path("/proc/self/status").read_text()
    locked = re.search(r"VmLck:\s+(\d+)", status)
    assert locked is not None
    threads = [(task / "comm") for task in Path("/proc/self/task").iterdir()]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        # those the kernel makes for io_uring come and go
        "threads": sum(not comm.read_text().startswith("iou-") for comm in threads if comm.exists()),
        "bytes of the pool in use": buffer_pool().in_use,
        "locked KiB beyond the pool's": int(locked[1]) - buffer_pool().allocated // 1024,
        "child processes": len(_children()),
    }


def _children() -> list[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return [int(child) for each in lists for child in each.read_text().split()]


def make_try(part: ModuleType, label: str, directory: Path) -> tuple[str, str]:
    """An outcome, and what there is to say of it."""
    own = Path(tempfile.mkdtemp(prefix="torture-", dir=directory))
    faulthandler.dump_traceback_later(part.SECONDS)
    try:
        part.attack(random.Random(label), own)
        return "passed", ""
    except Exception as error:
        kind = "torn" if isinstance(error, Torn) else "leaked" if isinstance(error, Leaked) else "wrong"
        return kind, "".join(traceback.format_exception(error))
    except KeyboardInterrupt as error:
        return "wrong", "an interrupt came late: " + "".join(traceback.format_exception(error))
    finally:
        faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(own, ignore_errors=True)


def grown(before: dict[str, int], settle_seconds: float = 3.0) -> str:
    """What is more than ``before``, after a time in which threads may end; empty if nothing is."""
    deadline = time.monotonic() + settle_seconds
    while True:
        now = held()
        more = [f"{now[kind] - count} {kind}" for kind, count in before.items() if now[kind] > count]
        if not more or time.monotonic() > deadline:
            return ", ".join(more)
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first try")
    parser.add_argument("--tries", type=int, default=None, help="how many; default: until killed")
    parser.add_argument("--dir", type=Path, required=True, help="a directory on a drive")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job of a shell lacks
    import torch

    torch.set_num_threads(1)
    part = part_named(arguments.part)
    numbers = itertools.islice(itertools.count(arguments.first), arguments.tries)
    for number in numbers:
        label = f"{arguments.seed} {arguments.part} {number}"
        # A process keeps some things for good, such as an engine for all saves and its workers' memory: a leak is more each time.
        for _ in range(_TIMES):
            before = held()
            outcome, text = make_try(part, label, arguments.dir.resolve())
            more = grown(before) if outcome == "passed" else ""
            if not more:
                break
        else:
            outcome, text = "leaked", f"after the try, made {_TIMES} times, there are {more} more than before the last"
        print(json.dumps({"number": number, "outcome": outcome, "text": text}), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a part that leaves threads behind has been told so; nothing waits for them
