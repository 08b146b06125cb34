"""The archive of one tensor is torch.save's, byte for byte, and is known again in any file."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

from deepnvme.checkpoint.formats.dcp_tensor import HEAD, KnownArchives, flat, frame, memory_of_item
from deepnvme.memory.tensor_bytes import flat_bytes, memory_of

from ...support.torch_versions import needs_torch

TENSORS = {
    "float32": torch.randn(3, 4),
    "transposed": torch.randn(3, 4).t(),
    "channels-last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 7),
    "bool": torch.rand(77) > 0.5,
    "complex": torch.randn(7, dtype=torch.complex64),
    "float8": torch.randn(7).to(torch.float8_e4m3fn),
    "uint16": torch.arange(7).to(torch.uint16),
    "large": torch.randn(400, 401),
}


def as_saved(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def assembled(tensor: torch.Tensor) -> bytes:
    memory = memory_of_item(tensor)
    assert memory is not None
    head, tail = frame(memory.dtype, memory.shape, memory.stride())
    return head + memory_of(flat_bytes(flat(memory))).tobytes() + tail


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_what_is_more_than_its_elements_has_no_archive() -> None:
    class Tensor(torch.Tensor):
        pass

    assert memory_of_item(torch.quantize_per_tensor(torch.randn(3), 0.1, 3, torch.qint8)) is None
    assert memory_of_item(torch.randn(3, dtype=torch.complex64).conj()) is None
    assert memory_of_item(torch.eye(3).to_sparse()) is None
    assert memory_of_item(torch.zeros(3).as_subclass(Tensor)) is None


@needs_torch(2, 7, "records of this kind")
@pytest.mark.parametrize("name", TENSORS)
def test_it_is_torchs_but_for_checksum_and_identity(name: str) -> None:
    tensor = TENSORS[name]
    ours, theirs = assembled(tensor), as_saved(tensor)
    assert len(ours) == len(theirs)
    head, tail = frame(tensor.dtype, tensor.shape, tensor.stride())
    assert theirs.startswith(head) or not tensor.numel()  # of an empty one it is all
    assert len(head) + tensor.nbytes + len(tail) == len(ours)
    loaded = torch.load(io.BytesIO(ours), weights_only=True)
    assert (loaded.dtype, loaded.stride()) == (tensor.dtype, tensor.stride())
    assert assembled(loaded) == ours


def test_a_view_is_saved_without_the_rest_of_its_storage() -> None:
    wide = torch.randn(50, 100)
    rows, columns = wide[3:7], wide[:, 3:7]
    assert memory_of_item(rows).data_ptr() == rows.data_ptr()  # type: ignore[union-attr]
    for view in (rows, columns, wide[:1].expand(50, 100)):
        assert assembled(view) == assembled(view.clone())
        assert torch.equal(torch.load(io.BytesIO(assembled(view)), weights_only=True), view)


@pytest.mark.parametrize("theirs", [False, True])
def test_it_is_found_by_its_beginning(tmp_path: Path, theirs: bool) -> None:
    known = KnownArchives()
    for shift in (0, 13):
        for name, tensor in TENSORS.items():
            archive = as_saved(tensor) if theirs else assembled(tensor)
            (tmp_path / name).write_bytes(b"x" * shift + archive + b"y" * 100)
            with (tmp_path / name).open("rb") as file:
                head = memoryview(archive)[: HEAD if len(archive) > 500_000 else None]
                found = known.elements(file, head, shift, len(archive))
                assert found is not None
                assert (found.dtype, found.shape, found.stride) == (tensor.dtype, tensor.shape, tensor.stride())
                file.seek(found.offset)
                memory = memory_of(flat_bytes(flat(tensor))).tobytes()
                assert file.read(found.nbytes) == memory
                (tmp_path / name).write_bytes(b"")  # known now: nothing is read again
                again = known.elements(file, head, shift + 5, len(archive))
                assert again == found._replace(offset=found.offset + 5)


@pytest.mark.parametrize("garbage", [b"", b"PK\3\4", bytes(5000), as_saved(TENSORS["float32"])[:-30]])
def test_anything_else_is_not(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / "file").write_bytes(garbage)
    with (tmp_path / "file").open("rb") as file:
        assert KnownArchives().elements(file, memoryview(garbage), 0, len(garbage)) is None


@pytest.mark.parametrize("call", [b")R", b""], ids=["and calls it", "only"])
def test_one_that_sets_attributes_of_a_function_is_not(tmp_path: Path, call: bytes) -> None:
    stream = b"\x80\2ctorch._utils\n_rebuild_tensor_v2\n(N}X\4\0\0\0here(stb" + call + b"."
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as records:
        records.writestr("a/data.pkl", stream)
        records.writestr("a/version", b"3")
    (tmp_path / "file").write_bytes(archive.getvalue())
    with (tmp_path / "file").open("rb") as file:
        assert KnownArchives().elements(file, memoryview(archive.getvalue()), 0, len(archive.getvalue())) is None
    assert not hasattr(torch._utils._rebuild_tensor_v2, "here")
