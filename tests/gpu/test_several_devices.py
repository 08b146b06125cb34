"""Every transfer happens under its tensor's own device, whichever is current."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..support.memory import pattern
from .conftest import Face, OnDevice

pytestmark = pytest.mark.gpu

CONTENT = pattern(3_000_001)


@pytest.fixture
def second() -> torch.device:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return torch.device("cuda", 1)


def test_a_tensor_on_a_device_that_is_not_current(face: Face, path: Path, second: torch.device) -> None:
    assert torch.cuda.current_device() == 0
    target = OnDevice(bytes(len(CONTENT)), second, 5)
    face.write(OnDevice(CONTENT, second).tensor, path)
    assert path.read_bytes() == CONTENT
    face.read(target.tensor, path)
    assert target.content() == CONTENT
    assert target.guards_are_intact()
    assert torch.cuda.current_device() == 0


def test_the_stream_that_counts_is_that_of_the_tensors_device(face: Face, path: Path, second: torch.device) -> None:
    tensor = torch.zeros(5_000_000, dtype=torch.uint8, device=second)
    torch.cuda.synchronize(second)
    with torch.cuda.stream(torch.cuda.Stream(second)):
        torch.cuda._sleep(1_000_000_000)
        tensor.fill_(7)
        with torch.cuda.device(0):
            face.write(tensor, path)
    assert path.read_bytes() == b"\7" * 5_000_000


def test_tensors_of_both_devices_at_once(face: Face, drive: Path, device: torch.device, second: torch.device) -> None:
    devices, contents = [device, second], [pattern(500_000 + index, index) for index in range(30)]
    sources = [OnDevice(content, devices[index % 2]).tensor for index, content in enumerate(contents)]
    targets = [OnDevice(bytes(len(content)), devices[1 - index % 2]) for index, content in enumerate(contents)]
    for index, source in enumerate(sources):
        face.start("write", source, drive / str(index))
    face.wait()
    for index, target in enumerate(targets):
        face.start("read", target.tensor, drive / str(index))
    face.wait()
    assert [target.content() for target in targets] == contents


def test_registered_memory_of_a_device_that_is_not_current(face: Face, path: Path, second: torch.device) -> None:
    if not hasattr(face.served, "pin_device_tensor"):
        pytest.skip("needs a gds_handle")
    tensor = OnDevice(CONTENT, second).tensor
    pinned = face.served.pin_device_tensor(tensor)
    face.write(tensor, path)
    assert face.served.unpin_device_tensor(tensor) == pinned
    assert path.read_bytes() == CONTENT
