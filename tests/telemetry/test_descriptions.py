"""What ``repr`` says of an object: what one wants to know, at any time, and without waiting for anything."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepnvme
from deepnvme.checkpoint import SaveFuture
from deepnvme.memory import BufferPool
from deepnvme.nn import EmbeddingOnDisk
from deepnvme.offload import OffloadedTraining, save_on_disk
from deepnvme.store import TensorStore
from deepnvme.store.futures import StoreFuture
from deepnvme.streaming import Streaming, WeightStore, stream
from deepnvme.tables import Table
from deepnvme.telemetry.descriptions import shorten, size_for_people

from ..support.patience import PATIENCE

MIB = 1 << 20


def a_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1, "1 bytes"), (1023, "1023 bytes"), (MIB, "1 MiB"), (3 << 29, "1.5 GiB"), (5 << 50, "5120 TiB")],
)
def test_sizes_are_told_in_units_that_people_use(nbytes: int, text: str) -> None:
    assert size_for_people(nbytes) == text


def test_of_an_engine_its_backend_and_settings_are_told(op: Any) -> None:
    engine = deepnvme.Engine("threads", queue_depth=7, num_threads=2)
    assert repr(engine) == "<Engine threads, block_size=1 MiB, queue_depth=7, num_threads=2>"
    engine.close()
    assert repr(engine) == "<Engine threads, block_size=1 MiB, queue_depth=7, num_threads=2, closed>"


def test_of_a_file_its_path_and_what_it_is_open_for(engine: deepnvme.Engine, drive: Path) -> None:
    for mode, purpose in (("w", "writing"), ("r", "reading"), ("r+", "reading and writing")):
        with engine.open(drive / "file", mode) as file:  # type: ignore[arg-type]
            assert repr(file) == f"<File '{drive / 'file'}', for {purpose}>"
        assert repr(file) == f"<File '{drive / 'file'}', closed>"


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


def test_of_a_future_that_is_under_way_its_file(faulty: Callable[..., Any], gate: Any, drive: Path) -> None:
    engine = faulty("threads", gate=gate)
    future = engine.write(torch.ones(1024), drive / "file")
    assert repr(future) == f"<Future: write of 4096 bytes at offset 0 '{drive / 'file'}', under way>"
    gate.release()
    future.result()


def test_of_a_future_that_failed_the_error(faulty: Callable[..., Any], drive: Path) -> None:
    (drive / "file").write_bytes(bytes(4096))
    future = faulty("threads", error_every=1, error=5).read(torch.ones(1024), drive / "file")
    assert future.exception() is not None
    assert repr(future).startswith("<Future: read of 4096 bytes at offset 0, failed: [Errno 5] ")


def test_of_a_pool_its_budget_and_what_of_it_is_in_use(op: Any) -> None:
    pool = BufferPool(8 * MIB)
    assert repr(pool) == "<BufferPool budget=8 MiB, 0 bytes in use, 0 bytes kept for reuse>"
    with pool.lease(MIB):
        assert repr(pool) == "<BufferPool budget=8 MiB, 1 MiB in use, 0 bytes kept for reuse>"


def test_a_pool_is_told_while_another_thread_is_in_the_midst_of_a_call() -> None:
    pool = BufferPool(MIB)
    told: list[str] = []
    with pool._lock:
        thread = threading.Thread(target=lambda: told.append(repr(pool)), daemon=True)
        thread.start()
        thread.join(timeout=PATIENCE)
    assert told == ["<BufferPool budget=1 MiB, 0 bytes in use, 0 bytes kept for reuse>"]


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


def test_of_checkpoints_their_directory_and_of_a_save_how_far_it_is(drive: Path) -> None:
    manager = deepnvme.CheckpointManager(drive / "run", keep=2)
    assert repr(manager) == f"<CheckpointManager in '{drive / 'run'}', keep=2, no checkpoints>"
    saving = manager.save(1, [torch.ones(1024)], asynchronous=True)
    nbytes = saving.result()
    assert repr(saving) == f"<SaveFuture of '{drive / 'run' / 'step-00000001.pt'}', {size_for_people(nbytes)}, saved>"


def test_of_an_optimizer_what_it_wraps_and_where_and_its_parameter_groups(drive: Path) -> None:
    model = a_model()
    optimizer = deepnvme.OffloadedOptimizer(
        model.parameters(), torch.optim.AdamW, nvme_path=drive / "states", dram_budget=MIB, lr=0.125
    )
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    head, first, *rest = repr(optimizer).splitlines()
    assert head == (f"<OffloadedOptimizer of AdamW, in '{drive / 'states'}', dram_budget=1 MiB, 1 sub-groups, 1 steps made> (")
    assert first == "Parameter Group 0"
    assert "    lr: 0.125" in rest
    optimizer.close()
    assert "1 steps made, closed> (" in repr(optimizer)


def test_of_a_training_the_model_the_optimizer_and_the_budget(drive: Path) -> None:
    training = OffloadedTraining(a_model(), torch.optim.SGD, nvme_path=drive, memory_budget=64 * MIB, lr=0.1, blocks=["0", "1"])
    shown = repr(training)
    assert shown.startswith(f"<OffloadedTraining of Sequential by SGD, in '{drive}/")
    assert ", memory_budget=64 MiB, " in shown
    assert shown.endswith(" blocks, 0 steps made>")
    training.close()
    assert repr(training).endswith(" 0 steps made, closed>")


def test_of_saved_activations_their_directory_and_budget(drive: Path) -> None:
    activations = save_on_disk(drive, memory_budget=4 * MIB)
    assert repr(activations) == f"<save_on_disk in '{drive}', memory_budget=4 MiB, min_bytes=1 MiB>"


def test_of_a_streamed_model_its_store_and_budget(drive: Path) -> None:
    model = a_model()
    store = WeightStore.build(model, drive / "store", blocks=["0", "1"])
    with store, stream(model, store) as streaming:
        holds = f"4 weights, 2 blocks, {size_for_people(store.nbytes)}"
        assert repr(store) == f"<WeightStore in '{drive / 'store'}', of Sequential, {holds}>"
        assert repr(streaming) == f"<Streaming of Sequential from {store!r}, memory_budget=0 bytes>"
        streaming.close()
        assert repr(streaming).endswith(", memory_budget=0 bytes, closed>")
    assert repr(store).endswith(", closed>")


def test_of_a_kv_cache_its_place_and_layers(drive: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from deepnvme.streaming import OffloadedCache

    config = transformers.LlamaConfig(num_hidden_layers=2, hidden_size=16, num_attention_heads=2)
    cache = OffloadedCache(config, path=drive / "kv")
    assert repr(cache) == f"<OffloadedCache in '{drive / 'kv'}', 2 layers, 0 positions, memory_budget=0 bytes>"
    cache.close()
    assert repr(cache).endswith(", closed>")


def test_of_a_table_its_file_shape_and_budget(drive: Path) -> None:
    embedding = EmbeddingOnDisk(100, 16, path=drive / "rows", memory_budget=MIB)
    table = embedding.table
    shown = repr(table)
    assert shown.startswith(f"<Table '{drive / 'rows'}")
    assert ", shape=(100, 16), dtype=torch.float32, memory_budget=1 MiB" in shown
    assert repr(embedding) == f"EmbeddingOnDisk(100, 16, table={table!r})"
    table.close()
    assert repr(table).endswith(", closed>")


HALF_BUILT = [
    deepnvme.Engine, deepnvme.CheckpointManager, deepnvme.OffloadedOptimizer, BufferPool, TensorStore, StoreFuture, SaveFuture,
    OffloadedTraining, save_on_disk, WeightStore, Streaming, Table,
]  # fmt: skip


@pytest.mark.parametrize("kind", HALF_BUILT, ids=lambda kind: kind.__name__)
def test_an_object_whose_constructor_has_not_run_is_told_all_the_same(kind: type) -> None:
    assert repr(kind.__new__(kind)) == f"<{kind.__name__}>"


def test_a_module_whose_constructor_has_not_run_is_told_all_the_same() -> None:
    made = EmbeddingOnDisk.__new__(EmbeddingOnDisk)
    nn.Module.__init__(made)
    assert repr(made) == "EmbeddingOnDisk()"


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


def test_as_many_as_wanted_and_the_number_of_the_others() -> None:
    assert shorten([]) == ""
    assert shorten("abcd") == "a, b, c, d"
    assert shorten("abcdef") == "a, b, c, d, and 2 more"
    assert shorten(iter("abc"), 1, "\n  ") == "a\n  and 2 more"
