"""Batches in the sampler's order, each sample once, resumed in the middle bit for bit, whatever threads and memory do."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves, tree_structure
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler, default_collate
from torch.utils.data import DataLoader as TorchLoader

from deepnvme.data import DataLoader, EpochSampler, SampleDataset, SampleUnreadable, SampleWriter
from deepnvme.data.sample_files import ENTRY

from ..support.files import flip
from ..support.interrupts import ctrl_c_every
from ..support.patience import PATIENCE
from .conftest import Write, made, same

COUNT = 101


@pytest.fixture(scope="module")
def dataset(io_dir: Path) -> SampleDataset:
    path = io_dir / "numbers"
    with SampleWriter(path, {"number": torch.int64, "image": (torch.uint8, (3000,))}) as writer:
        for number in range(COUNT):
            writer.append(number=number, image=torch.full((3000,), number, dtype=torch.uint8))
    return SampleDataset(path)


def numbers_of(batch: Any) -> list[int]:
    """The numbers of a batch, whose images must be theirs."""
    assert torch.equal(batch["image"], batch["number"].to(torch.uint8)[:, None].expand(-1, 3000))
    found: list[int] = batch["number"].tolist()
    return found


def expected(size: int, epoch: int, shuffle: bool, drop_last: bool) -> list[list[int]]:
    """The batches of an epoch, from a list."""
    sampler = EpochSampler(range(COUNT), shuffle, 3)
    sampler.set_epoch(epoch)
    order = list(sampler)
    batches = [order[begin : begin + size] for begin in range(0, COUNT, size)]
    return [batch for batch in batches if len(batch) == size or not drop_last]


@pytest.mark.filterwarnings("ignore:a batch takes")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(1, 120), shuffle=st.booleans(), drop_last=st.booleans(), threads=st.integers(1, 3),
    prefetch=st.integers(1, 6), budget=st.sampled_from([0, 20_000, 400_000, "64MiB"]), stop=st.integers(0, 12),
)  # fmt: skip
def test_epochs_are_what_a_list_would_be_and_resume_anywhere(
    dataset: SampleDataset, size: int, shuffle: bool, drop_last: bool, threads: int, prefetch: int, budget: Any, stop: int
) -> None:
    options: dict[str, Any] = {
        "batch_size": size, "shuffle": shuffle, "seed": 3, "drop_last": drop_last, "decode_threads": threads,
        "prefetch": prefetch, "memory_budget": budget,
    }  # fmt: skip
    epochs = [expected(size, epoch, shuffle, drop_last) for epoch in range(3)]
    with DataLoader(dataset, **options) as loader:
        assert len(loader) == len(epochs[0])
        for epoch in epochs[:2]:
            assert [numbers_of(batch) for batch in loader] == epoch
        begun = [numbers_of(batch) for batch in itertools.islice(loader, stop)]
        state = loader.state_dict()
    assert begun == epochs[2][:stop]
    with DataLoader(dataset, **options) as other:
        other.load_state_dict(state)
        rest = [numbers_of(batch) for batch in other]
        if stop > len(epochs[2]):
            assert rest == expected(size, 3, shuffle, drop_last)
        else:
            assert rest == epochs[2][stop:]
            assert [numbers_of(batch) for batch in other] == expected(size, 3, shuffle, drop_last)


def test_a_position_of_other_data_is_refused(dataset: SampleDataset) -> None:
    with DataLoader(dataset, 4, shuffle=True, seed=1) as loader, DataLoader(dataset, 5, shuffle=True, seed=2) as other:
        with pytest.raises(ValueError, match="batch_size was 4, and is 5; seed was 1, and is 2"):
            other.load_state_dict(loader.state_dict())
        with pytest.raises(ValueError, match="samples was None"):
            other.load_state_dict({})


def test_an_iteration_that_is_left_is_followed_by_the_next_epoch(dataset: SampleDataset) -> None:
    with DataLoader(dataset, 10, shuffle=True, seed=3) as loader:
        first = iter(loader)
        assert numbers_of(next(first)) == expected(10, 0, True, False)[0]
        second = iter(loader)
        assert list(first) == []
        assert numbers_of(next(second)) == expected(10, 1, True, False)[0]
        loader.sampler.set_epoch(2)  # type: ignore[attr-defined]  # as Lightning does
        assert [numbers_of(batch) for batch in loader] == expected(10, 2, True, False)
        assert [numbers_of(batch) for batch in loader] == expected(10, 3, True, False)


def test_an_epoch_that_is_set_before_the_first_batch_is_the_next_one(dataset: SampleDataset) -> None:
    """Lightning makes the iterator, and sets the epoch then. transformers' Trainer sets it in the loader."""
    with DataLoader(dataset, 10, shuffle=True, seed=3) as loader:
        batches = iter(loader)
        loader.sampler.set_epoch(2)  # type: ignore[attr-defined]
        assert [numbers_of(batch) for batch in batches] == expected(10, 2, True, False)
        loader.set_epoch(1)
        state = {**loader.state_dict(), "epoch": 3, "batch": 11}
        assert [numbers_of(batch) for batch in loader] == expected(10, 1, True, False)
        for iterators in (1, 2):  # one more that nobody uses is no epoch
            loader.load_state_dict({**state, "batch": 4})
            batches = [iter(loader) for _ in range(iterators)][-1]
            assert [numbers_of(batch) for batch in batches] == expected(10, 3, True, False)[4:]
        loader.load_state_dict(state)  # the end of an epoch, after which Lightning sets the next one
        batches = iter(loader)
        loader.set_epoch(4)
        assert [numbers_of(batch) for batch in batches] == expected(10, 4, True, False)


def test_what_was_read_ahead_is_kept_by_who_counts_batches(dataset: SampleDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning and the Trainer take as many batches as an epoch has, and do not ask for the end."""
    read: list[int] = []
    start = dataset.start

    def counting(numbers: Any, *others: Any, **options: Any) -> Any:
        read.append(len(numbers))
        return start(numbers, *others, **options)

    monkeypatch.setattr(dataset, "start", counting)
    with DataLoader(dataset, 10, shuffle=True, seed=3, prefetch=3) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            batches = iter(loader)
            assert [numbers_of(next(batches)) for _ in range(11)] == expected(10, epoch, True, False)
    assert len(read) == 3 * 11 + 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes_in_and_after_an_epoch(dataset: SampleDataset, drive: Path) -> None:
    lightning = pytest.importorskip("lightning")
    options = {"max_epochs": 3, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(1, 1), []

        def train_dataloader(self) -> DataLoader:
            return DataLoader(dataset, 25, shuffle=True, seed=3)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            self.seen.append(numbers_of(batch))
            return self.layer(batch["number"].float()[:, None]).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.0)

    def seen_from(checkpoint: Path | None, **saving: Any) -> list[list[int]]:
        module = Module()
        saver = checkpoints(drive, auto_insert_metric_name=False, save_top_k=-1, **saving)
        lightning.Trainer(callbacks=[saver], **options).fit(module, ckpt_path=checkpoint)
        return module.seen

    whole = [batch for epoch in range(3) for batch in expected(25, epoch, True, False)]
    assert seen_from(None, filename="step{step}", every_n_train_steps=1) == whole
    assert seen_from(None, filename="epoch{epoch}", every_n_epochs=1, save_on_train_epoch_end=True) == whole
    for name, steps in (("step3", 3), ("step5", 5), ("step12", 12), ("epoch0", 5), ("epoch1", 10)):
        assert seen_from(drive / f"{name}.ckpt", filename="none") == whole[steps:]


def test_ranks_have_equal_parts_of_one_order(dataset: SampleDataset) -> None:
    loaders = [DataLoader(dataset, 7, sampler=EpochSampler(dataset, seed=3, rank=rank, world_size=3)) for rank in range(3)]
    found = [[number for batch in loader for number in numbers_of(batch)] for loader in loaders]
    for loader in loaders:
        loader.close()
    assert [number for turn in zip(*found, strict=True) for number in turn][:COUNT] == expected(COUNT, 0, True, False)[0]
    other = DataLoader(dataset, 7, sampler=EpochSampler(dataset, seed=3, rank=0, world_size=2))
    with pytest.raises(ValueError, match="world_size was 3, and is 2"):
        other.load_state_dict(loaders[0].state_dict())


def test_samplers_of_torch(dataset: SampleDataset) -> None:
    sampler = DistributedSampler(dataset, 2, 1, seed=4)
    with DataLoader(dataset, 8, sampler=sampler) as loader:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            theirs = [batch["number"].tolist() for batch in TorchLoader(dataset, 8, sampler=sampler)]
            assert [numbers_of(batch) for batch in loader] == theirs
        sampler.set_epoch(5)
        next(iter(loader))
        state = loader.state_dict()
    batches = BatchSampler(SequentialSampler(dataset), 10, drop_last=True)
    with DataLoader(dataset, batch_sampler=batches) as loader:
        assert len(loader) == 10
        assert [numbers_of(batch) for batch in loader] == expected(10, 0, False, True)
    with DataLoader(dataset, 8, sampler=sampler) as loader:
        loader.load_state_dict(state)
        theirs = [batch["number"].tolist() for batch in TorchLoader(dataset, 8, sampler=sampler)]
        assert [numbers_of(batch) for batch in loader] == theirs[1:]


def test_samples_are_collated_as_torch_does(write: Write) -> None:
    dataset = SampleDataset(write(20))
    named = [{"label": each["label"], "text": each["text"], "image": each["image"]} for each in map(made, range(20))]
    columns = ("label", "text", "image")
    with DataLoader(dataset, 6, transform=lambda sample: {name: sample[name] for name in columns}) as loader:
        found = list(loader)
    theirs = list(TorchLoader(named, 6))  # type: ignore[arg-type]
    for one, other in zip(found, theirs, strict=True):
        assert one.keys() == other.keys()
        assert torch.equal(one["label"], other["label"])
        assert (one["text"], one["image"]) == (other["text"], other["image"])
    with DataLoader(dataset, 6, collate_fn=lambda samples: len(samples), shuffle=True) as loader:
        assert list(loader) == [6, 6, 6, 2]


@pytest.mark.parametrize(
    "changed",
    [
        lambda image: image, lambda image: image.view(30, 100).T, lambda image: torch.complex(*[image.double()] * 2).conj(),
        lambda image: image.double().requires_grad_(),
    ],
)  # fmt: skip
def test_large_tensors_of_a_transform_are_collated(dataset: SampleDataset, changed: Any) -> None:
    with DataLoader(dataset, 50, transform=lambda sample: changed(sample["image"])) as loader:
        found = list(loader)
    images = [changed(torch.full((3000,), number, dtype=torch.uint8)) for number in range(COUNT)]
    assert [len(batch) for batch in found] == [50, 50, 1]
    assert torch.equal(torch.cat(found), torch.stack(images))


@pytest.mark.parametrize("threads", [1, 2])
def test_batches_that_are_kept_stay_what_they_are(write: Write, threads: int) -> None:
    """Their memory is not read into again, however small the budget."""
    dataset = SampleDataset(write(200))
    with DataLoader(dataset, 5, shuffle=True, collate_fn=list, memory_budget="1MiB", decode_threads=threads) as loader:
        kept = list(loader)
    assert all(same(sample, made(int(sample["label"]))) for batch in kept for sample in batch)
    assert sorted(int(sample["label"]) for batch in kept for sample in batch) == list(range(200))


def test_a_transform_that_raises_names_the_sample_and_the_next_batch_follows(dataset: SampleDataset) -> None:
    def transform(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if sample["number"] == 15:
            raise ZeroDivisionError("15")
        return sample

    for threads in (1, 2):
        with DataLoader(dataset, 10, transform=transform, decode_threads=threads) as loader:
            batches = iter(loader)
            assert numbers_of(next(batches)) == list(range(10))
            with pytest.raises(ZeroDivisionError, match="15") as raised:
                next(batches)
            if sys.version_info >= (3, 11):
                assert "transform of sample 15 of <SampleDataset" in raised.value.__notes__[0]
            assert [numbers_of(batch) for batch in batches] == expected(10, 0, False, False)[2:]


def test_a_transform_that_raises_stop_iteration_ends_no_epoch(dataset: SampleDataset) -> None:
    names = iter(range(15))
    with DataLoader(dataset, 10, transform=lambda sample: (next(names), sample), decode_threads=1, prefetch=1) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            next(batches)


def test_a_sampler_that_raises_has_its_turn_after_the_batches_before(dataset: SampleDataset) -> None:
    def numbers() -> Iterator[int]:
        yield from range(25)
        raise ZeroDivisionError("25")

    with DataLoader(dataset, 10, sampler=numbers(), prefetch=5) as loader:
        batches = iter(loader)
        assert [numbers_of(next(batches)) for _ in range(2)] == [list(range(10)), list(range(10, 20))]
        with pytest.raises(ZeroDivisionError, match="25"):
            next(batches)
        assert list(batches) == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_loader_that_is_closed_or_of_another_process_says_so(dataset: SampleDataset) -> None:
    block = threading.Event()
    with DataLoader(dataset, 10, transform=lambda sample: block.wait(PATIENCE) and sample, prefetch=3) as loader:
        batches = iter(loader)
        block.set()
        next(batches)
        block.clear()  # batches are in the queue, and the child has no threads that decode them
        child = os.fork()
        if child == 0:
            try:
                next(batches)
            except ValueError as error:
                os._exit("not to be used in this one" in str(error))
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        block.set()
        assert numbers_of(next(batches)) == expected(10, 0, False, False)[1]
    for again in (batches, iter(loader)):
        with pytest.raises(ValueError, match="the loader is closed"):
            next(again)


def test_damaged_samples_are_left_out_and_counted(write: Write) -> None:
    path = write(30)
    (file,) = path.glob("*.samples")
    (index,) = path.glob("*.index")
    strict = SampleDataset(path)
    wrong = []
    for number in (4, 20, 21, 22, 23):
        offset, nbytes, _ = ENTRY.unpack_from(index.read_bytes(), number * ENTRY.size)
        flip(file, offset + nbytes - 1)
        wrong.append(number)
    with DataLoader(SampleDataset(path, errors="skip"), 4, collate_fn=list) as loader:
        found = [int(sample["label"]) for batch in loader for sample in batch]
        assert found == [number for number in range(30) if number not in wrong]
        stats = loader.stats()
        assert (stats.skipped, stats.samples, stats.batches) == (5, 25, 7)  # of one batch, nothing is left
    with DataLoader(strict, 4, collate_fn=list) as loader, pytest.raises(SampleUnreadable, match="sample 4,"):
        list(loader)


def test_ctrl_c_while_a_batch_is_awaited_loses_no_batch(dataset: SampleDataset) -> None:
    slow = threading.Event()

    def transform(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if int(sample["number"]) == 25:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            slow.wait(0.2)
        return sample

    with DataLoader(dataset, 10, transform=transform, prefetch=1, decode_threads=1) as loader:
        batches, found, heard = iter(loader), [], 0
        while True:
            try:
                found.append(numbers_of(next(batches)))
            except KeyboardInterrupt:
                heard += 1
            except StopIteration:
                break
    assert heard == 1
    assert found == expected(10, 0, False, False)


def test_ctrl_c_anywhere_loses_no_batch(dataset: SampleDataset) -> None:
    for threads in (1, 2):
        with DataLoader(dataset, 2, shuffle=True, seed=3, decode_threads=threads) as loader:
            found: list[list[int]] = []
            begun = False
            with ctrl_c_every(0.003) as pressed:
                while len(found) < 4 * 51:
                    try:
                        if not begun:
                            batches = iter(loader)
                            begun = True
                        found.append(numbers_of(next(batches)))
                    except KeyboardInterrupt:
                        continue
                    except StopIteration:
                        begun = False
            assert pressed.count > 0
        assert found == [batch for epoch in range(4) for batch in expected(2, epoch, True, False)]


PROGRAM = """
import sys, time
from deepnvme.data import DataLoader, SampleDataset
def transform(sample):
    time.sleep(0.05)
    return sample
loader = DataLoader(SampleDataset(sys.argv[1]), 100, transform=transform, prefetch=8, decode_threads=2, collate_fn=list)
for batch in loader:
    print("batch", flush=True)
"""


@pytest.mark.slow
def test_a_program_that_ends_does_not_decode_what_nobody_wants(write: Write) -> None:
    path = write(800)
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", PROGRAM, str(path)]
    environment = {**os.environ, "PYTHONPATH": root}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as program:
        assert program.stdout is not None
        program.stdout.readline()
        begun = time.monotonic()
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=PATIENCE)
    assert "KeyboardInterrupt" in said
    assert time.monotonic() - begun < 10  # the queue would take 20 s


def test_the_memory_stays_within_the_budget(drive: Path) -> None:
    with SampleWriter(drive / "large", {"image": (torch.uint8, (1 << 20,))}) as writer:
        for number in range(64):
            writer.append(image=torch.full((1 << 20,), number, dtype=torch.uint8))
    with DataLoader(SampleDataset(drive / "large"), 4, prefetch=100, memory_budget="24MiB", decode_threads=1) as loader:
        for number, batch in enumerate(loader):
            assert batch["image"][:, 0].tolist() == list(range(4 * number, 4 * number + 4))
            assert loader._pool.allocated <= 24 << 20
            assert len(loader._queue) <= 6
    assert loader._pool.allocated <= 8 << 20  # the last batch, and the memory that it was read into


def test_a_budget_without_room_for_two_batches_is_told_once(dataset: SampleDataset) -> None:
    with DataLoader(dataset, 10, memory_budget=50_000) as loader:
        with pytest.warns(RuntimeWarning, match=r"a batch takes 29\.5 KiB, and memory_budget is 48\.83 KiB") as told:
            assert [numbers_of(batch) for batch in loader] == expected(10, 0, False, False)
        assert len(told) == 1
        assert len(list(loader)) == len(loader)


def test_the_end_waits_for_reads_that_nobody_wants(dataset: SampleDataset, faulty: Any, gate: Any) -> None:
    """Memory that a drive still writes to is not free: it stayed pinned after the loader was closed."""
    reader, held = SampleDataset(dataset._layout.files[0].parent)._files_here(), faulty("threads", gate=gate)
    first = iter([reader.engine])

    class Later:
        def read_many(self, *arguments: Any) -> Any:
            return next(first, held).read_many(*arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(held, name)

    samples = SampleDataset(dataset._layout.files[0].parent)
    samples._files_here().engine = Later()  # type: ignore[assignment]
    loader = DataLoader(samples, 10, prefetch=4, decode_threads=1)
    batches = iter(loader)
    assert numbers_of(next(batches)) == list(range(10))
    closing = threading.Thread(target=loader.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    gate.release()
    closing.join()
    assert loader._pool.allocated == 0


def test_statistics_say_what_the_limit_is(dataset: SampleDataset) -> None:
    def slow(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        time.sleep(0.001)
        return sample

    with DataLoader(dataset, 10, transform=slow) as loader:
        assert sum(len(batch["number"]) for batch in loader) == COUNT
        stats = loader.stats()
        assert (stats.batches, stats.samples, stats.skipped) == (11, COUNT, 0)
        assert stats.bytes_read >= COUNT * 3008
        assert stats.limit == "decoding"
        assert 0 < stats.samples_per_second < 2500
        assert stats.seconds_decoding > 0.1
        assert stats.as_dict()["samples"] == COUNT
    with DataLoader(dataset, 5) as loader:
        for _ in loader:
            time.sleep(0.1)
        assert loader.stats().limit == "caller"


def test_random_access_by_many_threads_while_a_loader_runs(dataset: SampleDataset) -> None:
    stop = threading.Event()
    wrong = []

    def read() -> None:
        drawn = random.Random(0)
        while not stop.is_set():
            number = drawn.randrange(COUNT)
            if int(dataset[number]["number"]) != number:
                wrong.append(number)

    thread = threading.Thread(target=read)
    thread.start()
    with DataLoader(dataset, 3, shuffle=True, seed=3) as loader:
        assert [numbers_of(batch) for batch in loader] == expected(3, 0, True, False)
    stop.set()
    thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0}, {"prefetch": 0}, {"decode_threads": 0}, {"sampler": range(3), "shuffle": True},
        {"batch_sampler": [[1]], "batch_size": 2}, {"memory_budget": "many"},
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_are_refused(dataset: SampleDataset, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        DataLoader(dataset, **options)


def test_a_dataset_in_memory_is_for_torchs_loader() -> None:
    with pytest.raises(TypeError, match="torch's DataLoader takes others"):
        DataLoader([1, 2, 3])  # type: ignore[arg-type]


def _large(number: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((5000,), number, dtype=kind)


TRANSFORMS: dict[str, Callable[[int], Any]] = {
    "a tensor": _large,
    "a dict in two orders": lambda number: dict(
        sorted({"a": _large(number), "b": _large(-number)}.items(), reverse=bool(number % 2))
    ),
    "nested": lambda number: [{"x": (_large(number), number)}, "text", torch.tensor(number)],
    "two dtypes, one beside the other": lambda number: (_large(number), _large(number, torch.int16)),
    "the same tensor twice": lambda number: (each := _large(number), each),
    "rows of one tensor": lambda number: torch.arange(505_000).view(101, 5000)[number],
    "columns of one tensor": lambda number: torch.arange(505_000).view(5000, 101)[:, number],
    "imaginary": lambda number: _large(number, torch.complex64).conj(),
    "with gradients": lambda number: _large(number).requires_grad_(),
}


@pytest.mark.parametrize("form", TRANSFORMS)
def test_what_a_transform_returns_is_collated_as_by_torch(form: str, dataset: SampleDataset) -> None:
    transform = TRANSFORMS[form]
    with DataLoader(dataset, 7, transform=lambda sample: transform(int(sample["number"]))) as loader:
        found = list(loader)
    assert len(found) == 15
    for batch, begin in zip(found, range(0, COUNT, 7), strict=True):
        known = default_collate([transform(number) for number in range(begin, min(begin + 7, COUNT))])
        for one, other in zip(tree_leaves(batch), tree_leaves(known), strict=True):
            assert one.equal(other) if isinstance(one, torch.Tensor) else one == other
        assert tree_structure(batch) == tree_structure(known)


def test_samples_of_different_shapes_are_told_as_by_torch(dataset: SampleDataset) -> None:
    with (
        DataLoader(dataset, 7, transform=lambda sample: torch.zeros(5000 + int(sample["number"]))) as loader,
        pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"),
    ):
        next(iter(loader))


def test_large_samples_that_are_left_out_leave_no_row(drive: Path) -> None:
    with SampleWriter(drive / "large", {"number": torch.int64, "image": "bytes"}) as writer:
        for number in range(20):
            writer.append(number=number, image=bytes([number]) * 20_000)
    (data,) = (drive / "large").glob("*.samples")
    flip(data, data.read_bytes().index(bytes([3]) * 1000))
    dataset = SampleDataset(drive / "large", errors="skip")
    with DataLoader(
        dataset, 10, transform=lambda sample: torch.frombuffer(bytearray(sample["image"]), dtype=torch.uint8)
    ) as loader:
        found = [batch[:, -1].tolist() for batch in loader]
    assert found == [[0, 1, 2, 4, 5, 6, 7, 8, 9], list(range(10, 20))]
    assert loader.stats().skipped == 1
