"""What a GPU's memory holds is in the file, and what the file holds in a GPU's memory, as plain Python sees them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ..support.memory import bytes_of, pattern
from ..support.transfers import DTYPES
from .conftest import FACES, Face, Make, OnDevice

pytestmark = pytest.mark.gpu

MIB = 1 << 20
LENGTHS = [1, 511, 4095, 4096, 4097, 65_537, MIB, 3 * MIB + 7]
OFFSETS = [0, 1, 512, 4095, 4096, 100_001]


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("length", LENGTHS)
def test_any_length_at_any_offset(face: Face, path: Path, device: torch.device, length: int, offset: int) -> None:
    before, content = pattern(offset + length + 5000, 1), pattern(length, 2)
    path.write_bytes(before)
    face.write(OnDevice(content, device).tensor, path, offset)
    assert path.read_bytes() == before[:offset] + content + before[offset + length :]
    path.write_bytes(before)
    target = OnDevice(bytes(length), device)
    face.read(target.tensor, path, offset)
    assert target.content() == before[offset : offset + length]
    assert target.guards_are_intact()


@pytest.mark.parametrize("misalignment", [1, 4, 511, 512, 4095])
def test_a_view_may_begin_anywhere_in_its_storage(face: Face, path: Path, device: torch.device, misalignment: int) -> None:
    content = pattern(MIB + 3, misalignment)
    target = OnDevice(bytes(len(content)), device, 4096 - misalignment)
    face.write(OnDevice(content, device, misalignment).tensor, path)
    assert path.read_bytes() == content
    face.read(target.tensor, path)
    assert target.content() == content
    assert target.guards_are_intact()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_as_it_was(face: Face, path: Path, device: torch.device, dtype: torch.dtype) -> None:
    content = pattern(10_007 * dtype.itemsize)
    target = OnDevice(bytes(len(content)), device, 16, dtype)
    face.write(OnDevice(content, device, dtype=dtype).tensor, path, 3)
    assert path.read_bytes() == bytes(3) + content
    face.read(target.tensor, path, 3)
    assert target.content() == content


@pytest.mark.parametrize("view", [
    pytest.param(lambda tensor: tensor.t(), id="transposed"),
    pytest.param(lambda tensor: tensor[::3], id="strided"),
    pytest.param(lambda tensor: tensor[:, 1:500], id="columns"),
    pytest.param(lambda tensor: tensor[:1].expand(9, -1), id="expanded"),
])  # fmt: skip
def test_a_tensor_laid_out_otherwise_is_written_as_it_reads(
    face: Face, path: Path, device: torch.device, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = view(torch.randn(700, 900, device=device))
    face.write(tensor, path)
    assert path.read_bytes() == bytes_of(tensor)


def test_a_new_file_is_as_long_as_its_tensor_and_none_is_truncated(face: Face, path: Path, device: torch.device) -> None:
    face.write(torch.full((2 * MIB + 1,), 1, dtype=torch.uint8, device=device), path)
    face.write(torch.full((MIB + 1,), 2, dtype=torch.uint8, device=device), path)
    assert path.read_bytes() == b"\2" * (MIB + 1) + b"\1" * MIB


def test_zero_bytes(face: Face, path: Path, device: torch.device) -> None:
    face.write(torch.empty(0, device=device), path)
    assert path.read_bytes() == b""
    face.read(torch.empty(0, 7, device=device), path)


def test_more_than_the_staging_holds(face: Face, path: Path, device: torch.device) -> None:
    content = pattern(MIB + 1) * 150
    target = torch.zeros(len(content), dtype=torch.uint8, device=device)
    face.write(OnDevice(content, device).tensor, path)
    assert path.read_bytes() == content
    face.read(target, path)
    assert torch.equal(target.cpu(), torch.frombuffer(bytearray(content), dtype=torch.uint8))


def test_several_of_each_kind_at_once_with_host_memory_between(make: Make, drive: Path, device: torch.device) -> None:
    faces = [make(kind) for kind in FACES * 2]
    contents = [pattern(300_000 + index, index) for index in range(60)]
    host = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
    on_device = [OnDevice(content, device, index % 5).tensor for index, content in enumerate(contents)]
    targets = [OnDevice(bytes(len(content)), device, index % 3) for index, content in enumerate(contents)]
    for index in range(60):
        faces[index % 6].start("write", (host if index % 4 == 0 else on_device)[index], drive / str(index))
    for face in faces:
        face.wait()
    assert [(drive / str(index)).read_bytes() for index in range(60)] == contents
    for index, target in enumerate(targets):
        faces[(index + 1) % 6].start("read", target.tensor, drive / str(index))
    for face in faces:
        face.wait()
    assert [target.content() for target in targets] == contents
    assert all(target.guards_are_intact() for target in targets)


def test_one_file_written_in_parts_by_several_at_once(make: Make, path: Path, device: torch.device) -> None:
    parts = [pattern(1_000_003, index) for index in range(6)]  # the pages at their borders are shared
    tensors = [OnDevice(part, device).tensor for part in parts]
    path.write_bytes(bytes(6 * 1_000_003))
    faces = [make(kind) for kind in FACES * 2]
    for index, (face, tensor) in enumerate(zip(faces, tensors, strict=True)):
        face.start("write", tensor, path, index * 1_000_003)
    for face in faces:
        face.wait()
    assert path.read_bytes() == b"".join(parts)


def test_an_error_is_of_its_request_and_leaves_the_device_usable(face: Face, path: Path, device: torch.device) -> None:
    tensor = torch.ones(MIB, device=device)
    with pytest.raises(FileNotFoundError):
        face.read(tensor, path)
    with pytest.raises(IsADirectoryError):
        face.write(tensor, path.parent)
    face.write(tensor, path)
    assert path.read_bytes() == bytes_of(tensor)
