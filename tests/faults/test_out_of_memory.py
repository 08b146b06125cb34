"""Each allocation on the way of a transfer fails once: an error is raised, and the engine goes on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ..support.memory import page_aligned
from ..support.patience import PATIENCE

SIZE = 5000


def aligned() -> torch.Tensor:
    return page_aligned(b"x" * SIZE)


def misaligned() -> torch.Tensor:
    return torch.full((SIZE + 1,), 120, dtype=torch.uint8)[1:]


# An engine's method, and arguments for it made from a path, an open file and a path that is no file's.
Arguments = Callable[[Path, Any, Path], tuple[Any, ...]]
CALLS: dict[str, tuple[str, Arguments]] = {
    "write": ("write", lambda path, file, missing: (aligned(), path)),
    "staged write": ("write", lambda path, file, missing: (misaligned(), path)),
    "write to an open file": ("write", lambda path, file, missing: (aligned(), file)),
    "write that fails": ("write", lambda path, file, missing: (aligned(), missing)),
    "read": ("read", lambda path, file, missing: (misaligned(), path)),
    "read_many": ("read_many", lambda path, file, missing: ([aligned()] * 300, path, [0] * 300)),
    "write_many": ("write_many", lambda path, file, missing: ([aligned(), misaligned()], [path, file])),
    "write_many that fails": ("write_many", lambda path, file, missing: ([aligned()] * 3, [path, file, missing])),
    "gather": ("gather", lambda path, file, missing: (path, torch.arange(8), torch.empty(8, 512, dtype=torch.uint8))),
    "fsync": ("fsync", lambda path, file, missing: (path,)),
}


@pytest.mark.parametrize("all_after", [False, True], ids=["one", "and all after"])
@pytest.mark.parametrize("call", CALLS)
def test_any_allocation_of_a_transfer_may_fail(testing: Any, backend: Any, drive: Path, call: str, all_after: bool) -> None:
    engine = testing.Engine(backend, 4096, 4, 2)
    path = drive / "file"
    engine.write(page_aligned(b"x" * (2 * SIZE)), path).result()
    file = engine.open(path, "r+")
    method, arguments = CALLS[call]
    failing, failed = 0, 1
    while failed:
        given = arguments(path, file, drive / "missing" / "file")
        future, failed, raised = testing.with_failing_allocation(engine, failing, all_after, True, method, *given)
        assert raised or not failed or future.exception(PATIENCE) is None
        if future is not None:
            future.exception(PATIENCE)
        for target in (path, file):
            assert engine.write(misaligned(), target).result(PATIENCE) == SIZE
        failing += 1
    assert failing > 1
    engine.close()
    assert path.read_bytes() == b"x" * (2 * SIZE)


@pytest.mark.parametrize("all_after", [False, True], ids=["one", "and all after"])
def test_a_tensor_whose_transfer_has_begun_lives_though_the_call_has_raised(
    testing: Any, gate: Any, drive: Path, all_after: bool
) -> None:
    engine = testing.instant_engine(gate, 4096, 4, 1)
    gate.release()
    engine.write(aligned(), drive / "file").result()
    failing, failed, begun = 0, 1, 0
    while failed:
        tensor = aligned()
        alive = weakref.ref(tensor.untyped_storage())
        before = engine.stats()["requests"]
        gate.hold()
        given = (tensor, drive / "file")
        future, failed, _ = testing.with_failing_allocation(engine, failing, all_after, False, "write", *given)
        del tensor, given, future
        gc.collect()
        lives = alive() is not None
        gate.release()
        engine.write(aligned(), drive / "file").result(PATIENCE)
        engine.fsync(drive / "file").result(PATIENCE)  # after all writes
        if engine.stats()["requests"] == before + 3:
            begun += 1
            assert lives
        failing += 1
    assert failing > 1
    assert begun > 0
    engine.close()
