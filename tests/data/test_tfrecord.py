"""TFRecord files are read in place."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from deepnvme.data import CorruptSamples, SampleDataset

from ..support.files import flip
from ..support.sample_formats import write_tfrecord

pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard")
pytestmark = pytest.mark.usefixtures("indexes")
RECORDS = [b"a" * 100, b"", b"b" * 50]
PLACES = [0, 116, 132]  # 16 bytes around each


@pytest.fixture
def path(drive: Path) -> Path:
    write_tfrecord(drive / "a.tfrecord", RECORDS)
    return drive / "a.tfrecord"


@pytest.mark.parametrize("record", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 7, 8, 11])
def test_a_damaged_length_is_an_error(path: Path, record: int, at: int) -> None:
    flip(path, PLACES[record] + at)
    with pytest.raises(CorruptSamples, match=f"no record begins at offset {PLACES[record]}") as raised:
        SampleDataset(path)
    assert raised.value.filename == str(path)


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (5, "no record begins at offset 0"),
        (12, "record at offset 0 has 100 bytes"),
        (115, "record at offset 0 has 100 bytes"),
        (120, "no record begins at offset 116"),
        (197, "record at offset 132 has 50 bytes"),
    ],
)
def test_a_file_that_is_cut_off_is_an_error(path: Path, kept: int, reason: str) -> None:
    os.truncate(path, kept)
    with pytest.raises(CorruptSamples, match=reason):
        SampleDataset(path)


def test_a_compressed_file_is_an_error(path: Path) -> None:
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(CorruptSamples, match="compressed"):
        SampleDataset(path)


def test_records_are_bytes_and_files_follow_one_another(drive: Path, path: Path, indexes: Path) -> None:
    shards = [drive / f"train.tfrecord-{number:05}-of-00002" for number in range(2)]
    for number, shard in enumerate(shards):
        write_tfrecord(shard, [*RECORDS, bytes([number])])
    for _ in range(2):  # without an index, and with it
        dataset = SampleDataset([path, *shards])
        assert dataset.__getitems__(range(11)) == [*RECORDS, *RECORDS, b"\0", *RECORDS, b"\1"]
    assert len(list(indexes.iterdir())) == 3
    path.write_bytes(b"")
    assert len(SampleDataset(path)) == 0
