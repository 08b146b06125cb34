"""Directories of safetensors files: ours and torch's read each other's, and safetensors reads both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan

from deepnvme.checkpoint import CorruptCheckpoint

from ...support.distributed_states import Into, assert_equal, request
from ...support.torch_versions import ALONE

pytest.importorskip("safetensors", reason="needs safetensors, which torch reads these files' metadata with")
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
    pytest.skip("needs torch 2.9", allow_module_level=True)

from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from deepnvme.checkpoint import NVMeHuggingFaceReader, NVMeHuggingFaceWriter
from deepnvme.checkpoint.dcp import huggingface as dcp_huggingface

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
Make = Callable[..., Any]


def tensors(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "large": torch.randn(600, 601),
        "bf16": torch.randn(7, 5).bfloat16(),
        "columns": torch.randn(30, 40)[:, 3:9],
        "bool": torch.rand(11) > 0.5,
        "long": torch.arange(5) * seed,
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
    }


def save(saved: dict[str, Any], writer: Any) -> None:
    dcp.save(saved, storage_writer=writer, **ALONE)


def load(found: dict[str, Any], reader: Any) -> None:
    dcp.load(found, storage_reader=reader, **ALONE)


def test_what_the_format_cannot_hold_is_refused(drive: Path) -> None:
    with pytest.raises(CheckpointException, match=r"'t'.*the format has not"):
        save({"t": torch.randn(3, dtype=torch.complex128)}, NVMeHuggingFaceWriter(str(drive)))
    assert not list(drive.glob("*.safetensors"))


@pytest.mark.parametrize("cut", [3, 100, 1_000_000])
def test_a_truncated_file_is_an_error_that_names_it(drive: Path, cut: int) -> None:
    save(tensors(1), NVMeHuggingFaceWriter(str(drive)))
    reader = NVMeHuggingFaceReader(str(drive))
    metadata = reader.read_metadata()
    (file,) = drive.glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.truncate(cut)
    reader.read_metadata = lambda: metadata  # safetensors itself would refuse the file there
    with pytest.raises(CheckpointException) as caught:
        load(tensors(0), reader)
    (failure,) = caught.value.failures.values()
    assert isinstance(failure[0], CorruptCheckpoint)
    assert failure[0].filename == str(file)


@pytest.mark.parametrize("writer", [HuggingFaceStorageWriter, NVMeHuggingFaceWriter])
@pytest.mark.parametrize("reader", [HuggingFaceStorageReader, NVMeHuggingFaceReader])
@pytest.mark.parametrize("files", [1, 3])
def test_each_reads_what_the_other_wrote(drive: Path, writer: Make, reader: Make, files: int) -> None:
    if writer is HuggingFaceStorageWriter and writer is not NVMeHuggingFaceWriter:
        saved = {name: tensor.contiguous() for name, tensor in tensors(1).items()}  # it refuses others
    else:
        saved = tensors(1)
    mapping = {name: 1 + number % files for number, name in enumerate(saved)}
    save(saved, writer(str(drive), fqn_to_index_mapping=mapping, thread_count=2))
    found = tensors(0)
    load(found, reader(str(drive)))
    assert_equal(found, saved)
    assert json.loads((drive / "model.safetensors.index.json").read_text())["weight_map"].keys() == saved.keys()


def test_safetensors_and_transformers_find_what_they_know(drive: Path) -> None:
    from safetensors.torch import load_file

    save(tensors(1), NVMeHuggingFaceWriter(str(drive)))
    assert_equal(load_file(drive / "model-00001-of-00001.safetensors"), tensors(1))


def test_shards_are_consolidated_by_torch(drive: Path) -> None:
    from safetensors.torch import load_file

    saved = {name: tensors(1)[name] for name in ("large", "bf16", "columns")}  # it takes floating-point ones only
    save(saved, NVMeHuggingFaceWriter(str(drive), save_distributed=True, enable_consolidation=True))
    assert_equal(load_file(drive / "model-00001-of-00001.safetensors"), saved)


def test_a_file_that_is_replaced_while_it_is_read(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    save(tensors(1), NVMeHuggingFaceWriter(str(drive)))
    fill = dcp_huggingface.fill
    calls = []

    def replaced(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            other = {name: tensor.contiguous() for name, tensor in tensors(2).items()}
            save_file({**other, "first of all": torch.ones(1, dtype=torch.float64)}, drive / "other")
            (drive / "other").rename(next(drive.glob("*.safetensors")))
        fill(*arguments)

    monkeypatch.setattr(dcp_huggingface, "fill", replaced)
    found = tensors(0)
    load(found, NVMeHuggingFaceReader(str(drive)))
    assert_equal(found, tensors(2))


def test_any_part_is_read(drive: Path) -> None:
    saved = {"large": torch.randn(600, 601), "small": torch.randn(6, 7)}
    save(saved, NVMeHuggingFaceWriter(str(drive)))
    reader = NVMeHuggingFaceReader(str(drive))
    reader.set_up_storage_reader(reader.read_metadata(), True)
    asked = [("large", (3, 0), (590, 601)), ("large", (0, 5), (600, 9)), ("small", (1, 2), (3, 4)), ("small", (2, 0), (1, 7))]
    planner = Into([torch.zeros(lengths) for _, _, lengths in asked])
    reader.read_data(LoadPlan([request(*each, number) for number, each in enumerate(asked)]), planner)
    for (name, offsets, lengths), target in zip(asked, planner.targets, strict=True):
        rows, columns = (slice(begin, begin + count) for begin, count in zip(offsets, lengths, strict=True))
        assert torch.equal(target, saved[name][rows, columns])
