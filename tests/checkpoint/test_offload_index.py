"""Weights where accelerate's index says that they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.checkpoint.formats.pt_records import CorruptCheckpoint
from deepnvme.checkpoint.weight_locations import OpenFiles, Weights, weights_in_index
from deepnvme.engine import Engine
from deepnvme.safetensors import save_file

WEIGHT = torch.arange(12.0).view(3, 4)

Open = Callable[..., Weights]


@pytest.fixture
def opened(engine: Engine, drive: Path) -> Open:
    """Makes sources of an index, in the drive's directory."""

    def make(index: dict[str, dict[str, Any]], folder: Path | None = drive, **in_memory: torch.Tensor) -> Weights:
        return Weights({**weights_in_index(index, folder), **in_memory}, OpenFiles(engine))

    return make


def read(source: Weights, name: str) -> torch.Tensor:
    dtype, shape = source.info(name)
    out = torch.zeros(source.info(name).nbytes, dtype=torch.uint8)
    source.read_into(name, out).result()
    return out.view(dtype).view(shape)


def test_a_file_without_the_weight_that_is_said_to_be_in_it(opened: Open, drive: Path) -> None:
    save_file({"a": WEIGHT}, drive / "w.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"'b', which is not there.*w\.safetensors"):
        opened({"a": {"safetensors_file": drive / "w.safetensors", "weight_name": "b"}})


def test_files_that_are_missing_are_named(opened: Open, drive: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"a\.dat"):
        opened({"a": {"dtype": "float32", "shape": [3, 4]}})
    with pytest.raises(FileNotFoundError, match=r"w\.safetensors"):
        opened({"a": {"safetensors_file": drive / "w.safetensors"}})


def test_a_raw_file_that_was_cut_off(opened: Open, drive: Path) -> None:
    (drive / "a.dat").write_bytes(bytes(47))
    with pytest.raises(CorruptCheckpoint, match="expected 48 bytes of 'a', found 47"):
        opened({"a": {"dtype": "float32", "shape": [3, 4]}})


def test_an_index_that_speaks_of_a_folder_where_there_is_none(opened: Open) -> None:
    with pytest.raises(ValueError, match="'a' lies in a folder, and none is given"):
        opened({"a": {"dtype": "float32", "shape": [3, 4]}}, folder=None)


def test_a_weight_has_the_dtype_that_the_index_says_whatever_the_file_has(opened: Open, drive: Path) -> None:
    save_file({"first": WEIGHT, "second": WEIGHT.clone()}, drive / "w.safetensors")
    source = opened(
        {
            "a": {"safetensors_file": drive / "w.safetensors", "weight_name": "first", "dtype": "bfloat16"},
            "second": {"safetensors_file": drive / "w.safetensors"},
        }
    )
    assert read(source, "a").equal(WEIGHT.bfloat16())
    assert read(source, "second").equal(WEIGHT)
    assert sorted(source.names()) == ["a", "second"]


def test_what_accelerate_writes_is_found(opened: Open, drive: Path) -> None:
    offload = pytest.importorskip("accelerate.utils.offload", reason="needs accelerate")
    weights = {"a": WEIGHT, "half": WEIGHT.bfloat16(), "one": torch.tensor(3.0)}
    offload.offload_state_dict(str(drive), weights)
    source = opened(json.loads((drive / "index.json").read_text()))
    for name, weight in weights.items():
        assert read(source, name).equal(weight.view(source.info(name).shape)), name
        assert source.info(name).dtype == weight.dtype


def test_what_is_in_memory_is_there_beside_them(opened: Open, drive: Path) -> None:
    (drive / "a.dat").write_bytes(bytes(48))
    source = opened({"a": {"dtype": "float32", "shape": [3, 4]}}, b=WEIGHT)
    assert sorted(source.names()) == ["a", "b"]
    assert read(source, "b").equal(WEIGHT)


def test_a_dtype_of_none_is_that_of_the_file(opened: Open, drive: Path) -> None:
    save_file({"a": WEIGHT}, drive / "w.safetensors")
    source = opened({"a": {"safetensors_file": str(drive / "w.safetensors"), "dtype": None}})
    assert torch.equal(read(source, "a"), WEIGHT)
