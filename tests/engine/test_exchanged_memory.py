"""Tensors that are given other memory during a transfer: the memory of the call is transferred, and kept until the end."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme import Engine

from ..support.faulty_filesystem import FaultyFilesystem
from ..support.memory import EXCHANGES, PAGE, bytes_of, page_aligned, pattern

CONTENT = pattern(4 * PAGE)
OTHER = b"o" * len(CONTENT)
FIRST = torch.arange(4)

Start = Callable[[Any, torch.Tensor, Path], Any]


def write_descriptor(handle: Any, tensor: torch.Tensor, path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        handle.async_pwrite(tensor, descriptor)
    finally:
        os.close(descriptor)


ENGINE_READS: dict[str, Start] = {
    "read": lambda engine, tensor, path: engine.read(tensor, path),
    "read_many": lambda engine, tensor, path: engine.read_many([tensor], [path]),
    "gather": lambda engine, tensor, path: engine.gather(path, FIRST, tensor),
}
ENGINE_WRITES: dict[str, Start] = {
    "write": lambda engine, tensor, path: engine.write(tensor, path),
    "write_many": lambda engine, tensor, path: engine.write_many([tensor], [path]),
    "scatter": lambda engine, tensor, path: engine.scatter(path, FIRST, tensor),
}
HANDLE_READS: dict[str, Start] = {
    "async_pread": lambda handle, tensor, path: handle.async_pread(tensor, path),
    "pread": lambda handle, tensor, path: handle.pread(tensor, path, True, True),
    "async_pread_many": lambda handle, tensor, path: handle.async_pread_many([tensor], [path]),
}
HANDLE_WRITES: dict[str, Start] = {
    "async_pwrite": lambda handle, tensor, path: handle.async_pwrite(tensor, path),
    "async_pwrite of a descriptor": write_descriptor,
    "pwrite": lambda handle, tensor, path: handle.pwrite(tensor, path, True, True),
    "async_pwrite_many": lambda handle, tensor, path: handle.async_pwrite_many([tensor], [path]),
}


exchanged_by = pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)


def transfer_exchanged(
    start: Callable[[torch.Tensor], Any], content: bytes, exchange: Callable[[Any, Any], object], end: Callable[[Any], object]
) -> bytes:
    """Start a transfer of a tensor of ``content``, exchange its memory, and end the transfer. Return what the memory has then."""
    tensor, other = page_aligned(content).resize_(4, PAGE), page_aligned(OTHER)
    memory = weakref.ref(tensor.untyped_storage())
    started = start(tensor)
    exchange(tensor, other)
    del other  # whose memory the tensor has now
    kept = memory()
    assert kept is not None
    end(started)
    assert bytes_of(tensor) == OTHER
    transferred = bytes(kept.tolist())
    del kept
    assert memory() is None
    return transferred


@exchanged_by
@pytest.mark.parametrize("start", (ENGINE_READS | ENGINE_WRITES).values(), ids=ENGINE_READS | ENGINE_WRITES)
def test_an_engine_transfers_the_memory_of_the_call(faulty: Any, gate: Any, drive: Path, start: Start, exchange: Any) -> None:
    engine = faulty("threads", queue_depth=1, gate=gate)  # all blocks but the first follow the exchange
    reads = start in ENGINE_READS.values()
    (drive / "file").write_bytes(CONTENT if reads else b"")

    def end(future: Any) -> None:
        gate.release()
        assert future.result() == len(CONTENT)

    before = bytes(len(CONTENT)) if reads else CONTENT
    transferred = transfer_exchanged(lambda tensor: start(engine, tensor, drive / "file"), before, exchange, end)
    assert transferred == (drive / "file").read_bytes() == CONTENT


@exchanged_by
@pytest.mark.parametrize("start", (HANDLE_READS | HANDLE_WRITES).values(), ids=HANDLE_READS | HANDLE_WRITES)
def test_a_handle_transfers_the_memory_of_the_call(
    handle: Any, direct_disk: FaultyFilesystem, start: Start, exchange: Any
) -> None:
    reads = start in HANDLE_READS.values()
    (direct_disk.behind / "file").write_bytes(CONTENT if reads else b"")
    direct_disk.fail("read" if reads else "write", effect="hang")

    def end(_: object) -> None:
        direct_disk.heal()
        assert handle.wait() == 1

    before = bytes(len(CONTENT)) if reads else CONTENT
    transferred = transfer_exchanged(lambda tensor: start(handle, tensor, direct_disk / "file"), before, exchange, end)
    assert transferred == (direct_disk.behind / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("made_by", ["engine", "handle"])
def test_pinned_memory_cannot_be_freed_by_resizing(
    faulty: Any, gate: Any, engine: Engine, handle: Any, drive: Path, made_by: str, direction: str
) -> None:
    """As memory of torch's own can, which nothing keeps then."""
    held = faulty("threads", queue_depth=1, gate=gate)
    pinned = engine.empty_pinned(len(CONTENT), torch.uint8) if made_by == "engine" else handle.new_cpu_locked_tensor(
        len(CONTENT), torch.empty(0, dtype=torch.uint8)
    )  # fmt: skip
    pinned.copy_(page_aligned(CONTENT))
    (drive / "file").write_bytes(CONTENT)
    future = getattr(held, direction)(pinned, drive / "file")
    for size in (0, 1 << 20):
        with pytest.raises(RuntimeError, match="not resizable"):
            pinned.untyped_storage().resize_(size)
    gate.release()
    assert future.result() == len(CONTENT)
    assert bytes_of(pinned) == (drive / "file").read_bytes() == CONTENT
