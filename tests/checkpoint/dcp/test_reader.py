"""NVMeReader: loads what torch's writer wrote and what ours did, any part of it into any place, or says what is wrong."""

from __future__ import annotations

import errno
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan

from deepnvme.checkpoint import CorruptCheckpoint, NVMeReader, NVMeWriter

from ...support.distributed_states import Into, assert_equal, blank, request, state
from ...support.examples import examples
from ...support.torch_versions import ALONE, needs_torch

Writer = Callable[..., FileSystemWriter]

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]
both_writers = pytest.mark.parametrize("writer", [FileSystemWriter, NVMeWriter])


def save(saved: dict[str, Any], writer: FileSystemWriter) -> None:
    dcp.save(saved, storage_writer=writer, **ALONE)


def load(found: dict[str, Any], directory: Path) -> None:
    dcp.load(found, storage_reader=NVMeReader(directory), **ALONE)


def why(error: CheckpointException) -> BaseException:
    (failure,) = error.failures.values()
    return failure[0]


def overwrite(file: Path) -> None:
    """In place."""
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))


def place_of(directory: Path, name: str) -> Any:
    """Of an item: the storage info."""
    found = FileSystemReader(directory).read_metadata().storage_data
    (info,) = (info for index, info in found.items() if index.fqn == name)
    return info


# -- errors ------------------------------------------------------------------------------------------------------------


@both_writers
@pytest.mark.parametrize("name", ["large", "small.5", "blob", "objects.step"])
def test_a_truncated_file_is_an_error_that_names_the_item_and_its_bytes(drive: Path, writer: Writer, name: str) -> None:
    save(state(1), writer(drive, single_file_per_rank=False))
    info = place_of(drive, name)
    file = drive / info.relative_path
    with file.open("r+b") as opened:
        opened.truncate(info.offset + info.length - 10)
    with pytest.raises(CheckpointException) as caught:
        load(blank(), drive)
    error = why(caught.value)
    assert isinstance(error, CorruptCheckpoint)
    assert error.filename == str(file)
    expected = rf"item '{name}'.*: expected {info.length} bytes from byte {info.offset} on, found {info.length - 10}"
    assert re.search(expected, str(error))


def test_a_missing_file_is_an_error_that_names_an_item_of_it(drive: Path) -> None:
    save({"a": torch.zeros(3)}, NVMeWriter(drive))
    (drive / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointException) as caught:
        load({"a": torch.zeros(3)}, drive)
    error = why(caught.value)
    assert isinstance(error, FileNotFoundError)
    assert error.filename == str(drive / "__0_0.distcp")
    assert "item 'a'" in str(error)


def is_refused(found: dict[str, Any], directory: Path) -> bool:
    """Whether loading raises, which has to be the error of damage and to name the item."""
    try:
        load(found, directory)
    except CheckpointException as error:
        assert isinstance(why(error), (CorruptCheckpoint, pickle.UnpicklingError)), why(error)  # noqa: PT017
        assert "item 'damaged'" in str(why(error))  # noqa: PT017
        return True
    return False


@both_writers
@pytest.mark.parametrize("nbytes", [20, 700_000])
@pytest.mark.parametrize(
    ("at", "what"), [(0, b"\0" * 400), (100, b"\xff" * 100), (-90, b"\0" * 90)], ids=["head", "pickle", "end"]
)
def test_a_damaged_item_is_an_error_that_names_it(drive: Path, writer: Writer, nbytes: int, at: int, what: bytes) -> None:
    save({"damaged": torch.zeros(nbytes, dtype=torch.uint8), "x": torch.zeros(9)}, writer(drive))
    info = place_of(drive, "damaged")
    with (drive / info.relative_path).open("r+b") as file:
        file.seek(info.offset + at % info.length)
        file.write(what)
    found = {"damaged": torch.ones(nbytes, dtype=torch.uint8), "x": torch.zeros(9)}
    if not is_refused(found, drive):  # the directory is not needed where an archive is known by its beginning
        assert at < 0
        assert torch.equal(found["damaged"], torch.zeros(nbytes, dtype=torch.uint8))


def test_a_part_that_a_tensor_does_not_have_is_refused(drive: Path) -> None:
    save({"a": torch.zeros(3, 4)}, NVMeWriter(drive))
    reader = NVMeReader(drive)
    reader.set_up_storage_reader(reader.read_metadata(), True)
    for offsets, lengths in (((0, 0), (4, 4)), ((2, 0), (2, 1)), ((0,), (3,))):
        with pytest.raises(ValueError, match=r"'a'.*are wanted of a tensor of"):
            reader.read_data(LoadPlan([request("a", offsets, lengths, dims=2)]), Into([torch.zeros(lengths)]))
    with pytest.raises(ValueError, match=r"'a'.*are for a tensor of \[2\]"):
        reader.read_data(LoadPlan([request("a", (0, 0), (1, 1))]), Into([torch.zeros(2)]))


class Replaced(NVMeReader):
    """Another checkpoint is saved over the one that is read, by ``saves``: as a plan is made, or when all of it has been read."""

    def __init__(self, path: Path, saves: Callable[[], None], late: bool) -> None:
        super().__init__(path)
        self.saves = saves
        self.late = late

    def prepare_global_plan(self, plans: Any) -> Any:
        if not self.late:
            self.saves()
        return super().prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        left, commit = [request for request in plan.items if request.type == LoadItemType.TENSOR], planner.commit_tensor

        def committed(request: Any, tensor: torch.Tensor) -> None:
            commit(request, tensor)
            left.remove(request)
            if self.late and not left:
                self.saves()

        planner.commit_tensor = committed
        return super().read_data(plan, planner)


@pytest.mark.parametrize("late", [False, True])
@both_writers
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_an_error(drive: Path, writer: Writer, late: bool) -> None:
    save(state(1), writer(drive))
    with pytest.raises(CheckpointException) as caught:
        dcp.load(blank(), storage_reader=Replaced(drive, lambda: save(state(2), writer(drive)), late), **ALONE)
    error = why(caught.value)
    assert isinstance(error, OSError)
    assert error.errno == errno.ESTALE
    assert error.filename == str(drive / ".metadata")
    assert "load it again" in str(error)
    found = blank()
    load(found, drive)
    assert_equal(found, state(2))


def test_a_file_that_is_written_over_while_it_is_read_is_an_error(drive: Path) -> None:
    """As torch's writer does before there are new metadata."""
    save(state(1), FileSystemWriter(drive))
    file = drive / "__0_0.distcp"
    reader = Replaced(drive, lambda: overwrite(file), late=True)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(blank(), storage_reader=reader, **ALONE)
    error = why(caught.value)
    assert isinstance(error, OSError)
    assert (error.errno, error.filename) == (errno.ESTALE, str(file))


# -- what is read ------------------------------------------------------------------------------------------------------


@both_writers
@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}])
def test_all_that_was_saved_is_loaded(drive: Path, writer: Writer, options: dict[str, Any]) -> None:
    save(state(1), writer(drive, **options))
    found = blank()
    load(found, drive)
    assert_equal(found, state(1))


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    shape=st.lists(st.integers(1, 6), min_size=0, max_size=3),
    times=st.sampled_from([1, 8_000]),
    theirs=st.booleans(),
    dtypes=st.sampled_from([(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.uint8, torch.uint8)]),
)
def test_any_part_is_read_into_any_place(
    drive: Path, data: st.DataObject, shape: list[int], times: int, theirs: bool, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Of tensors that are read whole with their neighbours, and of those that are too large for that."""
    if shape:
        shape[data.draw(st.integers(0, len(shape) - 1))] *= times
    order = data.draw(st.permutations(range(len(shape))))
    saved = torch.randint(0, 100, [shape[d] for d in order]).to(dtypes[0]).permute([order.index(d) for d in range(len(shape))])
    requests, targets, expected = [], [], []
    for number in range(3):
        begins = [data.draw(st.integers(0, size)) for size in shape]
        lengths = [data.draw(st.integers(0, size - begin)) for size, begin in zip(shape, begins, strict=True)]
        requests.append(request("t", tuple(begins), tuple(lengths), number))
        wide = torch.full([*lengths, 2], -1.0).to(dtypes[1])
        targets.append(wide[..., 0] if data.draw(st.booleans()) else torch.full(lengths, -1.0).to(dtypes[1]))
        part = saved
        for dim, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
            part = part.narrow(dim, begin, length)
        expected.append(part.to(dtypes[1]))
    for path in drive.iterdir():
        path.unlink()
    before = torch.zeros(data.draw(st.integers(0, 99)), dtype=torch.uint8)
    save({"before": before, "t": saved}, (FileSystemWriter if theirs else NVMeWriter)(drive))
    reader = NVMeReader(drive)
    reader.set_up_storage_reader(reader.read_metadata(), True)
    planner = Into(targets)
    reader.read_data(LoadPlan(requests), planner)  # type: ignore[arg-type]
    assert sorted(planner.committed) == [0, 1, 2]
    for target, part in zip(targets, expected, strict=True):
        assert torch.equal(target, part)


@pytest.mark.filterwarnings("ignore:TypedStorage:UserWarning")
def test_tensors_that_are_not_plain_are_refused_by_writer_and_reader(drive: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(CheckpointException) as refused:
        save({"t": sparse}, NVMeWriter(drive / "ours"))
    assert "'t' is more than its elements" in str(why(refused.value))
    save({"t": torch.zeros(99)}, FileSystemWriter(drive))
    info = place_of(drive, "t")
    stream = io.BytesIO()
    torch.save(sparse, stream)
    (drive / info.relative_path).write_bytes(stream.getvalue().ljust(info.length, b"\0"))
    with pytest.raises(CheckpointException) as refused:
        load({"t": torch.zeros(99)}, drive)
    assert isinstance(why(refused.value), CorruptCheckpoint)
    assert "use torch's FileSystemReader" in str(why(refused.value))


@needs_torch(2, 7, "these options")
def test_extensions_and_safetensors_are_refused(drive: Path) -> None:
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    for options in ({"_extensions": [object()]}, {"serialization_format": SerializationFormat.SAFETENSORS}):
        with pytest.raises(ValueError, match="neither with extensions nor safetensors"):
            NVMeWriter(drive, **options)


def test_large_parts_are_read_into_place(drive: Path) -> None:
    from deepnvme.checkpoint.file_io import shared_engine

    save({"t": torch.randn(2048, 1024)}, NVMeWriter(drive))
    before = shared_engine(drive).stats().bytes_read
    found = {"t": torch.zeros(2048, 1024)}
    load(found, drive)
    assert shared_engine(drive).stats().bytes_read - before < (8 << 20) + (64 << 10)
