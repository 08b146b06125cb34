"""Metadata are read as torch reads them, and nothing that a hostile file has in them is run, by readers or writers."""

from __future__ import annotations

import dataclasses
import pickle
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter, filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from deepnvme.checkpoint import CorruptCheckpoint, NVMeReader, NVMeWriter
from deepnvme.checkpoint.dcp.metadata import load_metadata

from ...support.distributed_states import Runs, assert_equal, blank, state
from ...support.torch_versions import ALONE

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


class Field:
    """A class that a planner of somebody's could put into the metadata."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Field)

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def path(drive: Path) -> Path:
    return drive / ".metadata"


def hostile(marker: Path) -> dict[str, bytes]:
    text = f"mkdir {marker}".encode()
    call = b"\x80\x02cposix\nsystem\nX" + len(text).to_bytes(4, "little") + text + b"\x85R."
    return {
        "in place of it": pickle.dumps(Runs(marker)),
        "in it": pickle.dumps(Metadata({}, planner_data=Runs(marker), storage_data={})),
        "by a shell": call,
        "by eval": call.replace(b"cposix\nsystem", b"c__builtin__\neval"),
        "by getattr": call.replace(b"cposix\nsystem", b"c__builtin__\ngetattr"),
        "by a dotted name": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93" + call[17:],
        "by torch": call.replace(b"cposix\nsystem", b"ctorch\nload"),
    }


@pytest.mark.parametrize("how", hostile(Path()))
def test_nothing_in_a_file_is_run(path: Path, how: str) -> None:
    marker = path.parent / "run"
    path.write_bytes(hostile(marker)[how])
    with pytest.raises(pickle.UnpicklingError, match=r"\.metadata' has .* in it.*torch\.serialization\.add_safe_globals\("):
        load_metadata(path)
    with pytest.raises(CheckpointException) as refused:
        dcp.load(blank(), storage_reader=NVMeReader(path.parent), **ALONE)
    assert "which no writer of torch puts there" in str(refused.value)
    assert not marker.exists()


@pytest.mark.parametrize("how", hostile(Path()))
def test_who_saves_over_it_runs_nothing(path: Path, how: str) -> None:
    marker = path.parent / "run"
    path.write_bytes(hostile(marker)[how])
    dcp.save(state(1), storage_writer=NVMeWriter(path.parent), **ALONE)
    assert not marker.exists()
    found = blank()
    dcp.load(found, storage_reader=NVMeReader(path.parent), **ALONE)
    assert_equal(found, state(1))


NAMED = {
    "a record": (b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n", MetadataIndex),
    "by a name on the stack": (b"X\x25\0\0\0torch.distributed.checkpoint.metadataX\x0d\0\0\0MetadataIndex\x93", MetadataIndex),
    "from the memo": (b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\nq\1]h\1", MetadataIndex),
    "what the user has let in": (f"c{__name__}\nField\n".encode(), Field),
}


@pytest.mark.parametrize("name", ["__hash__", "__qualname__", "__name__", "new"])
@pytest.mark.parametrize("how", NAMED)
def test_classes_stay_as_they_are(path: Path, how: str, name: str) -> None:
    """A pickle may assign to the attributes of any object on its stack."""
    stream, changed = NAMED[how]
    before = {**vars(changed), "__name__": changed.__name__, "__qualname__": changed.__qualname__}
    text = b"X" + len(name).to_bytes(4, "little") + name.encode()
    path.write_bytes(b"\x80\4" + stream + b"(N}" + text + b"X\1\0\0\0astb.")
    with torch.serialization.safe_globals([Field]), pytest.raises(CorruptCheckpoint, match="changes a class"):
        load_metadata(path)
    assert before == {**vars(changed), "__name__": changed.__name__, "__qualname__": changed.__qualname__}


def test_members_of_an_enumeration_stay_as_they_are(path: Path) -> None:
    """What was saved later would have the changed value, which no reader knows."""
    member = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\1\x85R"
    path.write_bytes(b"\x80\2" + member + b"}X\7\0\0\0_value_K\2sb.")
    with pytest.raises(CorruptCheckpoint):
        load_metadata(path)
    assert metadata._MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST.value == 1


@pytest.mark.parametrize(
    "fields",
    [
        *({name: None} for name in ("properties", "size", "chunks", "offsets", "sizes")), {"size": torch.Size([3])},
        {"chunks": [[0, 4]]}, {"properties": torch.float32}, {"sizes": torch.Size([2, 2])}, {"sizes": (-1,)}, {"sizes": ["4"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_tensor_that_is_not_described_is_refused(path: Path, fields: dict[str, Any]) -> None:
    """Some of these would have been loaded in part, without a word."""
    chunk = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    made = metadata.TensorStorageMetadata(metadata.TensorProperties(), torch.Size([4]), [chunk])
    path.write_bytes(pickle.dumps(Metadata({"a": made}, storage_data={})))
    load_metadata(path)
    for name, value in fields.items():
        owner = chunk if name in ("offsets", "sizes") else made
        delattr(owner, name) if value is None else setattr(owner, name, value)
    path.write_bytes(pickle.dumps(Metadata({"a": made}, storage_data={})))
    with pytest.raises(CorruptCheckpoint, match="what item 'a' is") as refused:
        load_metadata(path)
    assert refused.value.filename == str(path)


@pytest.mark.parametrize("sizes", [[], [[4, 3]], [[4, 3], [2, 2]]], ids=str)
def test_missing_chunks_of_a_tensor_are_refused_but_in_the_file_of_one_rank(path: Path, sizes: list[list[int]]) -> None:
    """The missing elements would have kept the values that the tensor had before the load, without a word."""
    places = [(0, 0), (4, 0), (4, 1)]
    chunks = [metadata.ChunkStorageMetadata(torch.Size(at), torch.Size(each)) for at, each in zip(places, sizes, strict=False)]
    made = metadata.TensorStorageMetadata(metadata.TensorProperties(), torch.Size([6, 3]), chunks)
    path.write_bytes(pickle.dumps(Metadata({"a": made}, storage_data={})))
    missing = 18 - sum(rows * columns for rows, columns in sizes)
    with pytest.raises(CorruptCheckpoint, match=rf"its chunks of item 'a' lack {missing} of its elements") as refused:
        load_metadata(path)
    assert refused.value.filename == str(path)
    load_metadata(path, whole=False)


@pytest.mark.parametrize("storage_meta", [5, 0, "s", [], Field])
def test_a_storage_meta_that_is_none_is_refused(path: Path, storage_meta: Any) -> None:
    path.write_bytes(pickle.dumps(Metadata({}, storage_data={}, storage_meta=storage_meta)))
    with torch.serialization.safe_globals([Field]), pytest.raises(CorruptCheckpoint, match="no StorageMeta"):
        load_metadata(path)


@pytest.mark.parametrize(
    "name", ["../other/__0_0.distcp", "/etc/passwd", "..", "", "a\0b", "here/../../there", None, 3], ids=ascii
)
def test_a_file_elsewhere_is_refused(path: Path, name: Any) -> None:
    info = filesystem._StorageInfo(name, 0, 8)
    path.write_bytes(pickle.dumps(Metadata({}, storage_data={MetadataIndex("a"): info})))
    with pytest.raises(CorruptCheckpoint) as refused:
        load_metadata(path)
    assert refused.value.filename == str(path)


@pytest.mark.parametrize("place", [(-1, 8), (0, -8), (None, 8), (0, "8"), (1 << 63, 1)])
def test_an_impossible_place_is_refused(path: Path, place: tuple[Any, Any]) -> None:
    path.write_bytes(pickle.dumps(Metadata({}, storage_data={MetadataIndex("a"): filesystem._StorageInfo("f", *place)})))
    with pytest.raises(CorruptCheckpoint, match="no file, offset and length for item"):
        load_metadata(path)


def test_metadata_without_places_are_refused(path: Path) -> None:
    dcp.save({"a": torch.ones(3)}, storage_writer=FileSystemWriter(path.parent), **ALONE)
    whole = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(dataclasses.replace(whole, storage_data=None)))
    with pytest.raises(CorruptCheckpoint, match="where the items are"):
        load_metadata(path)
    path.write_bytes(pickle.dumps(dataclasses.replace(whole, storage_data={})))
    with pytest.raises(CheckpointException) as wrapped:
        dcp.load({"a": torch.zeros(3)}, storage_reader=NVMeReader(path.parent), **ALONE)
    ((error, _),) = wrapped.value.failures.values()
    assert isinstance(error, CorruptCheckpoint)
    assert error.filename == str(path)


@pytest.mark.slow
def test_any_damage_is_told(path: Path) -> None:
    dcp.save({"a": torch.ones(3), "b": {"c": 1}}, storage_writer=FileSystemWriter(path.parent), **ALONE)
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(len(whole))]
    for at in range(len(whole)):
        damaged += [whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :] for flip in (1, 0x20, 0x80)]
    errors: list[Exception] = []
    for text in [*damaged, b"", pickle.dumps([1]), pickle.dumps(None)]:
        path.write_bytes(text)
        try:
            load_metadata(path)
        except (CorruptCheckpoint, pickle.UnpicklingError) as error:
            errors.append(error)
    assert len(errors) > len(whole)
    assert all(str(path) in str(error) for error in errors)


SIZE = b"ctorch\nSize\n"


TOO_MUCH: dict[str, tuple[bytes, str]] = {
    "a number of the memo": (b"]r\xff\xff\xff\x0f.", "memo"),
    "a length": (b"\x96" + (1 << 40).to_bytes(8, "little") + b".", "cut off"),
    "lists": (b"]" * 2_000_000 + b".", "memo"),
    "marks": (b"(" * 2_000_000 + b".", "nested"),
    "tuples as a key": (b"}N" + b"\x85" * 1_000_000 + b"Ns.", "nested"),
    "copies": (SIZE + b"q\0](" + b"K\1" * 1000 + b"eq\1](" + b"h\0h\1\x85R" * 1000 + b"e.", "more arguments than it has bytes"),
    "a key of many digits": (
        pickle.dumps(Metadata({1 << 20_000: None}, storage_data={}), 2), "no name that can be shown"  # type: ignore[dict-item]
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", TOO_MUCH)
def test_what_takes_too_much_is_refused(path: Path, how: str) -> None:
    stream, why = TOO_MUCH[how]
    path.write_bytes(stream if stream.startswith(b"\x80") else b"\x80\2" + stream)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpoint, match=why) as refused:
            load_metadata(path)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert refused.value.filename == str(path)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_torch_writes_is_read_as_torch_reads_it(path: Path, protocol: int) -> None:
    dcp.save(state(1), storage_writer=FileSystemWriter(path.parent), **ALONE)
    with path.open("rb") as file:
        expected = pickle.load(file)
    # What there is of every kind: dtypes, layouts, formats, paths and plain containers.
    properties = metadata.TensorProperties
    kinds = [
        properties(dtype, layout, True, form, True)
        for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.bool, torch.uint16)
        for layout in (torch.strided, torch.sparse_coo, torch.sparse_csr)
        for form in (torch.contiguous_format, torch.channels_last, torch.preserve_format)
    ]
    expected.planner_data = [kinds, OrderedDict(a=1), (1, 2), "text", 1.5, 1 << 80]
    expected.storage_meta = StorageMeta(checkpoint_id=path.parent, save_id="s")
    if hasattr(expected.storage_meta, "modules"):  # not in torch 2.6
        expected.storage_meta.modules = ["m"]
    path.write_bytes(pickle.dumps(expected, protocol))
    found = load_metadata(path)
    assert found.storage_data == expected.storage_data
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.planner_data == expected.planner_data
    assert found.storage_meta is not None
    assert str(found.storage_meta.checkpoint_id) == str(path.parent)
    assert found.storage_meta.save_id == "s"


def test_a_class_that_the_user_trusts_is_let_in(path: Path) -> None:
    path.write_bytes(pickle.dumps(Metadata({}, planner_data=Field(), storage_data={})))
    with pytest.raises(pickle.UnpicklingError, match=rf"add_safe_globals\(\[{__name__}\.Field\]\)"):
        load_metadata(path)
    with torch.serialization.safe_globals([Field]):
        assert load_metadata(path).planner_data == Field()
