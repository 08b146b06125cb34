"""torchrl's buffers on NVMeStorage: what is committed stays whole, samplers and views work, what has no fixed size is refused."""

from __future__ import annotations

import errno
import json
import pickle
import random
import shutil
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from importlib import reload
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl", reason="needs torchrl: pip install torchrl==0.14.1")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of packages that it imports
    from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, tensorclass
    from torchrl.data import (
        PrioritizedSampler,
        ReplayBuffer,
        SliceSampler,
        TensorDictReplayBuffer,
    )

from deepnvme.files.directory_lock import StoreLocked
from deepnvme.files.manifest import with_checksum
from deepnvme.integrations import torchrl as integration
from deepnvme.integrations.torchrl import RECORDS, STATE, NVMeStorage
from deepnvme.memory.pool import OutOfBuffers

from ..support.disks import Disk
from ..support.faulty_filesystem import FaultyFilesystem
from ..support.files import flip

SIZE = 300
Open = Callable[..., NVMeStorage]


@pytest.fixture
def opened(drive: Path) -> Iterator[Open]:
    """Opens storages, which are closed at the end."""
    made: list[NVMeStorage] = []

    def open_one(size: int = SIZE, name: str = "replay", **options: Any) -> NVMeStorage:
        made.append(NVMeStorage(size, drive / name, **options))
        return made[-1]

    yield open_one
    for storage in made:
        storage.close()


def transitions(first: int, count: int, pixels: int = 5000) -> Any:
    """Transitions that are numbered, 20 KB each: the default storage has some 200 spare places."""
    numbers = torch.arange(first, first + count)
    return TensorDict(
        {
            "pixels": numbers[:, None].expand(count, pixels).float(),
            "next": TensorDict({"reward": numbers.double()}, [count]),
            "done": numbers % 10 == 9,
            "episode": numbers // 10,
        },
        [count],
    )


def check(data: Any, numbers: torch.Tensor) -> None:
    """That the transitions have these numbers, in all their parts."""
    assert torch.equal(data["next", "reward"], numbers.double())
    assert torch.equal(data["pixels"], numbers[:, None].expand_as(data["pixels"]).float())
    assert torch.equal(data["episode"], numbers // 10)
    assert torch.equal(data["done"], numbers % 10 == 9)


def ring(written: int, size: int = SIZE) -> torch.Tensor:
    """The numbers in a ring after so many transitions."""
    numbers = torch.arange(max(written - size, 0), written)
    return numbers[(numbers % size).argsort()]


def fill(storage: NVMeStorage, begin: int, end: int, step: int = 37) -> None:
    for first in range(begin, end, step):
        count = min(step, end - first)
        storage.set(torch.arange(first, first + count) % SIZE, transitions(first, count))


def every(storage: NVMeStorage) -> Any:
    return storage.get(torch.arange(len(storage)))


# What survives.


def test_what_is_overwritten_after_a_commit_leaves_the_commit_whole(opened: Open, drive: Path) -> None:
    storage = opened()
    fill(storage, 0, 450)
    storage.commit()
    for begin, written in ((450, 451), (451, 500), (500, 620)):  # fewer than the spare places
        fill(storage, begin, written)
        shutil.copytree(drive / "replay", drive / f"crashed {written}")
        crashed = opened(name=f"crashed {written}")
        check(every(crashed), ring(450))
        assert crashed.next_cursor == 150
    check(every(storage), ring(620))


def test_a_write_that_needs_more_than_the_spare_places_commits_first(opened: Open, drive: Path) -> None:
    storage = opened()
    numbers = random.Random(1)
    written = 0
    while written < 3000:
        count = numbers.choice([1, 40, 150])
        storage.set(torch.arange(written, written + count) % SIZE, transitions(written, count))
        written += count
        spare = storage._spare
        shutil.rmtree(drive / "crashed", ignore_errors=True)
        shutil.copytree(drive / "replay", drive / "crashed")
        with NVMeStorage(SIZE, drive / "crashed") as crashed:
            if not crashed.initialized:
                assert written <= spare
                continue
            found = every(crashed)["next", "reward"].long()
        assert bool((found % SIZE == torch.arange(len(found))).all())
        assert int(found.max()) >= written - 1 - spare
    check(every(storage), ring(written))


def test_a_storage_goes_on_where_it_was_closed(opened: Open) -> None:
    buffer = TensorDictReplayBuffer(storage=opened(), batch_size=64)
    for first in range(0, 470, 47):
        buffer.extend(transitions(first, 47))
    buffer._storage.close()
    storage = opened()
    again = TensorDictReplayBuffer(storage=storage, batch_size=64)
    again.writer.load_state_dict({"_cursor": storage.next_cursor})
    assert len(again) == SIZE
    again.extend(transitions(470, 100))
    check(every(storage), ring(570))
    found = again.sample()
    check(found, found["next", "reward"].long())


def test_commits_are_made_as_often_as_asked_for(opened: Open, drive: Path) -> None:
    storage = opened(commit_every=2)
    assert not (drive / "replay" / STATE).exists()
    fill(storage, 0, 37)
    assert not (drive / "replay" / STATE).exists()
    fill(storage, 37, 80)
    shutil.copytree(drive / "replay", drive / "crashed")
    check(every(opened(name="crashed")), ring(74))


def test_a_storage_that_was_never_committed_is_made_anew(opened: Open, drive: Path) -> None:
    (drive / "replay").mkdir()
    (drive / "replay" / RECORDS).write_bytes(b"of a run that was killed")
    storage = opened()
    assert len(storage) == 0
    fill(storage, 0, 50)
    check(every(storage), ring(50))


# What drives and files do.


@pytest.mark.parametrize("operation", ["write", "fsync", "rename"])
def test_a_drive_that_fails_leaves_the_last_commit(direct_disk: FaultyFilesystem, operation: str) -> None:
    storage = NVMeStorage(SIZE, direct_disk / "replay")
    fill(storage, 0, 300)
    storage.commit()
    direct_disk.fail(operation)
    with pytest.raises(OSError, match="replay") as caught:  # noqa: PT012  the write fails in the first line, the rest in the second
        fill(storage, 300, 337)
        storage.commit()
    assert caught.value.errno == errno.EIO
    if operation == "fsync":
        with pytest.raises(ValueError, match="closed"):
            fill(storage, 337, 338)
        storage.close()
    else:
        check(every(storage), ring(300 if operation == "write" else 337))
        fill(storage, 300, 400)
        storage.close()
    with NVMeStorage(SIZE, direct_disk / "replay") as again:
        check(every(again), ring(300 if operation == "fsync" else 400))


def test_writes_that_fail_again_and_again_leave_the_storage_usable(direct_disk: FaultyFilesystem) -> None:
    storage = NVMeStorage(SIZE, direct_disk / "replay")
    fill(storage, 0, 300)
    direct_disk.fail("write", times=1000, name=RECORDS)
    for _ in range(20):  # more transitions than there are places
        with pytest.raises(OSError, match=RECORDS):
            fill(storage, 300, 337)
    direct_disk.heal()
    check(every(storage), ring(300))
    fill(storage, 300, 400)
    storage.close()
    with NVMeStorage(SIZE, direct_disk / "replay") as again:
        check(every(again), ring(400))


def test_a_dump_that_cannot_be_loaded_leaves_an_empty_storage(direct_disk: FaultyFilesystem) -> None:
    with NVMeStorage(SIZE, direct_disk / "replay") as storage:
        fill(storage, 0, 50)
        storage.dumps(direct_disk / "dump")
        direct_disk.fail("fsync", skip=1, name=RECORDS)  # the first is that of its own file
        with pytest.raises(OSError, match=RECORDS):
            storage.loads(direct_disk / "dump")
        direct_disk.heal()
        with pytest.raises(RuntimeError, match="non-initialized"):
            every(storage)
        storage.commit()
        assert not (direct_disk / "replay" / STATE).exists()
        storage.loads(direct_disk / "dump")
        check(every(storage), ring(50))


def test_a_read_that_fails_names_the_file(direct_disk: FaultyFilesystem) -> None:
    with NVMeStorage(SIZE, direct_disk / "replay") as storage:
        fill(storage, 0, 50)
        direct_disk.fail("read")
        with pytest.raises(OSError, match=RECORDS) as caught:
            storage.get(torch.tensor([3]))
        assert caught.value.errno == errno.EIO
        check(every(storage), ring(50))


def test_too_little_space_is_told_before_anything_is_written(small_disk: Disk) -> None:
    with NVMeStorage(10_000, small_disk.path / "replay") as storage:
        with pytest.raises(OSError, match="smaller max_size") as caught:
            storage.set(range(10), transitions(0, 10))
        assert caught.value.errno == errno.ENOSPC
        assert not storage.initialized


@pytest.mark.filterwarnings("ignore:transfers of '.*' go through the page cache")
def test_file_systems_without_direct_io_have_storages_too(tmpfs: Disk) -> None:
    with NVMeStorage(SIZE, tmpfs.path / "replay") as storage:
        fill(storage, 0, 450)
        check(every(storage), ring(450))


@pytest.mark.parametrize("place", [3, 40, 400, -1])
def test_a_damaged_state_is_refused(opened: Open, drive: Path, place: int) -> None:
    storage = opened()
    fill(storage, 0, 50)
    storage.close()
    file = drive / "replay" / STATE
    flip(file, place % file.stat().st_size)
    with pytest.raises(OSError, match="damaged") as caught:
        opened()
    assert (caught.value.errno, caught.value.filename) == (errno.EBADMSG, str(file))


@pytest.mark.parametrize("content", [b"", b"\n", b"{}\n{}\n", b'{"format": "deepnvme replay"}'])
def test_a_file_that_is_no_state_is_refused(opened: Open, drive: Path, content: bytes) -> None:
    (drive / "replay").mkdir()
    (drive / "replay" / STATE).write_bytes(content)
    with pytest.raises(OSError, match="damaged") as caught:
        opened()
    assert caught.value.errno == errno.EBADMSG


def test_a_state_whose_leaves_have_lists_of_keys_is_refused_by_its_version(opened: Open, drive: Path) -> None:
    storage = opened()
    fill(storage, 0, 50)
    storage.close()
    file = drive / "replay" / STATE
    _, body, places = file.read_bytes().split(b"\n", 2)
    fields = json.loads(body)
    fields["leaves"] = [[name.split("::"), *others] for name, *others in fields["leaves"]]  # as version 1 had them
    file.write_bytes(with_checksum(("deepnvme replay", 1), fields) + places)
    with pytest.raises(OSError, match=r"expected format and version \('deepnvme replay', 2\), got \('deepnvme replay', 1\)"):
        opened()


def test_records_that_were_cut_off_are_refused(opened: Open, drive: Path) -> None:
    storage = opened()
    fill(storage, 0, 50)
    storage.close()
    with (drive / "replay" / RECORDS).open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(OSError, match="cut off"):
        opened()


# Samplers, and several dimensions.


def test_samples_are_what_was_written(opened: Open) -> None:
    buffer = TensorDictReplayBuffer(storage=opened(), batch_size=256, prefetch=2)
    for first in range(0, 900, 45):
        buffer.extend(transitions(first, 45))
    for _ in range(10):
        found = buffer.sample()
        numbers = found["next", "reward"].long()
        check(found, numbers)
        assert int(numbers.min()) >= 600
        assert found["pixels"].is_contiguous()


def test_slices_are_of_one_episode_and_their_key_is_read_once(opened: Open) -> None:
    storage = opened()
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=40, sampler=SliceSampler(slice_len=5, traj_key="episode"))
    for first in range(0, 450, 45):
        buffer.extend(transitions(first, 45))
        episodes = buffer.sample()["episode"].view(8, 5)
        assert bool((episodes == episodes[:, :1]).all())
    before = storage._engine.stats().bytes_read
    storage[:]["episode"].clone()
    assert storage._engine.stats().bytes_read == before
    assert torch.equal(storage[:]["episode"] + 0, ring(450) // 10)


def test_a_tensor_that_does_not_fit_into_the_budget_is_read_each_time(opened: Open) -> None:
    storage = opened(memory_budget="17MiB")
    fill(storage, 0, 300)
    for _ in range(2):
        before = storage._engine.stats().bytes_read
        assert torch.equal(storage[:]["pixels"][:, 0], torch.arange(300.0))
        assert storage._engine.stats().bytes_read > before
    assert not storage._kept


def test_priorities_choose_what_is_sampled(opened: Open) -> None:
    try:
        sampler = PrioritizedSampler(SIZE, 1.0, 1.0)
    except RuntimeError as error:
        pytest.skip(f"torchrl's compiled part does not load with this version of torch: {error}")
    buffer = TensorDictReplayBuffer(storage=opened(), sampler=sampler, batch_size=50, priority_key="td_error")
    data = transitions(0, 200)
    data["td_error"] = torch.zeros(200)
    data["td_error"][7] = 1e6
    buffer.extend(data)
    assert bool((buffer.sample()["index"] == 7).float().mean() > 0.9)


def test_several_dimensions_are_rows_of_transitions(opened: Open) -> None:
    buffer = ReplayBuffer(storage=opened(100, ndim=2), batch_size=32)
    numbers = torch.arange(240).view(4, 60)
    for first in range(0, 60, 15):
        buffer.extend(TensorDict({"number": numbers[:, first : first + 15]}, [4, 15]))
    assert buffer._storage.shape == (25, 4)
    kept = numbers[:, 50:].T.tolist()
    assert buffer._storage.get(torch.arange(10))["number"].tolist() == kept
    assert set(buffer.sample()["number"].tolist()) <= set(numbers[:, 35:].flatten().tolist())
    buffer._storage[0, 2:4] = TensorDict({"number": torch.tensor([-1, -2])}, [2])
    assert buffer._storage[0, 2:4]["number"].tolist() == [-1, -2]
    with pytest.raises(NotImplementedError, match=r"storage\[index\] = "):  # torchrl turns all transitions around
        buffer[0, 3:5]
    with pytest.raises(NotImplementedError, match=r"storage\[index\] = "):
        buffer[0, 3:5] = TensorDict({"number": numbers[0, 3:5]}, [2])
    buffer._storage.close()
    again = opened(100, ndim=2)
    assert again.get((torch.tensor([0, 0]), torch.tensor([2, 3])))["number"].tolist() == [-1, -2]


def test_one_transition_is_read_and_written(opened: Open) -> None:
    storage = opened()
    fill(storage, 0, 10)
    storage[3] = transitions(100, 1)[0]
    found = storage[3]
    assert found.batch_size == torch.Size([])
    assert found["next", "reward"].item() == 100.0
    assert len(storage) == 10


def test_further_keys_are_ignored(opened: Open) -> None:
    storage = opened()
    fill(storage, 0, 10)
    storage.set(range(10, 20), transitions(10, 10).set("index", torch.arange(10)))
    check(every(storage), ring(20))
    assert "index" not in storage[0]


def test_nested_batch_sizes_and_tensors_of_all_kinds_come_back(opened: Open) -> None:
    data = TensorDict(
        {
            "agents": TensorDict({"action": torch.randn(5, 3, 2)}, [5, 3]),
            "next": TensorDict({"agents": TensorDict({"done": torch.zeros(5, 3, 1).bool()}, [5, 3, 1])}, [5]),
            "nothing": torch.zeros(5, 0),
            "bfloat16": torch.randn(5, 7).bfloat16(),
            "complex": torch.randn(5, dtype=torch.complex128),
            "byte": torch.randint(256, (5, 3), dtype=torch.uint8),
        },
        [5],
    )
    storage = opened()
    storage.set(range(5), data)
    storage.close()
    found = opened().get(torch.tensor([4, 0]))
    assert found["agents"].batch_size == (2, 3)
    assert found["next"].batch_size == (2,)
    assert found["next", "agents"].batch_size == (2, 3, 1)
    assert bool((found == data[torch.tensor([4, 0])]).all())
    assert found["nothing"].shape == (2, 0)


# All transitions at once.


@pytest.mark.parametrize(
    "change",
    [
        lambda buffer: buffer.set_at_("episode", torch.tensor([7, 8]), torch.tensor([1, 2])),
        lambda buffer: buffer.set_("episode", torch.arange(10)),
        lambda buffer: buffer.update_({"episode": torch.arange(10)}),
    ],
)
def test_a_change_of_one_tensor_is_refused(opened: Open, change: Callable[[Any], object]) -> None:
    buffer = TensorDictReplayBuffer(storage=opened(), batch_size=8)
    buffer.extend(transitions(0, 10))
    with pytest.raises(NotImplementedError, match="assign whole transitions"):
        change(buffer)
    with pytest.raises(TypeError, match="stores TensorDicts"):
        buffer["episode"] = torch.arange(10)
    check(every(buffer._storage), ring(10))


def test_whole_transitions_are_assigned(opened: Open) -> None:
    buffer = ReplayBuffer(storage=opened(), batch_size=8)
    buffer.extend(transitions(0, 100))
    before = buffer[:]["episode"]
    buffer[torch.tensor([5, 99])] = transitions(1000, 2)
    buffer[10:20] = transitions(2000, 10)
    assert before.tolist() == [number // 10 for number in range(100)]
    numbers = torch.arange(100)
    numbers[[5, 99]], numbers[10:20] = torch.tensor([1000, 1001]), torch.arange(2000, 2010)
    check(every(buffer._storage), numbers)
    assert torch.equal(buffer["episode"], numbers // 10)


def test_all_transitions_are_read_when_they_are_used(opened: Open) -> None:
    storage = opened()
    fill(storage, 0, 100)
    before = storage._engine.stats().bytes_read
    every_one = storage[:]
    assert every_one.get("absent", 3) == 3
    assert "len=100" in repr(storage)
    assert storage._engine.stats().bytes_read == before
    assert torch.equal(every_one["next", "reward"], torch.arange(100).double())
    check(every_one[torch.tensor([3, 97])], torch.tensor([3, 97]))
    check(storage[5:50:5], torch.arange(5, 50, 5))
    with pytest.raises(TypeError, match="tensordict"):
        TensorDictReplayBuffer(storage=storage, batch_size=8).query(lambda trajectory: True)


# Dumps.


def test_a_dump_has_all_and_is_loaded_by_another_storage(opened: Open, drive: Path) -> None:
    buffer = TensorDictReplayBuffer(storage=opened(), batch_size=8)
    for first in range(0, 450, 45):
        buffer.extend(transitions(first, 45))
    buffer.dumps(drive / "dump")
    again = TensorDictReplayBuffer(storage=opened(name="again"), batch_size=8)
    again.loads(drive / "dump")
    check(every(again._storage), ring(450))
    again.extend(transitions(450, 10))
    check(every(again._storage), ring(460))


def test_a_dump_into_the_own_directory_is_a_commit(opened: Open, drive: Path) -> None:
    (drive / "dump").mkdir()
    buffer = TensorDictReplayBuffer(storage=opened(name="dump/storage"), batch_size=8)
    buffer.extend(transitions(0, 45))
    written = buffer._storage._engine.stats().bytes_written
    buffer.dumps(drive / "dump")
    assert buffer._storage._engine.stats().bytes_written == written
    shutil.copytree(drive / "dump" / "storage", drive / "crashed")
    check(every(opened(name="crashed")), ring(45))
    buffer.loads(drive / "dump")
    check(every(buffer._storage), ring(45))


def test_dumps_refuse_what_they_cannot_do(opened: Open, drive: Path) -> None:
    storage = opened()
    with pytest.raises(RuntimeError, match="non-initialized"):
        storage.dumps(drive / "dump")
    for register in (storage.register_save_hook, storage.register_load_hook):
        with pytest.raises(NotImplementedError, match=r"use dumps\(\)"):
            register(lambda data, path=None: data)


def test_loading_from_the_own_directory_goes_back_to_the_last_commit(opened: Open, drive: Path) -> None:
    storage = opened()
    fill(storage, 0, 450)
    storage.dumps(drive / "replay")
    fill(storage, 450, 500)
    storage.loads(drive / "replay")
    check(every(storage), ring(450))
    fill(storage, 450, 800)
    check(every(storage), ring(800))


def test_loading_takes_the_place_of_other_transitions(opened: Open, drive: Path) -> None:
    storage, other = opened(), opened(name="other")
    fill(storage, 0, 450)
    other.set(range(20), TensorDict({"number": torch.arange(20)}, [20]))
    storage.dumps(drive / "dump")
    fill(storage, 450, 460)
    other.loads(drive / "dump")
    check(every(other), ring(450))
    fill(other, 450, 700)
    other.close()
    check(every(opened(name="other")), ring(700))


def test_dumps_of_another_size_and_of_storages_in_use_change_nothing(opened: Open, drive: Path) -> None:
    storage, used, small = opened(), opened(name="used"), opened(30, name="small")
    fill(storage, 0, 40)
    fill(used, 0, 50)
    small.set(range(30), transitions(0, 30))
    small.close()
    used.commit()
    with pytest.raises(StoreLocked):
        storage.dumps(drive / "used")
    with pytest.raises(StoreLocked):
        storage.loads(drive / "used")
    with pytest.raises(ValueError, match="max_size and ndim"):
        storage.loads(drive / "small")
    with pytest.raises(FileNotFoundError):
        storage.loads(drive / "absent")
    check(every(storage), ring(40))
    check(every(used), ring(50))


def test_a_state_dict_is_refused(opened: Open) -> None:
    storage = opened()
    with pytest.raises(NotImplementedError, match=r"use dumps\(\)"):
        storage.state_dict()
    with pytest.raises(NotImplementedError, match=r"use dumps\(\)"):
        storage.load_state_dict({})


# What is refused.


@tensorclass  # type: ignore[untyped-decorator]
class Transition:
    pixels: torch.Tensor


RAGGED = [TensorDict({"a": torch.zeros(size)}, []) for size in (2, 3)]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Transition(torch.zeros(2, 3), batch_size=[2]), "to_tensordict"),
        ({"a": torch.zeros(2)}, "got dict"),
        (torch.zeros(2), "got Tensor"),
        (TensorDict({"a": torch.zeros(2), "text": NonTensorData("x", [2])}, [2]), "'text' must be a tensor"),
        (TensorDict({"next": {"text": NonTensorStack("x", "y")}}, [2]), "'next::text' must be a tensor"),
        (TensorDict({"a": Transition(torch.zeros(2, 3), batch_size=[2])}, [2]), "'a' must be a tensor"),
    ],
)
def test_data_without_a_fixed_size_is_refused(opened: Open, data: Any, words: str) -> None:
    storage = opened()
    with pytest.raises(TypeError, match=words):
        storage.set(torch.arange(2), data)
    assert not storage.initialized


@pytest.mark.parametrize("data", [LazyStackedTensorDict(*RAGGED, stack_dim=0), RAGGED])
def test_transitions_of_different_shapes_are_refused(opened: Open, data: Any) -> None:
    storage = opened()
    with pytest.raises(RuntimeError, match="stack"):
        storage.set(torch.arange(2), data)
    assert not storage.initialized


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(opened: Open, layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)
    with pytest.raises(TypeError, match="a nested one"):
        opened().set(torch.arange(2), TensorDict({"a": nested}, [2]))


def test_transitions_that_differ_are_refused(opened: Open) -> None:
    storage = opened()
    fill(storage, 0, 10)
    with pytest.raises(ValueError, match=r"'next::reward': \(1,\).* got TensorDict"):
        storage.set([0], transitions(0, 1).select("pixels"))
    with pytest.raises(ValueError, match=r"shapes .*\(1, 5000\)"):
        storage.set([0], transitions(0, 1, pixels=4999))
    with pytest.raises(IndexError):
        storage.set([SIZE], transitions(0, 1))
    with pytest.raises(IndexError):
        storage.get(10)
    check(every(storage), ring(10))


def test_an_index_that_occurs_twice_is_refused(opened: Open) -> None:
    with pytest.raises(ValueError, match="occurs twice"):
        opened().set([1, 2, 1], transitions(0, 3))


def test_slots_between_that_were_never_written_are_not_read(opened: Open) -> None:
    storage = opened()
    storage.set(range(5, 10), transitions(5, 5))
    with pytest.raises(IndexError, match="never written"):
        storage.get(3)


def test_a_key_that_looks_like_a_nested_one_is_refused(opened: Open) -> None:
    storage = opened()
    with pytest.raises(ValueError, match="keys of transitions must not have '::'"):
        storage.set(range(2), TensorDict({"next": {"a::b": torch.zeros(2)}}, [2]))
    assert not storage.initialized


@pytest.mark.parametrize("size", [-1, 0, 1 << 31])
def test_a_size_that_the_map_cannot_have_is_refused(opened: Open, drive: Path, size: int) -> None:
    with pytest.raises(ValueError, match="max_size must be in"):
        opened(size)
    assert not (drive / "replay").exists()


@pytest.mark.parametrize("wrong", [{"ndim": 0}, {"commit_every": -1}])
def test_other_numbers_that_are_too_small_are_refused(opened: Open, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="ndim at least 1, and commit_every not negative, got"):
        opened(**wrong)


def test_rows_of_too_few_dimensions_are_refused(opened: Open) -> None:
    with pytest.raises(ValueError, match="rows of 1"):
        opened(ndim=2).set(0, TensorDict({"number": torch.tensor(1)}, []))


def test_another_size_is_refused(opened: Open) -> None:
    storage = opened()
    fill(storage, 0, 10)
    storage.close()
    for other in ({"size": SIZE + 1}, {"ndim": 2}):
        with pytest.raises(ValueError, match="max_size and ndim"):
            opened(**other)


def test_a_record_larger_than_the_budget_is_refused(opened: Open) -> None:
    with pytest.raises(OutOfBuffers):
        opened(2, memory_budget="4MiB").set(range(1), TensorDict({"bytes": torch.zeros(1, 5 << 20, dtype=torch.uint8)}, [1]))


def test_records_larger_than_a_chunk_are_stored(opened: Open) -> None:
    storage = opened(3)
    data = TensorDict({"bytes": torch.randint(256, (3, 5 << 20), dtype=torch.uint8)}, [3])
    storage.set(range(3), data)
    assert torch.equal(storage.get(torch.tensor([2, 0]))["bytes"], data["bytes"][[2, 0]])


def test_a_directory_has_one_storage(opened: Open) -> None:
    storage = opened()
    with pytest.raises(StoreLocked):
        opened()
    storage.close()
    opened()


def test_a_closed_storage_says_so(opened: Open) -> None:
    storage = opened()
    fill(storage, 0, 10)
    storage.close()
    storage.close()
    for use in (lambda: storage.get(0), storage.commit, lambda: fill(storage, 0, 1)):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_an_empty_storage_has_nothing_to_get(opened: Open) -> None:
    storage = opened()
    storage.commit()
    assert storage.next_cursor == 0
    with pytest.raises(RuntimeError, match="non-initialized"):
        storage.get(0)


def test_a_storage_is_not_sent_to_other_processes(opened: Open) -> None:
    with pytest.raises(NotImplementedError, match=r"use dumps\(\)"):
        pickle.dumps(opened())


def test_other_versions_of_torchrl_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torchrl"], "__version__", "0.9.0")
    with pytest.raises(ImportError, match=r"refuses 0\.9\.0"):
        reload(integration)


def test_without_torchrl_the_module_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensordict", types.ModuleType("tensordict"))
    with pytest.raises(ImportError, match=r"pip install torchrl==0\.14\.1"):
        reload(integration)
