"""Shards of MosaicML, Arrow and TFRecord files are read in place: what holds for each format, failures first."""

from __future__ import annotations

import errno
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from deepnvme.data import DataLoader, SampleDataset, SampleUnreadable

from ..support.faulty_filesystem import FaultyFilesystem
from ..support.files import open_files
from ..support.sample_formats import same_samples, write_arrow, write_mds, write_tfrecord

COUNT = 700
Written = tuple[Path, list[Any]]


def image(number: int) -> bytes:
    drawn = random.Random(number)
    return drawn.randbytes(drawn.choice([0, 20, 900, 30_000]))


def mds(directory: Path) -> Written:
    """Three shards."""
    samples = [{"image": image(number), "label": number, "name": "é" * (number % 5)} for number in range(COUNT)]
    write_mds(directory / "mds", {"image": "jpeg", "label": "int", "name": "str"}, samples, 300)
    return directory / "mds", [{**sample, "label": torch.tensor(sample["label"])} for sample in samples]


def arrow(directory: Path) -> Written:
    """Two files: two ranges a sample, and a number in memory."""
    pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    samples = [{"image": image(number), "label": number, "name": "é" * (number % 5)} for number in range(COUNT)]
    write_arrow(directory / "arrow", samples, shards=2)
    return directory / "arrow", [{**sample, "label": torch.tensor(sample["label"])} for sample in samples]


def tfrecord(directory: Path) -> Written:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard")
    records = [image(number) for number in range(COUNT)]
    write_tfrecord(directory / "train.tfrecord", records)
    return directory / "train.tfrecord", records


@pytest.fixture(params=[mds, arrow, tfrecord], ids=["mds", "arrow", "tfrecord"])
def form(request: pytest.FixtureRequest, indexes: Path) -> Callable[[Path], Written]:
    """Writes samples in a format, and returns the path and the samples."""
    written: Callable[[Path], Written] = request.param
    return written


def data_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in (".mds", ".arrow"))


def test_samples_that_the_drive_cannot_read_are_named_or_counted(
    direct_disk: FaultyFilesystem, form: Callable[[Path], Written]
) -> None:
    path, expected = form(direct_disk.path)
    dataset, skipping = SampleDataset(path), SampleDataset(path, errors="skip")
    last = data_files(path)[-1]
    direct_disk.fail("read", errno.EIO, times=-1, name=last.name)
    number = next(number for number in reversed(range(COUNT)) if image(number))
    with pytest.raises(SampleUnreadable, match=f"sample {number}, .*Input/output error") as raised:
        dataset[number]
    assert (raised.value.errno, raised.value.sample, raised.value.filename) == (errno.EIO, number, str(last))
    assert skipping.__getitems__([number, number]) == []
    assert skipping.skipped == 2  # samples, not ranges
    direct_disk.heal()
    assert same_samples(dataset.__getitems__(range(COUNT)), expected)
    for each in (dataset, skipping):
        each.close()


def test_a_file_that_was_changed_since_it_was_opened_is_an_error_of_its_samples(
    drive: Path, form: Callable[[Path], Written]
) -> None:
    path, expected = form(drive)
    dataset, skipping = SampleDataset(path), SampleDataset(path, errors="skip")
    files = data_files(path)
    os.truncate(files[-1], files[-1].stat().st_size // 2)
    with pytest.raises(SampleUnreadable, match=r"sample 699, .*was changed") as raised:
        dataset[-1]
    assert (raised.value.errno, raised.value.filename) == (errno.ESTALE, str(files[-1]))
    found = skipping.__getitems__(range(COUNT))
    assert len(found) == COUNT - skipping.skipped == {1: 0, 2: COUNT // 2, 3: 600}[len(files)]
    assert same_samples(found, expected[: len(found)])


def test_samples_come_back_in_any_order(drive: Path, form: Callable[[Path], Written]) -> None:
    path, expected = form(drive)
    dataset = SampleDataset(path)
    assert len(dataset) == COUNT
    numbers = random.Random(0).choices(range(COUNT), k=300)  # some of them twice
    assert same_samples(dataset.__getitems__(numbers), [expected[number] for number in numbers])
    assert same_samples([dataset[number] for number in (-1, 3, 0)], [expected[number] for number in (-1, 3, 0)])
    assert dataset.__getitems__([]) == []
    with pytest.raises(IndexError, match="the dataset has 700"):
        dataset[COUNT]
    dataset.close()
    assert open_files(drive) == []  # no mapping or file of the opening stays
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_loaders_read_all_samples(drive: Path, form: Callable[[Path], Written]) -> None:
    path, expected = form(drive)
    dataset = SampleDataset(path)
    with DataLoader(dataset, 64, collate_fn=list) as loader:
        assert same_samples([sample for batch in loader for sample in batch], expected)
    copy: SampleDataset = pickle.loads(pickle.dumps(dataset))
    workers = TorchLoader(copy, 64, num_workers=2, collate_fn=list)
    assert same_samples([sample for batch in workers for sample in batch], expected)


def test_a_sample_that_is_changed_in_place_changes_nothing_else(drive: Path, form: Callable[[Path], Written]) -> None:
    path, expected = form(drive)
    dataset = SampleDataset(path)
    first, second = dataset.__getitems__([5, 5])
    if isinstance(first, dict):
        first["label"] += 1
    assert same_samples([second, dataset[5]], [expected[5]] * 2)
