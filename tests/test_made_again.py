"""What a notebook's cell, or a function in a loop, makes again on a path that it has used before."""

from __future__ import annotations

import errno
import gc
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme import OffloadedOptimizer
from deepnvme.files.directory_lock import StoreLocked
from deepnvme.offload import OffloadedTraining
from deepnvme.streaming import WeightStore
from deepnvme.swap import TensorStore
from deepnvme.tables import Table

SETUP = """
import torch
from torch import nn
import deepnvme
from deepnvme.nn import EmbeddingOnDisk
from deepnvme.offload import OffloadedTraining
from deepnvme.states.step import OptimizerStep
from deepnvme.streaming import WeightStore
from deepnvme.tables import RowOptimizer, Table

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()

batch = torch.ones(4, 64)

def optimizer_of(model):
    return deepnvme.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, path=path / "states", lr=0.1)

def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
"""
LINE = 1 + next(index for index, line in enumerate(SETUP.splitlines()) if "OffloadedOptimizer(" in line)
MADE = f"cell-0:{LINE}"
"""Where optimizer_of() makes one."""
OPTIMIZER = """model = Model()
opt = optimizer_of(model)
train(model, opt, 2)
"""
TRAINING = """model = Model()
training = OffloadedTraining(model, torch.optim.AdamW, path=path, memory_budget=1 << 24, lr=0.1)
training.step(batch)
"""


class Notebook:
    """Runs cells in one namespace. What a cell's code says of itself has the file name "cell-1", "cell-2" and so on."""

    def __init__(self, path: Path) -> None:
        self.names: dict[str, Any] = {"path": path, "__name__": "__main__"}
        self.cells = -1
        self.run(SETUP)

    def run(self, source: str) -> None:
        self.cells += 1
        exec(compile(source, f"cell-{self.cells}", "exec"), self.names)

    def __getitem__(self, name: str) -> Any:
        return self.names[name]


@pytest.fixture
def notebook(drive: Path) -> Iterator[Notebook]:
    made = Notebook(drive)
    yield made
    for each in made.names.values():
        table = getattr(each, "table", None)
        for closed in (each, table):
            if isinstance(closed, OffloadedOptimizer | OffloadedTraining | TensorStore | WeightStore | Table):
                closed.close()


@pytest.fixture
def no_collection() -> Iterator[None]:
    """The interpreter collects no garbage by itself."""
    gc.disable()
    yield
    gc.enable()


# Optimizers


def test_a_cell_that_makes_an_optimizer_runs_again(notebook: Notebook) -> None:
    notebook.run(OPTIMIZER)
    old = notebook["opt"]
    with pytest.warns(UserWarning, match=r"the states of its 2 steps are removed\. state_dict\(\) keeps them") as warned:
        notebook.run(OPTIMIZER)
    assert [(each.filename, each.lineno) for each in warned] == [("cell-0", LINE)]
    assert notebook["opt"].steps == 2
    for use in (old.step, old.state_dict, lambda: old.clip_grad_norm_(1.0)):
        says = f"this OffloadedOptimizer was closed: another one was made on '.*states' at {MADE}: use that one"
        with pytest.raises(RuntimeError, match=says):
            use()
    old.close()
    assert (notebook["path"] / "states").exists()
    train = notebook["train"]
    train(notebook["model"], notebook["opt"], 1)
    assert notebook["opt"].steps == 3


def test_an_old_optimizer_trains_no_old_model_in_silence(notebook: Notebook) -> None:
    notebook.run("model = Model()\nopt = optimizer_of(model)\nold_model, old = model, opt")
    notebook.run("model = Model()\nopt = optimizer_of(model)")
    before = [param.clone() for param in notebook["old_model"].parameters()]
    with pytest.raises(RuntimeError, match="another one was made"):
        notebook.run("train(old_model, old, 1)")
    assert all(map(torch.equal, before, notebook["old_model"].parameters()))


@pytest.mark.parametrize("options", [{}, {"offload_gradients": True}, {"memory_budget": 1 << 20}], ids=str)
def test_an_optimizer_that_nobody_has_frees_its_directory(
    notebook: Notebook, no_collection: None, options: dict[str, Any]
) -> None:
    """It is in cycles, and its model, whose parameters have its hooks, is still there."""
    models = []
    for _ in range(3):
        model = notebook["Model"]()
        models.append(model)
        optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, path=notebook["path"] / "states", **options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        notebook["train"](model, optimizer, 2)
        scheduler.step()
        del optimizer, scheduler
    gc.collect()
    assert not (notebook["path"] / "states").exists()


def test_a_warning_that_is_an_error_leaves_the_optimizer_before(notebook: Notebook) -> None:
    notebook.run(OPTIMIZER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="2 steps"):
            notebook.run(OPTIMIZER)
    notebook.run("train(model, opt, 0)\nopt.step()")
    assert notebook["opt"].steps == 3


def test_an_optimizer_that_cannot_be_closed_is_named_with_the_reason(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook.run(OPTIMIZER + "state = opt.state_dict()")

    def fails(reason: object) -> None:
        raise OSError(errno.EIO, "it could not be closed")

    with monkeypatch.context() as patch:
        patch.setattr(notebook["opt"]._step, "close", fails)
        with pytest.raises(StoreLocked, match=f"made at {MADE}: .*; it cannot be closed for this one: .* could not be closed"):
            notebook.run("other = optimizer_of(Model())")
    notebook.run("train(model, opt, 1)")
    assert notebook["opt"].steps == 3


def test_an_optimizer_whose_step_runs_is_not_closed(notebook: Notebook) -> None:
    """In another thread than the one that makes both."""
    notebook.run(OPTIMIZER)
    begun, goes_on = threading.Event(), threading.Event()

    def closure() -> None:
        begun.set()
        goes_on.wait()

    stepping = threading.Thread(target=notebook["opt"].step, args=(closure,))
    stepping.start()
    begun.wait()
    try:
        with pytest.raises(StoreLocked, match="it cannot be closed for this one: a step or another method of it is running"):
            notebook.run("other = optimizer_of(Model())")
    finally:
        goes_on.set()
        stepping.join()
    notebook.run("train(model, opt, 1)")
    assert notebook["opt"].steps == 4


def test_an_optimizer_stays_if_another_one_cannot_have_all_directories(notebook: Notebook, drive: Path) -> None:
    notebook.run(OPTIMIZER)
    states = notebook["path"] / "states"
    (drive / "file").touch()
    with pytest.raises((NotADirectoryError, FileExistsError)):
        OffloadedOptimizer(notebook["Model"]().parameters(), torch.optim.AdamW, path=[states, drive / "file" / "x"])
    with TensorStore(drive / "store"), pytest.raises(StoreLocked, match="TensorStore"):
        OffloadedOptimizer(notebook["Model"]().parameters(), torch.optim.AdamW, path=[states, drive / "store"])
    notebook.run("train(model, opt, 1)")
    assert notebook["opt"].steps == 3


def test_another_kind_of_object_does_not_take_an_optimizers_directory(notebook: Notebook) -> None:
    notebook.run(OPTIMIZER)
    with pytest.raises(StoreLocked, match=rf"the OffloadedOptimizer .* that was made at {MADE}: call its close\(\), or choose"):
        TensorStore(notebook["path"] / "states")
    notebook.run("train(model, opt, 1)")


# A training of a whole model


def trainings(path: Path) -> list[str]:
    return [name for name in os.listdir(path) if name.startswith("deepnvme-training")]


def test_a_cell_that_makes_a_model_and_its_training_runs_again(notebook: Notebook) -> None:
    for _ in range(4):
        notebook.run(TRAINING)
        assert len(trainings(notebook["path"])) <= 2


def test_a_second_training_of_a_model_names_the_first(notebook: Notebook) -> None:
    notebook.run(TRAINING)
    again = TRAINING.replace("model = Model()", "")
    with pytest.raises(RuntimeError, match=r"this Model is trained by the OffloadedTraining .* at cell-1:2: call its close\(re"):
        notebook.run(again)
    notebook["training"].step(notebook["batch"])
    notebook["training"].close(restore=True)
    notebook.run(again)
    assert notebook["training"].steps == 1


def test_a_second_training_of_a_model_takes_the_place_of_the_first_if_it_has_values(notebook: Notebook, tmp_path: Path) -> None:
    notebook.names["values"] = tmp_path / "values.pt"
    notebook.run("torch.save(Model().state_dict(), values)\nmodel = Model()")
    cell = TRAINING.replace("model = Model()", "").replace("lr=", "checkpoint=values, lr=")
    notebook.run(cell)
    old = notebook["training"]
    with pytest.warns(UserWarning, match=r"its 1 steps are lost\. save\(\) keeps them"):
        notebook.run(cell)
    for use in (lambda: old.step(notebook["batch"]), old.state_dict):
        with pytest.raises(RuntimeError, match=r"closed: another one was made of its model at cell-3:2: use that one"):
            use()
    assert len(trainings(notebook["path"])) == 1
    notebook["training"].state_dict()
    notebook.run(cell)


# Stores and tables, which outlive the objects that have them open


def test_a_store_is_refused_and_named(notebook: Notebook) -> None:
    """Two parts of a program might share it."""
    notebook.run("store = deepnvme.swap.TensorStore(path / 'store')\nstore.put('a', batch).result()")
    with pytest.raises(StoreLocked, match=r"the TensorStore .* that was made at cell-1:1: call its close\(\), or choose another"):
        notebook.run("store = deepnvme.swap.TensorStore(path / 'store')")
    assert torch.equal(notebook["store"].get("a").result(), notebook["batch"])
    notebook.run("store.close()\nstore = deepnvme.swap.TensorStore(path / 'store')")


def test_a_store_of_weights_is_opened_again_and_named_when_it_is_built_again(notebook: Notebook) -> None:
    build = "store = WeightStore.build(Model(), path / 'weights')"
    notebook.run(build)
    notebook.run("store = WeightStore.open(path / 'weights')")
    with pytest.raises(StoreLocked, match=r"open for reading by the WeightStore .* that was made at cell-2:1: call its close"):
        notebook.run(build)
    notebook["store"].close()
    with pytest.raises(FileExistsError):
        notebook.run(build)


def test_a_table_that_is_written_is_refused_and_named(notebook: Notebook) -> None:
    notebook.run("table = Table.create(path / 'table', 10, 4, torch.float32)\ntable.write(torch.tensor([3]), torch.ones(1, 4))")
    again = "table = Table.open(path / 'table', writable=True)"
    with pytest.raises(StoreLocked, match=r"the Table .* at cell-1:1: commit\(\) what is to be kept, and call its close\(\)"):
        notebook.run(again)
    notebook.run("table.commit()\ntable.close()")
    notebook.run(again)
    assert torch.equal(notebook["table"].read(torch.tensor([3])), torch.ones(1, 4))


def test_an_embedding_that_is_trained_is_refused_and_named(notebook: Notebook, no_collection: None) -> None:
    cell = """
embedding = EmbeddingOnDisk(100, 8, path=path / "table", optimizer=torch.optim.SGD)
optimizer = RowOptimizer(embedding, lr=0.1)
embedding(torch.tensor([1, 2])).sum().backward()
optimizer.step()
"""
    notebook.run(cell)
    with pytest.raises(StoreLocked, match=r"the Table .* made at cell-1:2: commit\(\) .* \(an embedding has it as \.table\)"):
        notebook.run(cell)
    notebook.run("optimizer.commit()\nembedding.table.close()\n" + cell)
    notebook.run("cycle = [embedding, optimizer]\ncycle.append(cycle)\ndel embedding, optimizer, cycle")
    notebook.run(cell)


def test_an_optimizer_of_rows_is_made_again(notebook: Notebook) -> None:
    notebook.run('embedding = EmbeddingOnDisk(100, 8, path=path / "table", optimizer=torch.optim.SGD)')
    cell = """
optimizer = RowOptimizer(embedding, lr=0.1)
embedding(torch.tensor([1, 2])).sum().backward()
optimizer.step()
optimizer.zero_grad()
"""
    notebook.run(cell)
    notebook.run(cell)
    notebook["embedding"].table.close()


# What has a directory of its own, or no lock


def test_activations_kv_caches_and_checkpoints_are_made_again(notebook: Notebook) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    notebook.names["config"] = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=32, vocab_size=64
    )
    cell = """
from deepnvme.streaming import OffloadedCache
activations = deepnvme.save_on_disk(path / "activations", memory_budget=0, min_bytes=0)
x = torch.ones(64, 64, requires_grad=True)
with activations:
    y = x.exp().sum()
y.backward()
cache = OffloadedCache(config, path=path / "cache")
manager = deepnvme.CheckpointManager(path / "checkpoints")
manager.save(1, {"a": batch})
"""
    for _ in range(3):
        notebook.run(cell)
    assert torch.equal(notebook["x"].grad, notebook["x"].exp())
    notebook["activations"].close()
    notebook["cache"].close()
    gc.collect()
    assert not [*notebook["path"].glob("activations/*"), *notebook["path"].glob("cache/*")]


def test_what_has_close_is_a_context_manager() -> None:
    """Of all public classes that take a directory; save_on_disk is entered to save, and its files go at exit."""
    from deepnvme.streaming import OffloadedCache, Streaming

    for each in (OffloadedOptimizer, OffloadedTraining, TensorStore, Table, WeightStore, OffloadedCache, Streaming):
        assert hasattr(each, "close")
        assert hasattr(each, "__enter__"), each
    assert hasattr(deepnvme.Engine, "__enter__")
