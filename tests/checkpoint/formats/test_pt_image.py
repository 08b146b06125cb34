"""The file is torch.save's, byte for byte, with storages on pages of their own."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.checkpoint.formats.file_image import FileImage, add_checksums
from deepnvme.checkpoint.formats.pt_image import pt_image
from deepnvme.memory.tensor_bytes import memory_of

from ...support.archives import assert_identical
from ...support.objects import OBJECTS

config = pytest.importorskip("torch.utils.serialization", reason="needs torch 2.7: archives to compare with").config

GIB = 1 << 30


def content(image: FileImage) -> bytes:
    into = torch.empty(image.nbytes, dtype=torch.uint8)
    image.copy(0, image.nbytes, into)
    if image.checksums is not None:
        add_checksums(image.checksums, 0, into)
    return bytes(memory_of(into))


def ours(obj: Any, protocol: int = 2, checksum: bool | None = True) -> bytes:
    return content(pt_image(obj, protocol, checksum))


def torchs(obj: Any, protocol: int = 2, checksum: bool = True) -> bytes:
    saved = io.BytesIO()
    saved.name = "archive"  # the records' folder, which torch has of the file's name
    with config.patch({"save.storage_alignment": 4096, "save.compute_crc32": checksum}):
        torch.save(obj, saved, pickle_protocol=protocol)
    return saved.getvalue()


class TestIdentity:
    @pytest.mark.parametrize("kind", OBJECTS)
    def test_the_file_of_every_kind_of_object_is_torchs(self, kind: str) -> None:
        obj = OBJECTS[kind]()
        assert_identical(ours(obj), torchs(obj))

    @pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
    def test_the_file_of_every_protocol_is_torchs(self, protocol: int) -> None:
        obj = OBJECTS["an optimizer"]()
        assert_identical(ours(obj, protocol), torchs(obj, protocol))

    @pytest.mark.parametrize("kind", OBJECTS)
    def test_the_file_saved_with_defaults_is_torchs(self, kind: str) -> None:
        obj = OBJECTS[kind]()
        assert_identical(ours(obj, checksum=None), torchs(obj))

    @pytest.mark.parametrize("kind", OBJECTS)
    def test_checksums_that_torch_leaves_out_are_left_out(self, kind: str) -> None:
        obj = OBJECTS[kind]()
        expected = torchs(obj, checksum=False)
        with config.patch({"save.compute_crc32": False}):
            assert_identical(ours(obj, checksum=None), expected)

    def test_the_file_of_distributed_tensors_is_torchs(self, process_group: None) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (1,))
        obj = {"weight": distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])}
        assert_identical(ours(obj), torchs(obj))

    def test_the_file_of_a_tensor_subclass_is_torchs(self) -> None:
        from torch.testing._internal.two_tensor import TwoTensor

        obj = TwoTensor(torch.ones(3), torch.zeros(3))
        assert_identical(ours(obj), torchs(obj))


class TestSizes:
    @pytest.mark.parametrize("sizes", [(5 * GIB,), (3 * GIB, 2 * GIB, 10), (1, 4 * GIB - 1, 1), (4 * GIB, 4 * GIB, 7)], ids=str)
    def test_storages_beyond_four_gigabytes_lie_where_torch_puts_them(self, sizes: tuple[int, ...], tmp_path: Path) -> None:
        # Memory that is never touched: neither is there so much, nor would it be quick.
        obj = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        image = pt_image(obj, 2, False)
        skeleton = tmp_path / "archive.pt"
        with config.patch("save.storage_alignment", 4096), torch.serialization.skip_data():
            torch.save(obj, skeleton)
        assert image.nbytes == skeleton.stat().st_size
        with skeleton.open("rb") as expected:
            assert records(_End(image)) == records(expected)

    def test_storages_are_not_looked_at_before_they_are_written(self) -> None:
        before = _resident()
        pt_image([torch.empty(2 * GIB, dtype=torch.uint8)], 2, None)
        assert _resident() - before < 64 << 20


def records(file: Any) -> list[tuple[str, int, int]]:
    with zipfile.ZipFile(file) as opened:
        return [(info.filename, info.header_offset, info.file_size) for info in opened.infolist()]


class _End(io.RawIOBase):
    """A file of which only the last page is there."""

    def __init__(self, image: FileImage) -> None:
        self._begin = self._at = max(0, image.nbytes - 4096)
        into = torch.empty(image.nbytes - self._begin, dtype=torch.uint8)
        image.copy(self._begin, image.nbytes, into)
        self._end = bytes(memory_of(into))

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (self._begin + len(self._end) if whence == 2 else 0)
        return self._at

    def read(self, size: int = -1) -> bytes:
        at = self._at - self._begin
        data = self._end[at:] if size < 0 else self._end[at : at + size]
        self._at += len(data)
        return data


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_the_same_structure_has_the_same_identity() -> None:
    def identity(make: Callable[[], Any]) -> bytes:
        with zipfile.ZipFile(io.BytesIO(ours(make()))) as opened:
            return opened.read("archive/.data/serialization_id")

    assert identity(OBJECTS["an optimizer"]) == identity(OBJECTS["an optimizer"])
    assert identity(OBJECTS["an optimizer"]) != identity(OBJECTS["a state_dict"])
