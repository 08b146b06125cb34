"""Other packages that read samples in random order, each in its own format. Those that are not installed are left out.

A reader yields batches as tensors of uint8. The order is what the package offers: WebDataset shuffles shards and a buffer of 1000
samples, LitData chunks and the samples of each, the others all samples. What this package reads in place is measured on the same
files.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import DataLoader as TorchLoader

from deepnvme.data import DataLoader, EpochSampler, SampleDataset

THREADS = 16
AHEAD = 4
"""Batches that each reads ahead, where a package asks for a number."""
_SHARD = 64 << 20


class Format(NamedTuple):
    """How a package writes and reads samples."""

    package: str
    """Name of its distribution."""
    folder: str
    """Name of the directory that has the files."""
    write: Callable[[Path, Iterable[bytes], int], None]
    read: Callable[[Path, int], Iterator[torch.Tensor]]

    @property
    def installed(self) -> bool:
        """Whether the package is there."""
        return any(importlib.metadata.distributions(name=self.package))


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


def _mosaicml() -> Any:
    """Return MosaicML's package ``streaming``, which has the name of a benchmark here."""
    before, here = sys.path[:], Path(__file__).parents[1]
    sys.path[:] = [path for path in before if Path(path).absolute() != here]
    try:
        return importlib.import_module("streaming")
    finally:
        sys.path[:] = before


def _write_mds(directory: Path, samples: Iterable[bytes], size: int) -> None:
    with _mosaicml().MDSWriter(out=str(directory), columns={"image": "bytes"}, size_limit=_SHARD, exist_ok=True) as writer:
        for sample in samples:
            writer.write({"image": sample})


def _images(rows: list[dict[str, bytes]]) -> torch.Tensor:
    return collated([row["image"] for row in rows])


def _read_mosaicml(directory: Path, batch: int) -> Iterator[torch.Tensor]:
    dataset = _mosaicml().StreamingDataset(local=str(directory), batch_size=batch, shuffle=True, shuffle_algo="naive")
    yield from TorchLoader(dataset, batch, num_workers=2, prefetch_factor=AHEAD, collate_fn=_images)


def _write_litdata(directory: Path, samples: Iterable[bytes], size: int) -> None:
    from litdata.streaming.cache import Cache

    cache = Cache(str(directory), chunk_bytes=_SHARD)
    for number, sample in enumerate(samples):
        cache[number] = sample
    cache.done()
    cache.merge()


def _read_litdata(directory: Path, batch: int) -> Iterator[torch.Tensor]:
    import litdata

    dataset = litdata.StreamingDataset(str(directory), shuffle=True, seed=1)
    yield from litdata.StreamingDataLoader(dataset, batch_size=batch, num_workers=2, prefetch_factor=AHEAD, collate_fn=collated)


def _write_arrow(directory: Path, samples: Iterable[bytes], size: int) -> None:
    import datasets

    features = datasets.Features({"image": datasets.Value("binary")})
    with datasets.arrow_writer.ArrowWriter(path=str(directory / "samples.arrow"), features=features) as writer:
        for sample in samples:
            writer.write({"image": sample})
        writer.finalize()


def _read_datasets(directory: Path, batch: int) -> Iterator[torch.Tensor]:
    import datasets

    dataset = datasets.Dataset.from_file(str(directory / "samples.arrow"))
    yield from TorchLoader(dataset, batch, shuffle=True, num_workers=2, prefetch_factor=AHEAD, collate_fn=_images)


def _read_in_place(directory: Path, batch: int) -> Iterator[torch.Tensor]:
    path = directory if (directory / "index.json").exists() else directory / "samples.arrow"
    with DataLoader(SampleDataset(path), batch, shuffle=True, seed=1, prefetch=AHEAD, collate_fn=_images) as loader:
        yield from loader


FORMATS = {
    "ArrayRecord": Format("array_record", "array_record", _write_array_record, _read_array_record),
    "Grain with ArrayRecord": Format("grain", "array_record", _write_array_record, _read_grain),
    "Lance": Format("pylance", "lance", _write_lance, _read_lance),
    "WebDataset, 2 workers": Format("webdataset", "webdataset", _write_webdataset, _read_webdataset),
    "LitData, 2 workers": Format("litdata", "litdata", _write_litdata, _read_litdata),
    "MosaicML, 2 workers": Format("mosaicml-streaming", "mds", _write_mds, _read_mosaicml),
    "deepnvme on shards of MosaicML": Format("mosaicml-streaming", "mds", _write_mds, _read_in_place),
    "Hugging Face datasets, 2 workers": Format("datasets", "arrow", _write_arrow, _read_datasets),
    "deepnvme on files of Hugging Face datasets": Format("datasets", "arrow", _write_arrow, _read_in_place),
}
