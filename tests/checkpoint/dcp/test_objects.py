"""Items of a distributed checkpoint that are no tensors run nothing, unless their reader is told to trust them."""

from __future__ import annotations

import copy
import datetime
import pickle
import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from deepnvme.checkpoint import CorruptCheckpoint, NVMeReader, NVMeWriter

from ...support.distributed_states import Runs
from ...support.torch_versions import ALONE

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

PLAIN: dict[str, Any] = {
    "numbers": [1, -(1 << 70), 1.5, 2j, True, None],
    "text": "t\xe9xt" * 1000,
    "bytes": [b"a", b"\xff\x00", bytearray(b"a")],
    "containers": OrderedDict(a=(1, (2, [3, {4: {5}}])), b={}),
    "counter": Counter("abca"),
    "of torch": [torch.float8_e4m3fn, torch.Size([2, 3]), torch.device("cpu"), torch.float32],
    "rng": random.Random(0).getstate(),
    "param_groups": torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]).state_dict()["param_groups"],
    "scheduler": {"base_lrs": [0.1], "last_epoch": 3, "_last_lr": [0.1]},
}
"""What training scripts have beside their tensors."""


def save(path: Path, item: Any) -> None:
    dcp.save({"item": item, "weight": torch.ones(3)}, storage_writer=NVMeWriter(path), **ALONE)


def load(path: Path, **options: Any) -> Any:
    """The item. Raises what loading it raised."""
    state: dict[str, Any] = {"item": "", "weight": torch.zeros(3)}
    try:
        dcp.load(state, storage_reader=NVMeReader(path, **options), **ALONE)
    except CheckpointException as error:
        ((failure, _),) = error.failures.values()
        raise failure from error
    return state["item"]


@pytest.mark.parametrize("length", [1, 1_000_000])
def test_nothing_in_an_item_is_run(drive: Path, length: int) -> None:
    marker = drive / "run"
    save(drive, [Runs(marker), "x" * length])
    with pytest.raises(pickle.UnpicklingError, match=r"item 'item' of .*mkdir.*NVMeReader\(path, weights_only=False\)"):
        load(drive)
    assert not marker.exists()
    load(drive, weights_only=False)
    assert marker.exists()  # or the test could not fail


def test_the_environment_decides_as_for_torch_load(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(drive, datetime.date(2020, 1, 2))
    with pytest.raises(pickle.UnpicklingError, match=r"datetime\.date"):
        load(drive)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert load(drive) == datetime.date(2020, 1, 2)
    with pytest.raises(pickle.UnpicklingError, match=r"datetime\.date"):
        load(drive, weights_only=True)


def test_a_class_that_the_user_trusts_is_let_in(drive: Path) -> None:
    save(drive, datetime.date(2020, 1, 2))
    with pytest.raises(pickle.UnpicklingError, match=r"add_safe_globals\(\[(datetime\.)?date\]\)"):
        load(drive)
    with torch.serialization.safe_globals([datetime.date]):
        assert load(drive) == datetime.date(2020, 1, 2)


@pytest.mark.parametrize("kind", PLAIN)
def test_what_training_scripts_have_is_loaded(drive: Path, kind: str) -> None:
    save(drive, PLAIN[kind])
    state = {"item": copy.deepcopy(PLAIN[kind]), "weight": torch.zeros(3)}
    dcp.load(state, storage_reader=NVMeReader(drive), **ALONE)
    assert state["item"] == PLAIN[kind]


@pytest.mark.parametrize("before", [b"", b"\x80\2", b"]q\0(", b"PK\1\2"], ids=["head", "pickle", "in the pickle", "directory"])
def test_a_damaged_item_is_told(drive: Path, before: bytes) -> None:
    save(drive, [1, 2, "text"])
    info = next(info for index, info in FileSystemReader(drive).read_metadata().storage_data.items() if index.fqn == "item")
    file = drive / info.relative_path
    data = file.read_bytes()
    at = data.index(before, info.offset)
    file.write_bytes(data[:at] + b"\xff" * 8 + data[at + 8 :])
    with pytest.raises((CorruptCheckpoint, pickle.UnpicklingError), match="item 'item'"):
        load(drive)


def test_an_item_that_takes_too_much_is_refused(drive: Path) -> None:
    """As in test_loading, where more kinds of them are."""
    save(drive, ["(" * 20_000])
    (file,) = drive.glob("*.distcp")
    data = file.read_bytes()
    at = data.index(b"(" * 20_000) - 5
    file.write_bytes(data[:at] + b"N" + b"\x85" * 20_004 + data[at + 20_005 :])
    with pytest.raises(CorruptCheckpoint, match=r"item 'item.*nested more than"):
        load(drive)
