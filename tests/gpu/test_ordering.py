"""A transfer comes after what the current stream had been given before, is over when it says so, and waits for nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ..support.memory import pattern
from .conftest import Face, Make, OnDevice

pytestmark = pytest.mark.gpu

SIZE = 5_000_001
WHILE = 1_000_000_000  # cycles, about half a second: what does not wait for them is seen


@pytest.fixture
def side(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """The current stream meanwhile, and not the default one."""
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.synchronize(device)


def busy(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Give the stream something to do; the event tells when it is done."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(WHILE)
        return stream.record_event()


def filled(value: int, device: torch.device) -> torch.Tensor:
    tensor = torch.full((SIZE,), value, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    return tensor


def test_a_write_sees_what_the_stream_was_given_before(
    face: Face, path: Path, device: torch.device, side: torch.cuda.Stream
) -> None:
    tensor = filled(1, device)
    busy(side)
    tensor.fill_(2)
    face.start("write", tensor, path)
    face.wait()
    assert path.read_bytes() == b"\2" * SIZE


def test_a_copy_made_of_a_strided_tensor_is_waited_for(
    face: Face, path: Path, device: torch.device, side: torch.cuda.Stream
) -> None:
    tensor = filled(1, device)
    busy(side)
    tensor.fill_(2)
    face.write(tensor[::2], path)
    assert path.read_bytes() == b"\2" * ((SIZE + 1) // 2)


def test_a_read_is_not_overwritten_by_what_the_stream_was_given_before(
    face: Face, path: Path, device: torch.device, side: torch.cuda.Stream
) -> None:
    content = pattern(SIZE)
    path.write_bytes(content)
    tensor = OnDevice(bytes(SIZE), device)
    torch.cuda.synchronize(device)
    busy(side)
    tensor.tensor.fill_(2)
    face.read(tensor.tensor, path)
    assert tensor.content() == content


def test_what_the_stream_was_given_before_reads_the_old_bytes(
    face: Face, path: Path, device: torch.device, side: torch.cuda.Stream
) -> None:
    path.write_bytes(b"\2" * SIZE)
    tensor = filled(1, device)
    busy(side)
    copy = tensor.clone()
    face.read(tensor, path)
    assert copy.eq(1).all()
    assert tensor.eq(2).all()


def test_a_read_is_there_for_every_stream_when_it_is_done(face: Face, path: Path, device: torch.device) -> None:
    path.write_bytes(b"\2" * SIZE)
    elsewhere, tensor = torch.cuda.Stream(device), filled(1, device)
    face.read(tensor, path)
    with torch.cuda.stream(elsewhere):
        assert tensor.eq(2).all()


def test_each_write_sees_its_own_moment(face: Face, drive: Path, device: torch.device, side: torch.cuda.Stream) -> None:
    source, tensors = filled(1, device), [filled(0, device) for _ in range(4)]
    busy(side)
    for index, tensor in enumerate(tensors):
        source.add_(1)
        tensor.copy_(source)
        face.start("write", tensor, drive / str(index))
    face.wait()
    assert [(drive / str(index)).read_bytes() for index in range(4)] == [bytes([2 + index]) * SIZE for index in range(4)]


@pytest.mark.parametrize("kind", ["engine", "aio_handle"])
@pytest.mark.parametrize("where", ["the same stream, later", "another stream, before"])
def test_nothing_else_is_waited_for(
    make: Make, path: Path, device: torch.device, side: torch.cuda.Stream, kind: str, where: str
) -> None:
    face, tensor, other = make(kind), filled(1, device), torch.cuda.Stream(device)
    face.write(tensor, path)  # the memory that it takes then may be waited for
    event = busy(other) if where == "another stream, before" else None
    face.start("write", tensor, path)
    event = event or busy(side)
    face.wait()
    assert not event.query()
