"""Shards of MosaicML streaming are read in place."""

from __future__ import annotations

import base64
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.data import CorruptSamples, SampleDataset, SampleUnreadable

from ..support.files import flip
from ..support.sample_formats import same_samples, write_mds

ENCODINGS = {"data": "bytes", "label": "int"}
SAMPLES = [{"data": bytes([number]) * number, "label": number} for number in range(10)]


@pytest.fixture
def path(drive: Path) -> Path:
    write_mds(drive / "mds", ENCODINGS, SAMPLES, shard=6)
    return drive / "mds"


def changed(path: Path, change: Any) -> None:
    """Change the first shard in the index."""
    index = json.loads((path / "index.json").read_text())
    index["shards"][0] |= change
    (path / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 5},
        {"samples": 7},
        {"samples": 1 << 50},
        {"samples": -1},
        {"samples": "many"},
        {"format": "csv"},
        {"column_names": None},
        {"raw_data": {}},
        {"raw_data": {"basename": "shard.00001.mds"}},
    ],
)
def test_an_index_that_lies_is_an_error(path: Path, change: Any) -> None:
    changed(path, change)
    with pytest.raises(CorruptSamples):
        SampleDataset(path)


@pytest.mark.parametrize("names", [["data"], ["data", "data"]])
def test_columns_that_do_not_fit_their_encodings_are_an_error(path: Path, names: list[str]) -> None:
    index = json.loads((path / "index.json").read_text())
    for shard in index["shards"]:
        shard["column_names"] = names
    (path / "index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptSamples, match="have the encodings"):
        SampleDataset(path)


@pytest.mark.parametrize("index", [b"", b"{}", b"[]", b"\xff", b'{"shards": [{}]}'])
def test_a_damaged_index_is_an_error(path: Path, index: bytes) -> None:
    (path / "index.json").write_bytes(index)
    with pytest.raises(CorruptSamples) as raised:
        SampleDataset(path)
    assert raised.value.filename == str(path / "index.json")


@pytest.mark.parametrize(
    "change", [{"compression": "zstd:7"}, {"column_names": ["other", "label"]}, {"column_encodings": ["str", "int"]}]
)
def test_compressed_shards_and_shards_of_other_columns_are_refused(path: Path, change: Any) -> None:
    changed(path, change)
    with pytest.raises(ValueError, match="shards are compressed, their columns differ, or there are none"):
        SampleDataset(path)
    (path / "index.json").write_text('{"shards": []}')
    with pytest.raises(ValueError, match="or there are none"):
        SampleDataset(path)


@pytest.mark.parametrize("encoding", ["pkl", "pil", "str_decimal", "list[jpeg]", "ndarray:complex64", "ndarray:int8:a", "int:3"])
def test_an_encoding_that_is_not_read_in_place_is_refused(path: Path, encoding: str) -> None:
    for _ in range(2):
        changed(path, {"column_encodings": [encoding, "int"]})
    (path / "shard.00001.mds").unlink()
    index = json.loads((path / "index.json").read_text())
    (path / "index.json").write_text(json.dumps({"shards": index["shards"][:1]}))
    with pytest.raises(ValueError, match="column 'data' has the encoding"):
        SampleDataset(path)


def test_a_shard_that_is_missing_is_an_error(path: Path) -> None:
    (path / "shard.00001.mds").unlink()
    with pytest.raises(FileNotFoundError, match=r"shard\.00001\.mds"):
        SampleDataset(path)


@pytest.mark.parametrize("kept", [0, 3, 20, -1])
def test_a_shard_that_is_cut_off_is_an_error(path: Path, kept: int) -> None:
    shard = path / "shard.00000.mds"
    os.truncate(shard, kept % shard.stat().st_size if kept else 0)
    with pytest.raises(CorruptSamples, match="does not have offsets of 6 samples") as raised:
        SampleDataset(path)
    assert raised.value.filename == str(shard)


@pytest.mark.parametrize(("at", "offset"), [(4, 0), (12, 0xFFFFFFFF)])
def test_offsets_that_descend_or_are_of_the_header_are_an_error(path: Path, at: int, offset: int) -> None:
    with (path / "shard.00000.mds").open("r+b") as file:
        file.seek(at)
        file.write(offset.to_bytes(4, "little"))
    with pytest.raises(CorruptSamples, match="does not have offsets"):
        SampleDataset(path)


@pytest.mark.parametrize(("length", "reason"), [(b"\x02", "its columns have 14 bytes"), (b"\x04", "must be a multiple")])
def test_a_damaged_sample_is_named(path: Path, length: bytes, reason: str) -> None:
    shard = path / "shard.00000.mds"
    data = shard.read_bytes()
    at = data.index((3).to_bytes(4, "little") + b"\3\3\3")
    shard.write_bytes(data[:at] + length + data[at + 1 :])
    dataset = SampleDataset(path, errors="skip")
    with pytest.raises(SampleUnreadable, match=f"sample 3, 15 bytes at offset {at}: it is damaged: .*{reason}"):
        dataset[3]
    assert len(dataset.__getitems__(range(10))) == 9


@pytest.mark.parametrize("head", [b"\xff\x01", b"\x05", b"", b"\x41\x07" + b"\xff" * 8, b"\x41\x04\x03" + b"\0" * 8])
def test_a_damaged_array_is_named(drive: Path, head: bytes) -> None:
    write_mds(drive / "mds", {"data": "ndarray"}, [{"data": head}], shard=1)
    with pytest.raises(SampleUnreadable, match=r"sample 0, .*it is damaged"):
        SampleDataset(drive / "mds")[0]


def test_a_flipped_bit_leads_to_an_error_or_another_value(path: Path) -> None:
    """Never outside of a shard: it has no checksums."""
    for at in range((path / "shard.00001.mds").stat().st_size):
        flip(path / "shard.00001.mds", at)
        try:
            dataset = SampleDataset(path, errors="skip")
            assert len(dataset.__getitems__(range(10))) + dataset.skipped == 10
        except CorruptSamples:
            pass
        flip(path / "shard.00001.mds", at)
    assert len(SampleDataset(path).__getitems__(range(10))) == 10


def test_a_shard_that_mosaicml_has_written_is_what_its_reader_reads(drive: Path) -> None:
    """Each encoding, by MDSWriter of mosaicml-streaming 0.13.0, whose StreamingDataset reads these values."""
    encodings = {
        "any": "ndarray",
        "image": "jpeg",
        "label": "int",
        "mask": "ndarray:int8:2,3",
        "meta": "json",
        "name": "str",
        "raw": "bytes",
        "score": "float32",
        "small": "uint8",
        "tokens": "ndarray:uint16",
    }
    (drive / "mds").mkdir()
    (drive / "mds" / "shard.00000.mds").write_bytes(zlib.decompress(base64.b85decode(SHARD)))
    shard = {
        "column_encodings": list(encodings.values()),
        "column_names": list(encodings),
        "compression": None,
        "format": "mds",
        "raw_data": {"basename": "shard.00000.mds", "bytes": 660, "hashes": {}},
        "samples": 3,
        "version": 2,
    }
    (drive / "mds" / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))
    expected = [
        {
            "any": torch.full((1, number + 1), number / 2, dtype=torch.float64),
            "image": b"jpeg" * number,
            "label": torch.tensor(number - 1),
            "mask": torch.full((2, 3), number, dtype=torch.int8),
            "meta": json.dumps({"n": number}),
            "name": "é" * number,
            "raw": bytes([number]) * number,
            "score": torch.tensor(number / 4),
            "small": torch.tensor(number, dtype=torch.uint8),
            "tokens": torch.arange(number + 1).to(torch.uint16),
        }
        for number in range(3)
    ]
    assert same_samples(SampleDataset(drive / "mds").__getitems__([2, 0, 1]), [expected[2], expected[0], expected[1]])


SHARD = (
    "c-mc&Pf7zZ6vi`YkuF@ibTMQ-U}q}hFbfM_L!`tuZDaGNB&kwM!9%$43Oz@U;l?9)1I<e^SbUIt?`7WidkND+2z_J-efo8U5qkG)N2XeAq?#}_"
    ")ibUZmbCdjQ8Q``-I5|FPiwXS<;sDiFRd?|wkk%U#cBm=odJ2=I%Xl63r*dqf^-A@r+zpnYx3Za(hU@qEKa8?Oy-"
    "g<7$kx|G69LCb`_L48erZ6YUoRtKh-AGR#FiRPOq4<r&BC{jZ@S{h$4@BQ{;7*pYGR1UdB8U<k~Q6xqoe&I>=lbNu95WoP|d(sa?hi;DK=y!6k"
    ">5`lcK<P3@`VnVH0?_U9<Z0R2VZue(8(b@fk*SnUWnhx^#-"
    "n=X<C5dN<s@SQ~jj+U=+r|?5NY!)Ko%Kh=+eQ&o}9|Pes@dk;FQ|_6)=>8u6S75{H?u|o4e&zYc0|v|(_j@n`qhAo%nNI"
)
