"""Other packages that read samples in random order, each in its own format. Those that are not installed are left out.

A reader yields batches as tensors of uint8. The order is what the package offers: WebDataset shuffles shards and a buffer of 1000
samples, the others all samples.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from deepnvme.data import EpochSampler

THREADS = 16
AHEAD = 4
"""Batches that each reads ahead, where a package asks for a number."""
_SHARD = 64 << 20


class Format(NamedTuple):
    """How a package writes and reads samples."""

    module: str
    folder: str
    """Name of the directory that has the files."""
    write: Callable[[Path, Iterable[bytes], int], None]
    read: Callable[[Path, int], Iterator[torch.Tensor]]

    @property
    def installed(self) -> bool:
        """Whether the package is there."""
        return importlib.util.find_spec(self.module) is not None


def collated(rows: list[bytes]) -> torch.Tensor:
    """Return samples of equal size as one tensor."""
    return torch.from_numpy(numpy.stack([numpy.frombuffer(row, numpy.uint8) for row in rows]))


def _order(count: int, batch: int) -> Iterator[list[int]]:
    return (numbers.tolist() for numbers in EpochSampler(range(count), seed=1).batches(0, 0, batch))


def _write_array_record(directory: Path, samples: Iterable[bytes], size: int) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(directory / "samples.array_record"), "group_size:1,uncompressed")
    for sample in samples:
        writer.write(sample)
    writer.close()


def _array_record(directory: Path) -> Any:
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    return ArrayRecordDataSource(str(directory / "samples.array_record"))


def _read_array_record(directory: Path, batch: int) -> Iterator[torch.Tensor]:
    source = _array_record(directory)
    for numbers in _order(len(source), batch):  # read by threads of the package
        yield collated(source.__getitems__(numbers))


def _read_grain(directory: Path, batch: int) -> Iterator[torch.Tensor]:
    import grain

    dataset = grain.MapDataset.source(_array_record(directory)).shuffle(seed=1)
    options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD * batch)
    yield from dataset.to_iter_dataset(options).batch(batch, batch_fn=collated)


def _write_lance(directory: Path, samples: Iterable[bytes], size: int) -> None:
    import lance
    import pyarrow

    schema = pyarrow.schema([("image", pyarrow.binary(size))])
    batches = (pyarrow.record_batch([pyarrow.array([sample], pyarrow.binary(size))], schema=schema) for sample in samples)
    lance.write_dataset(batches, str(directory / "samples.lance"), schema=schema)


def _read_lance(directory: Path, batch: int) -> Iterator[torch.Tensor]:
    import lance

    dataset = lance.dataset(str(directory / "samples.lance"))
    for numbers in _order(dataset.count_rows(), batch):
        column = dataset.take(numbers).column("image").combine_chunks()
        values = numpy.frombuffer(column.buffers()[1], numpy.uint8).reshape(len(numbers), -1)
        yield torch.from_numpy(values.copy())


def _write_webdataset(directory: Path, samples: Iterable[bytes], size: int) -> None:
    import webdataset

    with webdataset.ShardWriter(str(directory / "%06d.tar"), maxsize=_SHARD, verbose=0) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"{number:09}", "bin": sample})


def _read_webdataset(directory: Path, batch: int) -> Iterator[torch.Tensor]:
    import webdataset

    shards = sorted(map(str, directory.glob("*.tar")))
    stream = webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False).shuffle(1000).to_tuple("bin")
    batches = stream.batched(batch, collation_fn=lambda rows: collated([row for (row,) in rows]))
    yield from webdataset.WebLoader(batches, batch_size=None, num_workers=2, prefetch_factor=AHEAD)


FORMATS = {
    "ArrayRecord": Format("array_record", "array_record", _write_array_record, _read_array_record),
    "Grain with ArrayRecord": Format("grain", "array_record", _write_array_record, _read_grain),
    "Lance": Format("lance", "lance", _write_lance, _read_lance),
    "WebDataset, 2 workers": Format("webdataset", "webdataset", _write_webdataset, _read_webdataset),
}
