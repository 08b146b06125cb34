"""Bytes of every kind of file that is read are flipped, cut out, inserted, zeroed or moved: what is raised is what is documented.

Checksums, where there are some, must find every change of a tensor; a file that was damaged elsewhere may load as it was saved.
"""

from __future__ import annotations

import pickle
import random as random_module
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp

import deepnvme
from deepnvme.checkpoint import CorruptCheckpoint, NVMeReader, NVMeWriter, verify
from deepnvme.safetensors import load_file, save_file
from deepnvme.store.catalog import CorruptTensor
from deepnvme.store.manifest import CorruptManifest
from deepnvme.store.tensor_store import TensorStore
from deepnvme.streaming.weights.weight_store import CorruptExtent, WeightStore

from ....support.shards import save_sharded
from .. import Wrong

SHORT = 6
SECONDS = 120
_DAMAGES_A_TRY = 12

Weights = dict[str, torch.Tensor]


class Kind(NamedTuple):
    """One format: how it is written, read, and what reading a damaged one may raise."""

    write: Callable[[Path], None]
    read: Callable[[Path], Any]
    raises: tuple[type[Exception], ...]
    checked: bool
    """Whether checksums find any change of a tensor, so that what is read is what was written."""


def weights() -> Weights:
    return {
        "a": torch.arange(3000.0),
        "b.weight": torch.arange(12).view(3, 4).t(),
        "c": torch.ones((), dtype=torch.bfloat16),
        "none": torch.empty(0),
        "large": torch.arange(90_000),
    }


def dense() -> Weights:
    return {name: tensor.contiguous() for name, tensor in weights().items()}


def put(path: Path) -> None:
    with TensorStore(path, persist=True, checksum=True) as store:
        store.put_many(dense()).result()
        store.commit()


def got(path: Path) -> Weights:
    with TensorStore(path, persist=True, checksum=True) as store:
        return store.get_many(store.names()).result()


def built(path: Path) -> None:
    WeightStore.build(dense(), path).close()


def streamed(path: Path) -> Weights:
    with WeightStore.open(path) as store:
        store.verify()
        found: Weights = {}
        for name, extent in store.extents.items():
            memory = torch.empty(extent.nbytes, dtype=torch.uint8)
            found.update(extent.tensors(store.read(name, memory).result()))
        return found


def dcp_saved(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**weights(), "object": ["text", 1.5]}, storage_writer=NVMeWriter(path), no_dist=True)


def dcp_loaded(path: Path) -> Weights:
    state: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    state["object"] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.load(state, storage_reader=NVMeReader(path), no_dist=True)
        except dcp.api.CheckpointException as error:
            ((wrapped, _),) = error.failures.values()
            if isinstance(wrapped, AssertionError):  # in place of what this raises, since torch 2.9
                NVMeReader(path).read_metadata()
            raise wrapped from error
    return state


_CORRUPT = (CorruptCheckpoint, pickle.UnpicklingError)
KINDS = {
    "pt": Kind(lambda path: deepnvme.save(weights(), path), deepnvme.load, _CORRUPT, False),
    "pt with checksums": Kind(
        lambda path: deepnvme.save(weights(), path, checksum=True),
        lambda path: deepnvme.load(path, checksum=True),
        _CORRUPT,
        True,
    ),
    "pt of torch": Kind(lambda path: torch.save(weights(), path), deepnvme.load, _CORRUPT, False),
    "pt, verified": Kind(lambda path: deepnvme.save(weights(), path, checksum=True), verify, (), False),
    "safetensors": Kind(lambda path: save_file(dense(), path), load_file, (CorruptCheckpoint,), False),
    "shards": Kind(
        lambda path: save_sharded(dense(), path, most=100_000) and None,
        lambda path: load_file(path / "model.safetensors.index.json"),
        (CorruptCheckpoint, FileNotFoundError),
        False,
    ),
    "a store": Kind(put, got, (CorruptTensor, CorruptManifest, FileNotFoundError), True),
    "a store of weights": Kind(built, streamed, (CorruptExtent, CorruptTensor, CorruptManifest, FileNotFoundError), True),
    "dcp": Kind(dcp_saved, dcp_loaded, (*_CORRUPT, FileNotFoundError), False),
    # with a name or a size that the state to be loaded lacks, which torch tells by these
    "dcp metadata": Kind(dcp_saved, dcp_loaded, (*_CORRUPT, FileNotFoundError, RuntimeError, ValueError), False),
}


def attack(random: random_module.Random, directory: Path) -> None:
    name = random.choice(list(KINDS))
    kind = KINDS[name]
    whole = directory / "whole"
    if name == "shards":
        whole.mkdir()
    kind.write(whole)
    files = sorted(path for path in whole.rglob("*") if path.is_file()) if whole.is_dir() else [whole]
    if name.startswith("dcp"):
        files = [file for file in files if (file.name == ".metadata") == (name == "dcp metadata")]
    contents = {file: file.read_bytes() for file in files}
    for _ in range(_DAMAGES_A_TRY):
        file = random.choice(files)
        what, damaged = damage(random, contents[file])
        file.write_bytes(damaged)
        check(kind, whole, f"{name}: {what} in {file.name}")
        file.write_bytes(contents[file])


def check(kind: Kind, path: Path, what: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = kind.read(path)
    except kind.raises:
        return
    except Exception as error:
        raise Wrong(f"{what}: {type(error).__name__}: {error}") from error
    if kind.checked:
        expected = {name: tensor.contiguous() for name, tensor in weights().items()}
        if found.keys() != expected.keys() or any(not same(found[each], expected[each]) for each in expected):
            raise Wrong(f"{what}: other tensors, and no error")


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found.contiguous(), expected)


def damage(random: random_module.Random, data: bytes) -> tuple[str, bytes]:
    """What was done, and the bytes then. Half of the time in the first or last bytes, where headers and directories are."""

    def place() -> int:
        edge = min(len(data), 4096)
        near = random.choice([random.randrange(edge), len(data) - 1 - random.randrange(edge)])
        return near if random.random() < 0.6 else random.randrange(len(data))

    at, length = place(), random.choice([1, 2, 4, 8, 100, 5000])
    match random.choice(["flip", "set", "cut", "insert", "zero", "swap", "end"]):
        case "flip":
            bit = 1 << random.randrange(8)
            return f"bit {bit} of byte {at} flipped", data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
        case "set":
            byte = random.choice([0, 0x7F, 0x80, 0xFF, ord("."), ord("\n")])
            return f"byte {at} set to {byte}", data[:at] + bytes([byte]) + data[at + 1 :]
        case "cut":
            return f"{length} bytes cut out at {at}", data[:at] + data[at + length :]
        case "insert":
            return f"{length} bytes inserted at {at}", data[:at] + random.randbytes(length) + data[at:]
        case "zero":
            return f"{length} bytes zeroed at {at}", (data[:at] + bytes(length) + data[at + length :])[: len(data)]
        case "swap":
            other = place()
            first, second = sorted((at, other))
            length = min(length, second - first, len(data) - second)
            swapped = data[:first] + data[second : second + length] + data[first + length : second]
            swapped += data[first : first + length] + data[second + length :]
            return f"{length} bytes swapped of {first} and {second}", swapped
        case _:
            return f"cut off at {at}", data[:at]
