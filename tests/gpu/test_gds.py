"""gds_handle on a real device: directly where cuFile can, and where it cannot, through the host with the reason."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ..support.memory import bytes_of, pattern
from .conftest import OnDevice

pytestmark = pytest.mark.gpu

CONTENT = pattern(5_000_001)


def refusal_of_strict(gds: ModuleType, tensor: torch.Tensor, path: Path) -> str | None:
    """Why a transfer cannot go directly here; None if it can."""
    try:
        gds.gds_handle(strict=True).sync_pwrite(tensor, str(path))
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


@pytest.fixture
def direct(gds: ModuleType, drive: Path, device: torch.device) -> Any:
    """A handle that goes by cuFile or fails."""
    refusal = refusal_of_strict(gds, torch.zeros(8192, device=device), drive / "trial")
    if refusal is not None:
        pytest.skip(f"needs GPUDirect Storage: {refusal}")
    return gds.gds_handle(strict=True)


def test_bytes_go_directly_or_the_reason_is_told(gds: ModuleType, path: Path, device: torch.device) -> None:
    handle, target = gds.gds_handle(), OnDevice(bytes(len(CONTENT)), device)
    refusal = refusal_of_strict(gds, torch.zeros(8192, device=device), path)
    handle.sync_pwrite(OnDevice(CONTENT, device).tensor, str(path))
    assert path.read_bytes() == CONTENT
    handle.sync_pread(target.tensor, str(path))
    assert target.content() == CONTENT
    stats = handle.stats()
    if refusal is None:
        assert stats["bytes_gds"] > len(CONTENT)  # all but the ends
        assert stats["fallbacks"] == {}
    else:
        assert stats["bytes_gds"] == 0
        (reason,) = stats["fallbacks"]
        assert reason.startswith("not by GPUDirect Storage, through host memory: ")
        assert reason.rpartition(": ")[2] in refusal


def test_strict_bytes_go_directly(direct: Any, path: Path, device: torch.device) -> None:
    target = OnDevice(bytes(len(CONTENT)), device, 1)
    direct.sync_pwrite(OnDevice(CONTENT, device, 3).tensor, str(path))
    direct.sync_pread(target.tensor, str(path))
    assert path.read_bytes() == target.content() == CONTENT
    assert target.guards_are_intact()
    stats = direct.stats()
    assert stats["bytes_gds"] > len(CONTENT)  # all but the ends
    assert stats["bytes_gds"] + stats["bytes_buffered"] == 2 * len(CONTENT)


@pytest.mark.parametrize("part", ["none", "all", "the beginning", "a part"])
def test_registered_memory_serves_and_so_does_what_is_not(gds: ModuleType, path: Path, device: torch.device, part: str) -> None:
    handle, tensor = gds.gds_handle(), OnDevice(CONTENT, device).tensor
    parts = {"none": tensor[:0], "all": tensor, "the beginning": tensor[:100], "a part": tensor[1_000_000:3_000_000]}
    pinned = handle.pin_device_tensor(parts[part])
    try:
        handle.sync_pwrite(tensor, str(path))
        assert path.read_bytes() == CONTENT
        handle.sync_pread(tensor.zero_(), str(path))
        assert bytes_of(tensor) == CONTENT
    finally:
        assert handle.unpin_device_tensor(parts[part]) == pinned


def test_a_new_registered_tensor_is_like_its_example(gds: ModuleType, path: Path, device: torch.device) -> None:
    handle = gds.gds_handle()
    for _ in range(3):
        tensor = handle.new_pinned_device_tensor(1 << 20, torch.empty(0, dtype=torch.bfloat16, device=device))
        assert (tensor.dtype, tensor.numel(), tensor.device) == (torch.bfloat16, 1 << 20, device)
        handle.sync_pwrite(tensor.fill_(3), str(path))
        assert path.read_bytes() == bytes_of(tensor)
        handle.free_pinned_device_tensor(tensor)


def test_nothing_is_written_where_the_program_runs(
    gds: ModuleType, path: Path, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gds.gds_handle().sync_pwrite(torch.zeros(1 << 20, device=device), str(path))
    assert list(tmp_path.iterdir()) == []
