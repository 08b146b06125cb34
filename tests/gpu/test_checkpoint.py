"""Checkpoints of tensors on a GPU: the files and objects that torch.save and torch.load make of them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.serialization import config

import deepnvme
from deepnvme.swap import BufferPool

from ..support.archives import assert_identical
from ..support.objects import assert_same

pytestmark = pytest.mark.gpu

SAVES = pytest.mark.parametrize("save", [deepnvme.save, torch.save], ids=["ours", "torch's"])


def mixed(device: torch.device) -> dict[str, Any]:
    """Small, large and empty ones, on the CPU and on the device, with views of one storage."""
    large = torch.arange(600_000, device=device)
    return {
        "small": torch.arange(5, device=device),
        "cpu": torch.arange(7),
        "large": large,
        "view": large[3:9],
        "large on the cpu": torch.arange(300_000),
        "misaligned": torch.arange(700_001, dtype=torch.uint8, device=device)[1:],
        "parameter": torch.nn.Parameter(torch.ones(3, device=device, dtype=torch.bfloat16)),
        "empty": torch.empty(0, device=device),
    }


def test_the_file_is_torchs(drive: Path, device: torch.device) -> None:
    obj = mixed(device)
    deepnvme.save(obj, drive / "file.pt", checksum=True)
    expected = io.BytesIO()
    expected.name = "archive"
    with config.patch("save.storage_alignment", 4096):
        torch.save(obj, expected)
    assert_identical((drive / "file.pt").read_bytes(), expected.getvalue())


@SAVES
@pytest.mark.parametrize("location", [None, "cpu", "cuda", "cuda:0", {"cuda:0": "cpu"}, {"cpu": "cuda:0"}, "meta"], ids=str)
def test_the_object_is_torchs(drive: Path, device: torch.device, save: Callable[..., None], location: Any) -> None:
    obj = mixed(device)
    save(obj, drive / "file.pt")
    found, expected = (load(drive / "file.pt", map_location=location) for load in (deepnvme.load, torch.load))
    assert {name: tensor.device for name, tensor in found.items()} == {name: each.device for name, each in expected.items()}
    if location != "meta":
        found, expected = ({name: tensor.cpu() for name, tensor in each.items()} for each in (found, expected))
    assert_same(found, expected)


@SAVES
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_of_objects_that_look_at_their_tensors_when_they_are_made(
    drive: Path, device: torch.device, save: Callable[..., None]
) -> None:
    sparse = (torch.eye(600, device=device) * 3).to_sparse()
    save(sparse, drive / "file.pt")
    found = deepnvme.load(drive / "file.pt")
    assert found.device == sparse.device
    assert torch.equal(found.to_dense(), sparse.to_dense())


def test_checksums_are_verified_on_the_device(drive: Path, device: torch.device) -> None:
    deepnvme.save([torch.ones(400_000, device=device)], drive / "file.pt", checksum=True)
    deepnvme.load(drive / "file.pt", checksum=True)
    content = bytearray((drive / "file.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (drive / "file.pt").write_bytes(content)
    with pytest.raises(deepnvme.checkpoint.CorruptCheckpoint, match="storage 0"):
        deepnvme.load(drive / "file.pt", checksum=True)


@pytest.mark.parametrize("budget", [64 << 20, 16 << 20])
def test_a_state_is_saved_as_the_stream_leaves_it(drive: Path, device: torch.device, budget: int) -> None:
    sizes = (1, 1000, 4 << 20, (40 << 20) + 3)
    tensors = {str(size): torch.arange(size, device=device).to(torch.uint8) for size in sizes}
    torch.cuda.synchronize(device)
    expected = {name: (tensor + 1).cpu() for name, tensor in tensors.items()}
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(200_000_000)
        for tensor in tensors.values():
            tensor.add_(1)
        future = deepnvme.async_save(tensors, drive / "file.pt", pool=BufferPool(budget))
        for tensor in tensors.values():
            tensor.zero_()
    future.result(30)
    found = torch.load(drive / "file.pt", map_location="cpu")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
