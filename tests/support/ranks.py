"""Programs of several processes, the ranks of a process group over gloo."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from .interpreters import Interpreters

OPENING = """
import contextlib, os, sys, time, traceback, warnings
from pathlib import Path
import torch
import torch.distributed as dist

torch.set_num_threads(1)
warnings.filterwarnings("ignore", "this OffloadedTraining is closed without restore")  # most programs throw it away
drive = Path({drive!r})
ranks = {count}
{before_fork}
rank, others = 0, []
for number in range(1, ranks):
    child = os.fork()
    if child == 0:
        rank, others = number, []
        break
    others.append(child)


def ended(code):
    # A child that fails says why, and does not go on to what only its parent does.
    if rank:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def tell_how_others_end():
    # One that had failed before may yet have to say why, and one that crashed says nothing.
    deadline = time.monotonic() + 30
    for number, child in enumerate(others, start=1):
        while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        how = f"has ended with {os.waitstatus_to_exitcode(status[1])}" if status[0] else "goes on"
        print(f"rank {number} {how}", file=sys.stderr)


try:
    dist.init_process_group("gloo", init_method=f"file://{drive}/ranks", rank=rank, world_size=ranks)
"""

CLOSING = """
    dist.barrier()
    dist.destroy_process_group()
except BaseException:
    traceback.print_exc()
    ended(1)
    tell_how_others_end()
    raise
ended(0)
assert all([os.waitpid(each, 0)[1] == 0 for each in others])
# As a child, without the interpreter's clean-up: a process has crashed once, perhaps there, and the cause was not established.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""


def run_ranks(count: int, program: str, drive: Path, interpreters: Interpreters, before_fork: str = "") -> None:
    """Run ``program`` as each of ``count`` ranks, which has ``rank``, ``ranks`` and ``drive``.

    ``before_fork`` is run once, and its modules are there in all ranks.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    opening = OPENING.replace("{drive!r}", repr(str(drive))).replace("{count}", str(count))
    opening = opening.replace("{before_fork}", before_fork)
    interpreters.run(opening + textwrap.indent(textwrap.dedent(program), "    ") + CLOSING).check()
