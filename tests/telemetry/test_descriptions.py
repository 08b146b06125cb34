"""What ``repr`` says of an object: what one wants to know, at any time, and without waiting for anything."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.checkpoint.publication import Destination
from deepnvme.memory import BufferPool
from deepnvme.offload import OffloadedTraining
from deepnvme.store import TensorStore
from deepnvme.store.futures import StoreFuture
from deepnvme.streaming import Streaming, WeightStore
from deepnvme.tables import Table
from deepnvme.telemetry.descriptions import size_for_people

from ..support.patience import PATIENCE

MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1, "1 bytes"), (1023, "1023 bytes"), (MIB, "1 MiB"), (3 << 29, "1.5 GiB"), (5 << 50, "5120 TiB")],
)
def test_sizes_are_told_in_units_that_people_use(nbytes: int, text: str) -> None:
    assert size_for_people(nbytes) == text


def test_of_a_file_whose_name_is_no_text_the_bytes(engine: deepnvme.Engine, drive: Path) -> None:
    name = os.fsencode(drive) + b"/\xff"
    with engine.open(name, "w") as file:
        assert os.fsencode(repr(file)) == b"<File '" + name + b"', for writing>"


def test_of_a_future_what_is_transferred_and_how_it_ended(engine: deepnvme.Engine, drive: Path) -> None:
    tensor = torch.ones(1024)
    written = engine.write(tensor, drive / "file")
    written.result()
    assert repr(written) == "<Future: write of 4096 bytes at offset 0, done>"
    many = engine.read_many([tensor[:10], tensor[10:]], [drive / "file"] * 2, [0, 40])
    many.result()
    assert repr(many) == "<Future: read of 4096 bytes in 2 transfers, done>"


def test_a_pool_is_told_while_another_thread_is_in_the_midst_of_a_call() -> None:
    pool = BufferPool(MIB)
    told: list[str] = []
    with pool._lock:
        thread = threading.Thread(target=lambda: told.append(repr(pool)), daemon=True)
        thread.start()
        thread.join(timeout=PATIENCE)
    assert told == ["<BufferPool budget=1 MiB, 0 bytes in use, 0 bytes kept for reuse>"]


def test_a_pool_does_not_count_leases_that_have_ended() -> None:
    pool = BufferPool(MIB)
    leased = pool.lease(4096).buffer
    assert repr(pool) == "<BufferPool budget=1 MiB, 4 KiB in use, 0 bytes kept for reuse>"
    del leased
    assert repr(pool) == "<BufferPool budget=1 MiB, 0 bytes in use, 4 KiB kept for reuse>"


def test_of_checkpoints_where_they_are_and_how_they_ended(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = deepnvme.CheckpointManager(drive / "run", keep=2)
    assert repr(manager) == f"<CheckpointManager in '{drive / 'run'}', keep=2, steps none>"
    begun = threading.Event()
    publish = Destination.publish

    def late(*args: Any) -> None:
        begun.wait()
        publish(*args)

    monkeypatch.setattr(Destination, "publish", late)
    save = manager.save(7, [1], asynchronous=True)
    assert repr(save) == f"<SaveFuture '{manager.path(7)}', under way>"
    begun.set()
    save.result()
    assert repr(save) == f"<SaveFuture '{manager.path(7)}', done>"
    failed = deepnvme.async_save([1], drive / "missing" / "file.pt")
    assert isinstance(failed.exception(), OSError)
    assert repr(failed) == f"<SaveFuture '{drive / 'missing' / 'file.pt'}', failed>"
    manager.save(8, [1])
    assert repr(manager) == f"<CheckpointManager in '{drive / 'run'}', keep=2, steps 7, 8>"


def test_of_a_store_its_directories_and_how_many_tensors_it_has(drive: Path) -> None:
    with TensorStore([drive / "a", drive / "b"], persist=True) as store:
        future = store.put("tensor", torch.ones(1024))
        future.result()
        assert repr(future) == "<StoreFuture 4 KiB, done>"
        assert repr(store) == f"<TensorStore in '{drive / 'a'}', '{drive / 'b'}', 1 tensors, persisted>"
        store.commit()
        assert not store.closed
    assert store.closed
    assert store.directories == (drive / "a", drive / "b")
    assert repr(store).endswith(", persisted, closed>")


HALF_BUILT = [
    deepnvme.Engine, deepnvme.OffloadedOptimizer, BufferPool, TensorStore, StoreFuture,
    OffloadedTraining, WeightStore, Streaming, Table, deepnvme.CheckpointManager, deepnvme.SaveFuture,
]  # fmt: skip


@pytest.mark.parametrize("kind", HALF_BUILT, ids=lambda kind: kind.__name__)
def test_an_object_whose_constructor_has_not_run_is_told_all_the_same(kind: type) -> None:
    assert repr(kind.__new__(kind)) == f"<{kind.__name__}>"


def test_in_a_forked_child_they_are_told_to_be_the_parents(faulty: Callable[..., Any], gate: Any, drive: Path) -> None:
    engine = deepnvme.Engine()
    file = engine.open(drive / "file", "w")
    pool, store = BufferPool(MIB), TensorStore(drive / "store")
    future = faulty("threads", gate=gate).write(torch.ones(1024), drive / "other")
    parent = os.getpid()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, "\n".join(map(repr, (engine, file, future, pool, store))).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as said:
        shown = said.read().split("\n")
    gate.release()
    future.result()
    assert shown == [
        f"<Engine of process {parent}, not to be used in this one>",
        f"<File '{drive / 'file'}', of the parent process>",
        "<Future: write of 4096 bytes at offset 0, of the parent process>",
        "<BufferPool budget=1 MiB, 0 bytes in use, 0 bytes kept for reuse, of the parent process, not to be used in this one>",
        f"<TensorStore in '{drive / 'store'}', 0 tensors, of process {parent}, not to be used in this one>",
    ]
    store.close()
    file.close()
    engine.close()
