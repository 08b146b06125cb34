"""How many accelerators one drive keeps busy: samples and compute times of MLPerf Storage, modelled.

    python benchmarks/accelerators.py --dir /mnt/nvme --json accelerators.json

This is not MLPerf Storage, and its figures are none of that benchmark: it takes the bytes of a sample, the batch size and the
compute time of its workloads, and nothing else. Samples are bytes that are not decoded. A step of N accelerators takes N batches,
and then sleeps for the compute time of one. Utilisation is the share of the time that is slept; the largest N with 90 % counts.
Each measurement reads samples that are not cached, in random order, at most once: unet3d needs some 40 GB.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from harness import drive
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.documents import document
from harness.sample_worker import RawSamples, Worker, file_of
from harness.tables import table
from torch.utils.data import DataLoader as TorchLoader

from deepnvme.data import DataLoader, SampleDataset
from deepnvme.tools.tune.command_line import positive, size
from deepnvme.tools.tune.folder import drop_pages, settle

BUSY = 0.9
WORKERS = (1, 2, 4, 8)
"""Of torch's loader. The number that reads fastest counts."""


@dataclass(frozen=True)
class Model:
    """A workload of MLPerf Storage, on the accelerator that it is simulated for there."""

    nbytes: int
    batch: int
    compute_seconds: float


MODELS = {
    "resnet50, H100": Model(114_660, 400, 0.224),
    "retinanet, B200": Model(322_957, 24, 0.04755),
    "cosmoflow, H100": Model(2_828_486, 1, 0.0035),
    "unet3d, H100": Model(146_600_628, 7, 0.323),
}


@dataclass(frozen=True)
class Settings:
    """How much to measure."""

    directory: Path
    size: int
    rounds: int
    seconds: float
    quick: bool


@dataclass(frozen=True)
class Busy:
    """What one contender reaches."""

    samples_per_second: float
    """Without compute time."""
    accelerators: int
    utilisation: float
    """Of so many accelerators; of one, if that is not busy."""


Loader = Callable[[Path, int, int], Iterator[Any]]


def ours(path: Path, batch: int, accelerators: int) -> Iterator[Any]:
    dataset, ahead = SampleDataset(path), max(4, 2 * accelerators)
    budget = max(512 << 20, (ahead + 2) * batch * dataset[0]["image"].nbytes)
    with DataLoader(dataset, batch, shuffle=True, seed=1, prefetch=ahead, drop_last=True, memory_budget=budget) as loader:
        yield from loader


def torchs(workers: int) -> Loader:
    def load(path: Path, batch: int, accelerators: int) -> Iterator[Any]:
        ahead = max(2, -(-2 * accelerators // workers))
        yield from TorchLoader(
            RawSamples(str(path)), batch, shuffle=True, num_workers=workers, prefetch_factor=ahead, drop_last=True
        )

    return load


def step_times(batches: Iterator[Any], accelerators: int, compute: float, seconds: float) -> tuple[float, int]:
    """Return the time and the number of steps, without the first, which starts the loader; at most one epoch."""

    def take() -> bool:
        return all(next(batches, None) is not None for _ in range(accelerators))

    steps, began = 0, 0.0
    if take():
        time.sleep(compute)
        began = time.perf_counter()
        while time.perf_counter() - began < seconds and take():
            time.sleep(compute)
            steps += 1
    taken = time.perf_counter() - began
    batches.close()  # type: ignore[attr-defined]
    return taken, steps


def measured(load: Loader, model: Model, path: Path, accelerators: int, compute: float, settings: Settings) -> float:
    """Return the seconds of a step: the median of some rounds."""
    found = []
    for _ in range(settings.rounds):
        drop_pages([Path(file_of(str(path)))])
        settle(path.parent)
        taken, steps = step_times(load(path, model.batch, accelerators), accelerators, compute, settings.seconds)
        found.append(taken / steps if steps else float("inf"))
    return statistics.median(found)


def busy(load: Loader, model: Model, path: Path, settings: Settings) -> Busy:
    """Find how many accelerators stay busy: from the most that the rate allows, downwards."""
    rate = model.batch / measured(load, model, path, 1, 0.0, settings)
    accelerators = max(1, int(rate * model.compute_seconds / model.batch / BUSY))
    while True:
        utilisation = model.compute_seconds / measured(load, model, path, accelerators, model.compute_seconds, settings)
        if utilisation >= BUSY:
            return Busy(rate, accelerators, utilisation)
        if accelerators == 1:
            return Busy(rate, 0, utilisation)
        accelerators = max(1, min(accelerators - 1, int(accelerators * utilisation / BUSY)))


def measure(settings: Settings, progress: Progress) -> dict[str, dict[str, Busy]]:
    """Measure all models in directories below ``settings.directory``, which are removed."""
    found: dict[str, dict[str, Busy]] = {}
    for name, model in MODELS.items():
        if settings.quick:
            model = replace(model, nbytes=model.nbytes // 1000, compute_seconds=model.compute_seconds / 1000)
        with tempfile.TemporaryDirectory(prefix="accelerators-", dir=settings.directory) as directory:
            drive.check(Path(directory), settings.size)
            path = Path(directory) / "samples"
            progress(f"{name}: writing")
            count = max(settings.size // model.nbytes, 3 * model.batch)
            Worker().write(directory=str(path), size=model.nbytes, count=count)
            progress(f"{name}: torch's loader")
            numbers = WORKERS[:1] if settings.quick else WORKERS
            steps = {workers: measured(torchs(workers), model, path, 1, 0.0, settings) for workers in numbers}
            best = min(steps, key=lambda workers: steps[workers])
            found[name] = {f"torch's loader, {best} workers": busy(torchs(best), model, path, settings)}
            progress(f"{name}: deepnvme")
            found[name]["deepnvme"] = busy(ours, model, path, settings)
    return found


def as_table(found: dict[str, dict[str, Busy]]) -> str:
    rows = [
        [model, contender, f"{each.samples_per_second:.0f}", str(each.accelerators), f"{each.utilisation:.0%}"]
        for model, contenders in found.items()
        for contender, each in contenders.items()
    ]
    header = ["model", "loader", "samples/s", f"accelerators at {BUSY:.0%}", "utilisation"]
    return table("Simulated accelerators, modelled on MLPerf Storage's workloads", header, rows, left=2)


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=positive, help="measurements, of which the median counts (default: 1)")
    parser.add_argument("--size", type=size, help="bytes of the samples of a model (default: 5G)")
    parser.add_argument("--seconds", type=positive, help="how long a measurement takes at most (default: 2)")
    parser.add_argument("--quick", action="store_true", help="a trial of the benchmark itself: samples and times of a thousandth")
    given = parser.parse(arguments)
    settings = Settings(
        directory=given.dir,
        size=given.size or (1 << 20 if given.quick else 5 << 30),
        rounds=given.rounds or 1,
        seconds=given.seconds or (0.1 if given.quick else 2),
        quick=given.quick,
    )
    return settings, given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, json_path = parse_arguments(arguments)
    with measuring("accelerators") as started:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than processors may be the fastest
        found = measure(settings, print_step)
    print(as_table(found))
    figures = {model: {name: asdict(each) for name, each in contenders.items()} for model, contenders in found.items()}
    write_json(json_path, document("accelerators", started, settings, [], accelerators=figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
