"""Writes samples in formats of other packages, as they write them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch


def write_mds(directory: Path, encodings: Mapping[str, str], samples: Sequence[Mapping[str, Any]], shard: int) -> None:
    """A directory of MosaicML streaming, with at most ``shard`` samples in each shard."""
    directory.mkdir()
    names, shards = sorted(encodings), []
    for begin in range(0, len(samples), shard):
        records = []
        for sample in samples[begin : begin + shard]:
            values = {name: _encoded(sample[name]) for name in names}
            lengths = [len(value) for name, value in values.items() if encodings[name] != "int"]
            records.append(struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(values.values()))
        config = b'{"anything": "which no reader needs"}'
        ends = list(accumulate(map(len, records), initial=4 * (len(records) + 2) + len(config)))
        data = struct.pack(f"<{len(ends) + 1}I", len(records), *ends) + config + b"".join(records)
        name = f"shard.{len(shards):05}.mds"
        (directory / name).write_bytes(data)
        shards.append(
            {
                "column_encodings": [encodings[name] for name in names],
                "column_names": names,
                "column_sizes": [8 if encodings[name] == "int" else None for name in names],
                "compression": None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "samples": len(records),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": None,
            }
        )
    (directory / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))


def _encoded(value: bytes | str | int) -> bytes:
    if isinstance(value, int):
        return struct.pack("<q", value)
    return value.encode() if isinstance(value, str) else value


def write_arrow(directory: Path, samples: Sequence[dict[str, Any]], shards: int) -> None:
    """A directory of ``save_to_disk`` of Hugging Face datasets."""
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(list(samples)).save_to_disk(directory, num_shards=shards)


def write_tfrecord(path: Path, records: Sequence[bytes]) -> None:
    """A file of TFRecord, by TensorBoard's writer."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    with path.open("wb") as file:
        writer = RecordWriter(file)
        for record in records:
            writer.write(record)


def same_samples(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether samples are equal, those of dicts by column."""
    return len(found) == len(expected) and all(map(_same, found, expected))


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(_same(found[name], expected[name]) for name in expected)
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    return type(found) is type(expected) and found == expected
