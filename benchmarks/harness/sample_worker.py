"""A process that reads shuffled samples in one way: ``python -m harness.sample_worker REQUESTS REPLIES``."""

from __future__ import annotations

import io
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from deepnvme.data import DataLoader, EpochSampler, SampleDataset, SampleWriter, TokenDataset
from deepnvme.data.sample_files import ENTRY
from harness.other_loaders import FORMATS, Format
from harness.serving import serve

AHEAD = 4
"""Batches that each contender reads ahead."""
TOKENS = 4096
"""Tokens of a window, of 2 bytes each."""
SIDE = 512
"""Height and width of an image."""


def file_of(directory: str) -> str:
    """The only data file of a dataset. Its samples lie one after the other."""
    (found,) = Path(directory).glob("*.samples")
    return str(found)


class RawSamples(Dataset[torch.Tensor]):
    """The samples of a file, each by a pread."""

    def __init__(self, directory: str) -> None:
        self._path = file_of(directory)
        index = Path(self._path.removesuffix("-0.samples") + ".index").read_bytes()
        self._places = torch.tensor([entry[:2] for entry in ENTRY.iter_unpack(index)])
        self._descriptor = -1

    def __len__(self) -> int:
        return len(self._places)

    def read_into(self, number: int, row: torch.Tensor) -> None:
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_RDONLY)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        if os.preadv(self._descriptor, [row.numpy()], int(self._places[number, 0])) != len(row):
            raise OSError(f"sample {number} is short")

    def __getitem__(self, number: int) -> torch.Tensor:
        row = torch.empty(int(self._places[number, 1]), dtype=torch.uint8)
        self.read_into(number, row)
        return row


class DecodedImages(RawSamples):
    """JPEGs of a file, each by a pread, decoded."""

    def __getitem__(self, number: int) -> torch.Tensor:
        return decoded(super().__getitem__(number).numpy().tobytes())


def decoded(jpeg: bytes) -> torch.Tensor:
    """Return an image as a tensor of uint8."""
    return torch.from_numpy(numpy.array(Image.open(io.BytesIO(jpeg))))


def ours(directory: str, batch: int, transform: Callable[[Any], Any] | None = None) -> Iterator[torch.Tensor]:
    with DataLoader(SampleDataset(directory), batch, shuffle=True, seed=1, prefetch=AHEAD, transform=transform) as loader:
        for found in loader:
            yield found if transform else found["image"]


def ours_in_torchs_loader(directory: str, batch: int) -> Iterator[torch.Tensor]:
    dataset = SampleDataset(directory)
    for found in TorchLoader(dataset, batch, sampler=EpochSampler(dataset, seed=1), num_workers=2, prefetch_factor=AHEAD):
        yield found["image"]


def pread_threads(directory: str, batch: int) -> Iterator[torch.Tensor]:
    """What one writes by hand: 16 threads, a batch's memory made by torch, some batches ahead."""
    samples = RawSamples(directory)
    size = len(samples[0])
    order = iter(torch.randperm(len(samples)).split(batch))
    queue: deque[tuple[torch.Tensor, list[Any]]] = deque()
    with ThreadPoolExecutor(16) as threads:
        try:
            while True:
                while len(queue) < AHEAD and (numbers := next(order, None)) is not None:
                    rows = torch.empty(len(numbers), size, dtype=torch.uint8)
                    reads = [threads.submit(samples.read_into, *each) for each in zip(numbers.tolist(), rows, strict=True)]
                    queue.append((rows, reads))
                if not queue:
                    return
                rows, reads = queue.popleft()
                for read in reads:
                    read.result()
                yield rows
        finally:
            threads.shutdown(cancel_futures=True)


def torchs_loader(samples: Dataset[torch.Tensor], batch: int, workers: int) -> Iterator[torch.Tensor]:
    yield from TorchLoader(samples, batch, shuffle=True, num_workers=workers, prefetch_factor=AHEAD if workers else None)


def spdl_pipeline(directory: str, batch: int) -> Iterator[torch.Tensor]:
    """As pread_threads, by spdl's pipeline."""
    from spdl.pipeline import PipelineBuilder

    samples = RawSamples(directory)
    order = torch.randperm(len(samples)).tolist()
    builder = PipelineBuilder().add_source(iter(order)).pipe(samples.__getitem__, concurrency=16, output_order="completion")
    pipeline = builder.aggregate(batch).pipe(torch.stack).add_sink(AHEAD).build(num_threads=16)
    with pipeline.auto_stop():
        yield from pipeline


def decoding_alone(directory: str, batch: int) -> Iterator[list[torch.Tensor]]:
    """As many threads as processors decode what is in memory. Nothing is collated."""
    samples = RawSamples(directory)
    jpegs = [samples[number].numpy().tobytes() for number in range(min(256, len(samples)))]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        while True:
            yield list(threads.map(decoded, (jpegs * (batch // len(jpegs) + 1))[:batch]))


def token_windows(path: str, batch: int) -> Iterator[torch.Tensor]:
    with DataLoader(TokenDataset(path, torch.int16, TOKENS, stride=1), batch, shuffle=True, seed=1, prefetch=AHEAD) as loader:
        for found in loader:
            yield found.long()


def mapped_windows(path: str, batch: int) -> Iterator[torch.Tensor]:
    """As nanoGPT does."""
    while True:
        tokens = numpy.memmap(path, dtype=numpy.int16, mode="r")
        starts = torch.randint(len(tokens) - TOKENS, (batch,))
        yield torch.stack([torch.from_numpy(tokens[start : start + TOKENS].astype(numpy.int64)) for start in starts.tolist()])


WORKERS = (0, 1, 2, 4, 8)
Contender = Callable[[str, int], Iterator[Any]]


def _of_torch(samples: Callable[[str], Dataset[torch.Tensor]]) -> dict[str, Contender]:
    def with_workers(workers: int) -> Contender:
        return lambda directory, batch: torchs_loader(samples(directory), batch, workers)

    return {f"torch's loader, {workers} workers": with_workers(workers) for workers in WORKERS}


def _of_format(other: Format) -> Contender:
    return lambda directory, batch: other.read(Path(directory).with_name(other.folder), batch)


CONTENDERS: dict[str, dict[str, Contender]] = {
    "samples": {
        "deepnvme": ours,
        "deepnvme in torch's loader, 2 workers": ours_in_torchs_loader,
        "preadv in 16 threads": pread_threads,
        **_of_torch(RawSamples),
        "spdl": spdl_pipeline,
        **{name: _of_format(other) for name, other in FORMATS.items()},
    },
    "jpeg": {
        "deepnvme": lambda directory, batch: ours(directory, batch, lambda sample: decoded(sample["image"])),
        "decoding alone": decoding_alone,
        **_of_torch(DecodedImages),
    },
    "tokens": {"deepnvme": token_windows, "np.memmap": mapped_windows},
}


def cpu_seconds() -> float:
    """Of this process, and of workers that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def jpegs(count: int) -> list[bytes]:
    """Pictures with large and small structures, of about 156 KB."""
    random, found = numpy.random.default_rng(0), []
    for _ in range(count):
        picture = sum(
            numpy.kron(random.normal(0, 110 / scale**0.5, (SIDE // scale, SIDE // scale, 3)), numpy.ones((scale, scale, 1)))
            for scale in (4, 16, 64)
        )
        out = io.BytesIO()
        Image.fromarray((picture + 128).clip(0, 255).astype(numpy.uint8)).save(out, "JPEG", quality=90)
        found.append(out.getvalue())
    return found


class Worker:
    """Writes samples, and reads them in one epoch's order."""

    def describe(self) -> dict[str, Any]:
        return {"torch": torch.__version__}

    def write(self, *, directory: str, size: int, count: int) -> dict[str, Any]:
        image = torch.randint(0, 256, (size,), dtype=torch.uint8)
        with SampleWriter(directory, {"image": (torch.uint8, (size,))}) as writer:
            for number in range(count):
                image[:8] = torch.tensor([number]).view(torch.uint8)
                writer.append(image=image)
        return {}

    def write_other(self, *, name: str, directory: str, size: int, count: int) -> dict[str, Any]:
        """Write the same samples in another package's format, unless they are there."""
        folder = Path(directory).with_name(FORMATS[name].folder)
        if not folder.exists():
            folder.mkdir()
            FORMATS[name].write(folder, (number.to_bytes(8, "little") + bytes(size - 8) for number in range(count)), size)
        return {}

    def write_jpegs(self, *, directory: str, nbytes: int) -> dict[str, Any]:
        pictures, written, number = jpegs(64), 0, 0
        with SampleWriter(directory, {"image": "bytes"}) as writer:
            while written < nbytes:
                writer.append(image=pictures[number % len(pictures)])
                written += len(pictures[number % len(pictures)])
                number += 1
        return {}

    def read(self, *, kind: str, contender: str, path: str, batch: int, seconds: float) -> dict[str, Any]:
        """Read batches for some time, or one epoch. No number comes twice."""
        seen: list[torch.Tensor] = []
        cpu, begun = cpu_seconds(), time.perf_counter()
        batches = CONTENDERS[kind][contender](path, batch)
        first, samples = 0.0, 0
        for found in batches:
            samples += len(found)
            if kind == "samples":
                seen.append(found[:, :8].clone())
            first = first or time.perf_counter() - begun
            taken = time.perf_counter() - begun
            if taken - first >= seconds:
                break
        batches.close()  # type: ignore[attr-defined]
        cpu = cpu_seconds() - cpu
        if seen:
            numbers = torch.cat(seen).view(torch.int64).flatten()
            if len(numbers.unique()) != len(numbers):
                raise ValueError("a sample came twice")
        rate = (samples - batch) / (taken - first) if taken > first else samples / taken  # without the start of workers
        return {"samples": samples, "rate": rate, "seconds": taken, "cpu_seconds": cpu, "first_batch": first}


if __name__ == "__main__":
    serve(Worker, ("write", "write_other", "write_jpegs", "read"), int(sys.argv[1]), int(sys.argv[2]))
