"""Whichever operation fails while a file is read: the error names the file, and reading it again afterwards succeeds."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
import deepnvme.safetensors
from deepnvme.checkpoint import NVMeReader, NVMeWriter, verify
from deepnvme.drives.aio_config import AioConfig
from deepnvme.store import manifest
from deepnvme.streaming import WeightStore, stream
from deepnvme.swap import TensorStore, buffer_pool
from deepnvme.tables import Table, open_ngram_tables

from ..support.faulty_filesystem import FaultyFilesystem

STATE = {"large": torch.arange(100_000), "small": torch.arange(3), "step": torch.tensor(7)}


def save(path: Path) -> None:
    if path.suffix == ".pt":
        deepnvme.save(STATE, path)
    else:
        deepnvme.safetensors.save_file(STATE, path)


def save_distributed(path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(STATE, storage_writer=NVMeWriter(path), no_dist=True)


def load_distributed(path: Path) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    found = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    dcp.load(found, storage_reader=NVMeReader(path), no_dist=True)
    return found


def verified(path: Path) -> dict[str, Any]:
    assert verify(path).ok
    return STATE


def streamed(path: Path) -> dict[str, Any]:
    model = torch.nn.Module()
    for name, tensor in STATE.items():
        model.register_buffer(name, torch.zeros_like(tensor))
    stream(model, path).close(restore=True)
    return model.state_dict()


LOADS: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    "load": ("model.pt", deepnvme.load),
    "load of safetensors": ("model.safetensors", deepnvme.load),
    "load_file": ("model.safetensors", deepnvme.safetensors.load_file),
    "stream": ("model.pt", streamed),
    "stream of safetensors": ("model.safetensors", streamed),
    "verify": ("model.pt", verified),
    "verify of safetensors": ("model.safetensors", verified),
}


def failures(disk: FaultyFilesystem, operation: str, load: Callable[[], object]) -> set[tuple[int | None, object]]:
    """Errno and file of the errors that each operation of this kind which ``load`` needs leads to if it fails."""
    before = disk.counts()[operation]
    load()
    found = set()
    for number in range(disk.counts()[operation] - before):
        disk.fail(operation, skip=number, times=2)  # the kernel looks a name up again
        try:
            load()
        except OSError as error:
            found.add((error.errno, error.filename))
        gc.collect()
        assert buffer_pool().in_use == 0
        disk.heal()
        load()
    return found


@pytest.mark.parametrize("operation", ["read", "open", "lookup"])
@pytest.mark.parametrize("load_name", LOADS)
def test_an_operation_that_fails_names_the_file(direct_disk: FaultyFilesystem, load_name: str, operation: str) -> None:
    name, load = LOADS[load_name]
    path = direct_disk / name
    save(path)

    def check() -> None:
        loaded = load(path)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in STATE.items())

    found = failures(direct_disk, operation, check)
    assert found == {(errno.EIO, str(path))}


@pytest.mark.parametrize("load_name", LOADS)
@pytest.mark.parametrize("nbytes", [1, 4096])
def test_reads_that_return_less_are_gone_on_with(direct_disk: FaultyFilesystem, load_name: str, nbytes: int) -> None:
    name, load = LOADS[load_name]
    path = direct_disk / name
    save(path)
    before = direct_disk.counts()["read"]
    load(path)
    for skip in range(direct_disk.counts()["read"] - before):
        direct_disk.fail("read", effect="short", value=nbytes, skip=skip, times=10)
        loaded = load(path)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in STATE.items())
        assert "read:short" in direct_disk.heal()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_distributed_checkpoints_file_is_named(direct_disk: FaultyFilesystem) -> None:
    path = direct_disk / "run"
    save_distributed(path)
    for number in range(1, 20):
        direct_disk.fail("read", skip=number, name="__0_0.distcp")
        try:
            load_distributed(path)
        except torch.distributed.checkpoint.CheckpointException as error:
            (inner, _) = error.failures[0]
            assert isinstance(inner, OSError)
            assert (inner.errno, inner.filename) == (errno.EIO, str(path / "__0_0.distcp"))
        direct_disk.heal()
    assert torch.equal(load_distributed(path)["large"], STATE["large"])


@pytest.mark.parametrize("name", [manifest.MANIFEST_NAME, manifest.MEMBERSHIP_NAME])
def test_a_stores_manifest_is_named(direct_disk: FaultyFilesystem, name: str) -> None:
    directories = [direct_disk / "a", direct_disk / "b"]
    with TensorStore(directories, persist=True) as store:
        store.put("large", STATE["large"])
        store.commit()
    direct_disk.fail("read", name=name, times=-1)
    with pytest.raises(OSError, match="Input/output") as caught:
        TensorStore(directories, persist=True)
    assert "read:EIO" in direct_disk.heal()
    path = directories[name == manifest.MEMBERSHIP_NAME] / name
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
    with TensorStore(directories, persist=True) as store:
        assert torch.equal(store.get("large").result(), STATE["large"])


FIFOS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "load": ("model.pt", deepnvme.load),
    "load of safetensors": ("model.safetensors", deepnvme.load),
    "load_file": ("model.safetensors", deepnvme.safetensors.load_file),
    "verify": ("model.pt", verify),
    "WeightStore.build": ("model.pt", lambda path: WeightStore.build(path, path.with_name("weights"))),
    "WeightStore.build of safetensors": ("model.safetensors", lambda path: WeightStore.build(path, path.with_name("weights"))),
    "stream": ("model.pt", lambda path: stream(torch.nn.Linear(1, 1), path)),
    "stream of safetensors": ("model.safetensors", lambda path: stream(torch.nn.Linear(1, 1), path)),
    "Table.open of .npy": ("rows.npy", Table.open),
    "Table.open of .pt": ("rows.pt", Table.open),
    "Table.open of safetensors": ("rows.safetensors", Table.open),
    "Table.open of raw rows": ("rows", lambda path: Table.open(path, dtype=torch.float32, shape=3)),
    "open_ngram_tables": ("rows.safetensors", open_ngram_tables),
    "AioConfig": ("ds_config.json", AioConfig.from_deepspeed),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FIFOS)
def test_a_fifo_is_refused_rather_than_waited_for(name: str, drive: Path) -> None:
    file, read = FIFOS[name]
    os.mkfifo(drive / file)
    with pytest.raises(OSError, match="regular file") as refused:
        read(drive / file)
    assert (refused.value.errno, refused.value.filename) == (errno.EINVAL, str(drive / file))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("blocks", [os.mkfifo, lambda path: path.symlink_to(path.with_name("other"))], ids=["fifo", "link"])
def test_a_commit_writes_through_nothing_that_is_in_the_place_of_its_new_manifest(
    drive: Path, blocks: Callable[[Path], object]
) -> None:
    (drive / "table").mkdir()
    (drive / "table" / "other").write_text("somebody's")
    with Table.create(drive / "table", 10, 3, torch.float32) as table:
        blocks(drive / "table" / "deepnvme-table.json.new")
        table.write(torch.arange(10), torch.ones(10, 3))
        table.commit()
    with Table.open(drive / "table") as table:
        assert torch.equal(table.read(torch.arange(10)), torch.ones(10, 3))
    assert (drive / "table" / "other").read_text() == "somebody's"
