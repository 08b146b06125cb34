"""What real DeepSpeed does with this package in it besides training: checkpoints, launchers, reports, faults."""

from __future__ import annotations

import errno
import json
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ..support.disks import MIB, memory_disk
from ..support.interpreters import REPOSITORY
from .running import environment, interpreter, reserved_port, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ZERO3 = "tests.compat.zero3_program"


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> str:
    return interpreter(request.config)


# Checkpoints


FEW = {"pipelined": False, "buffer_count": 5, "width": 1088}
"""Whoever has so few goes to the drive in each step."""


@pytest.mark.parametrize(("world", "ranks"), [("op", 1), ("our swappers", 1), ("our swappers", 2)])
def test_training_goes_on_from_a_fast_checkpoint_with_its_states_on_the_drive(
    python: str, drive: Path, world: str, ranks: int
) -> None:
    case = {"world": world, "writer": "fast", "checkpoint": True, "dtype": "bf16", "steps": 3, "resume": 3, "width": 1088}
    case |= {"directories": [str(drive)] * ranks, "saved in": str(drive / "saved")}
    for (result,) in run(python, ZERO3, [case], drive, ranks=ranks):
        assert "error" not in result, result
        assert result["checkpoint engine"] == "deepnvme.integrations.deepspeed.checkpoint_engine.NVMeCheckpointEngine"
        assert len(set(result["continued"])) == 3
        same = 1 if world == "op" else 3  # DeepSpeed's own swappers leave the optimizer's count of steps out of a checkpoint
        assert result["resumed"][:same] == result["continued"][:same]
        assert result["rewound"][:same] == result["continued"][:same]


# Faults


@pytest.mark.root
@pytest.mark.parametrize("zero_init", [False, True])
def test_a_full_disk_is_named_by_the_rank_that_has_it(python: str, drive: Path, zero_init: bool) -> None:
    with memory_disk(drive, (5 if zero_init else 24) * MIB) as small:
        case: dict[str, Any] = {"world": "our swappers", "dtype": "fp32", "steps": 4, **FEW}
        if zero_init:  # a rank's parts of the six layers are of 1 MiB each
            case = {"world": "op", "dtype": "bf16", "steps": 1, "width": 1024, "offload_param": 12, "zero_init": True}
        case["directories"] = [str(drive / "large"), str(small.path)]
        results = run(python, ZERO3, [case], drive, ranks=2)
        assert all("error" in result for (result,) in results)  # the other one's collective ends with that process
        failed = results[1][0]
        assert (failed["errno"], failed["path"].startswith(f"{small.path}")) == (errno.ENOSPC, True), failed


def test_two_jobs_on_one_path_train_as_each_does_by_itself(python: str, drive: Path) -> None:
    case = {"world": "our swappers", "dtype": "bf16", "offload_param": 12, "prefetch": 0, "steps": 8}
    (alone,) = run(python, ZERO3, [{**case, "directories": [str(drive / "alone")]}], drive)
    shared = drive / "shared"
    together = [{**case, "directories": [str(shared)]}]
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(run, python, ZERO3, together, drive) for _ in range(2)]
        results = [job.result()[0][0] for job in jobs]
    for result in results:
        assert "error" not in result, result
        assert result["losses"] == alone[0]["losses"]
    assert len({result["folder"] for result in results}) == 2


# Reports


def test_ds_report_names_our_op(python: str, drive: Path) -> None:
    report = output([python, "-m", "deepnvme.integrations.deepspeed", "-m", "deepspeed.env_report"], drive)
    assert "async_io is that of deepnvme" in report


def test_our_memory_is_pinned_for_deepspeed_and_its_native_backend_uses_it(python: str, drive: Path) -> None:
    program = """
import gc, torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder
handle = AsyncIOBuilder().load().aio_handle()
assert type(handle).__module__ == "deepnvme.ops.aio.async_io_op"
assert get_accelerator().is_pinned(handle.new_cpu_locked_tensor(100, torch.empty(0)))
native = get_accelerator().pin_memory(torch.arange(1000.0))
assert native.tolist() == list(range(1000))
assert get_accelerator().is_pinned(native) and handle.is_pinned(native)
get_accelerator().unpin_memory(native)
assert not handle.is_pinned(native)
dropped = get_accelerator().pin_empty(100, dtype=torch.bfloat16)
assert handle.is_pinned(dropped)
del dropped
gc.collect()
print("pinned")
"""
    (drive / "program.py").write_text(program)
    command = [python, "-m", "deepnvme.integrations.deepspeed", str(drive / "program.py")]
    assert "pinned" in output(command, drive, {"DS_PIN_MEMORY_BACKEND": "native"})


# Launchers


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_two_ranks_of_a_launcher_train_on_our_op(python: str, drive: Path, launcher: str) -> None:
    own = ["deepnvme.integrations.deepspeed", "--swappers", "tests/compat/launched_program.py", str(drive), "--lr", "1"]
    with reserved_port() as port:
        if launcher == "torchrun":
            command = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port), "-m", *own]
        else:
            command = [python, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(port), "--module", *own]
        output(command, drive, {"PATH": f"{Path(python).parent}:/usr/bin:/bin"})
    for rank in range(2):
        facts = json.loads((drive / f"rank-{rank}").read_text())
        assert facts["name"] == "__main__"
        assert facts["arguments"][-3:] == [str(drive), "--lr", "1"]
        assert facts["path"] == str(REPOSITORY / "tests" / "compat")
        assert facts["op"] == "deepnvme.ops.aio.async_io_op"
        assert facts["swapper"] == "deepnvme.integrations.deepspeed.swap_tensor.optimizer_swapper"
        assert facts["sum"] == 2.0


def output(command: Sequence[str], drive: Path, more: dict[str, str] | None = None) -> str:
    """The standard output of a program that succeeds."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment(drive, more), timeout=500)
    assert done.returncode == 0, f"it ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
