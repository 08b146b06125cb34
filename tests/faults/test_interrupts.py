"""Ctrl-C while a public operation waits for a drive that hangs: it is heard, and the operation can be called again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import deepnvme
from deepnvme.offload import OffloadedTraining
from deepnvme.streaming import WeightStore, stream
from deepnvme.swap import TensorStore
from deepnvme.tables import Table

from ..support.activations import training_in
from ..support.faulty_filesystem import FaultyFilesystem
from ..support.interrupts import ctrl_c_every
from ..support.patience import PATIENCE
from .torture import streams

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
]

TENSORS = {"weight": torch.arange(300_000), "bias": torch.arange(10)}
HEADER_READS = 3
"""Reads of a safetensors file by the calling thread itself, before those of the tensors."""
Case = tuple[Callable[[], Any], Callable[[], None]]
"""An operation, and what checks its effect."""


def check_tensors(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


@contextlib.contextmanager
def put(path: Path) -> Iterator[Case]:
    with TensorStore(path) as store:
        names = list(TENSORS)
        yield lambda: store.put_many(TENSORS).result(), lambda: check_tensors(store.get_many(names).result())


@contextlib.contextmanager
def get(path: Path) -> Iterator[Case]:
    with TensorStore(path) as store:
        store.put_many(TENSORS).result()
        yield lambda: check_tensors(store.get_many(list(TENSORS)).result()), lambda: None


@contextlib.contextmanager
def commit(path: Path) -> Iterator[Case]:
    with TensorStore(path, persist=True) as store:
        store.put_many(TENSORS).result()
        yield store.commit, lambda: None
    with TensorStore(path, persist=True) as store:
        check_tensors(store.get_many(store.names()).result())


@contextlib.contextmanager
def close(path: Path) -> Iterator[Case]:
    store = TensorStore(path)

    def put_and_close() -> None:
        if not store.closed:
            store.put_many(TENSORS)
        store.close()

    yield put_and_close, lambda: None
    assert store.closed


@contextlib.contextmanager
def save(path: Path) -> Iterator[Case]:
    yield lambda: deepnvme.save(TENSORS, path), lambda: check_tensors(deepnvme.load(path))


@contextlib.contextmanager
def async_save(path: Path) -> Iterator[Case]:
    yield lambda: deepnvme.async_save(TENSORS, path).result(), lambda: check_tensors(deepnvme.load(path))


@contextlib.contextmanager
def load(path: Path) -> Iterator[Case]:
    deepnvme.safetensors.save_file(TENSORS, path)
    yield lambda: check_tensors(deepnvme.safetensors.load_file(path)), lambda: None


@contextlib.contextmanager
def save_safetensors(path: Path) -> Iterator[Case]:
    files = deepnvme.safetensors
    yield lambda: files.save_file(TENSORS, path), lambda: check_tensors(files.load_file(path))


@contextlib.contextmanager
def save_distributed(path: Path) -> Iterator[Case]:
    def check() -> None:
        found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
        dcp.load(found, storage_reader=deepnvme.NVMeReader(path), no_dist=True)
        check_tensors(found)

    def save() -> None:
        try:
            dcp.save(TENSORS, storage_writer=deepnvme.NVMeWriter(path, thread_count=1), no_dist=True)
        except dcp.api.CheckpointException as error:  # torch keeps the KeyboardInterrupt in it
            raise error.failures[0][0] from error

    yield save, check


@contextlib.contextmanager
def read_rows(path: Path) -> Iterator[Case]:
    values = torch.arange(100_000).view(100, 1000)
    with Table.from_tensor(path, values, memory_budget=0) as table:

        def read() -> None:
            assert torch.equal(table.read(torch.arange(100)), values)

        yield read, read


@contextlib.contextmanager
def commit_rows(path: Path) -> Iterator[Case]:
    ids, values = torch.arange(100), torch.arange(100_000).view(100, 1000)
    with Table.from_tensor(path, torch.zeros_like(values), updatable=True, memory_budget=1 << 20) as table:

        def change() -> None:
            table.write(ids, values)
            table.commit()

        yield change, lambda: None
    with Table.open(path) as table:
        assert torch.equal(table.read(ids), values)


@contextlib.contextmanager
def streamed_forward(path: Path) -> Iterator[Case]:
    model = streams.model()
    wanted = streams.output(model)
    streams.built(path).close()
    with WeightStore.open(path) as store, stream(model, store, memory_budget=2 * streams.BLOCK_BYTES):
        yield lambda: streams.check_output(model, wanted), lambda: streams.check_output(model, wanted)


@contextlib.contextmanager
def forward_in_place(path: Path) -> Iterator[Case]:
    model = streams.model()
    wanted = streams.output(model)
    deepnvme.safetensors.save_file(dict(model.state_dict()), path)
    with stream(model, path, memory_budget=2 * streams.BLOCK_BYTES):
        yield lambda: streams.check_output(model, wanted), lambda: streams.check_output(model, wanted)


@contextlib.contextmanager
def step_with_activations(path: Path) -> Iterator[Case]:
    with training_in(path) as training:
        training.step()
        yield training.step, training.check_nothing_is_held


@contextlib.contextmanager
def optimizer_step(path: Path) -> Iterator[Case]:
    params = [torch.nn.Parameter(torch.ones(100_000)) for _ in range(4)]
    for param in params:
        param.grad = torch.ones_like(param)
    options = {"path": path, "sub_group_size": 100_000, "lr": 0.1}
    with deepnvme.OffloadedOptimizer(params, torch.optim.SGD, momentum=0.9, **options) as optimizer:
        optimizer.step()

        def check() -> None:  # the step that was interrupted was finished, and none was made twice
            assert optimizer.steps == 2
            assert all(torch.equal(param, params[0]) for param in params)

        yield optimizer.step, check


@contextlib.contextmanager
def training_step(path: Path) -> Iterator[Case]:
    model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4)))
    with OffloadedTraining(model, torch.optim.AdamW, path=path, memory_budget=0) as training:

        def step() -> None:
            training.run_micro_batches([lambda: model(torch.ones(2, 200)).square().mean()])
            training.step()

        def check() -> None:
            assert training.steps == 2

        step()
        yield step, check


@contextlib.contextmanager
def replay(path: Path) -> Iterator[Case]:
    """Overwrites a quarter of a buffer again and again, so that some writes need a commit first, and reads all of it."""
    pytest.importorskip("torchrl", reason="needs torchrl: pip install torchrl==0.14.1")
    from tensordict import TensorDict

    from deepnvme.integrations.torchrl import NVMeStorage

    numbers = torch.arange(100)

    def extend(count: int) -> None:
        for first in range(0, count, 25):
            part = numbers[first : first + 25]
            storage.set(part, TensorDict({"number": part, "pixels": part[:, None].float().expand(25, 5000)}, [25]))

    def run() -> None:
        extend(100)
        check()
        storage.commit()

    def check() -> None:
        found = storage.get(numbers)
        assert torch.equal(found["number"], numbers)
        assert bool((found["pixels"] == numbers[:, None]).all())

    with NVMeStorage(100, path) as storage:
        extend(100)
        yield run, check
    with NVMeStorage(100, path) as storage:
        check()


CASES = [
    (put, "write", "*.data"), (get, "read", "*.data"), (commit, "fsync", "*.data"), (close, "write", "*.data"),
    (save, "write", "*-tmp"), (async_save, "write", "*-tmp"), (load, "read", "it"), (save_safetensors, "write", "*-tmp"),
    (save_distributed, "write", "*-tmp"), (read_rows, "read", "rows"), (commit_rows, "write", "rows"),
    (streamed_forward, "read", "*.data"), (forward_in_place, "read", "it"),
    (step_with_activations, "write", "*.data"), (step_with_activations, "read", "*.data"),
    (optimizer_step, "read", "*.data"), (optimizer_step, "write", "*.data"), (training_step, "read", "*.data"),
    (replay, "read", "*.records"), (replay, "write", "*.records"), (replay, "fsync", "*.records"),
]  # fmt: skip
"""Operations, and what hangs of which files. Others are read and written by the calling thread itself, in the system."""


@pytest.mark.parametrize(("case", "hangs", "name"), CASES, ids=[f"{case.__name__}-{hangs}" for case, hangs, _ in CASES])
def test_an_operation_that_waits_for_the_drive_hears_ctrl_c_and_can_be_called_again(
    case: Callable[[Path], contextlib.AbstractContextManager[Case]], hangs: str, name: str, direct_disk: FaultyFilesystem
) -> None:
    with contextlib.ExitStack() as stack:
        operation, check = stack.enter_context(case(direct_disk / "it"))
        direct_disk.fail(hangs, effect="hang", times=-1, skip=HEADER_READS if case is load else 0, name=name)
        goes_on = threading.Timer(PATIENCE / 20, direct_disk.heal)
        goes_on.start()
        try:
            with ctrl_c_every(0.3), pytest.raises(KeyboardInterrupt):
                operation()
            assert goes_on.is_alive(), "Ctrl-C was heard when the drive went on"
        finally:
            goes_on.cancel()
            direct_disk.heal()
        operation()
        check()
