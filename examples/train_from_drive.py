"""Train an image classifier on JPEGs that are read from the drive in random order, and stop and resume in the middle of an epoch.

    python examples/train_from_drive.py [--dir DIR] [--images N] [--memory SIZE] [--plot FILE]

The images are made here: circles, squares and stripes on noise. They are more than the loader's memory. Training that is stopped
and resumed has the same losses as training that is not, bit for bit. torch's DataLoader reads the same images from files, with
worker processes. Files go to a temporary directory under DIR (default: the current directory). Needs pillow.
"""

import argparse
import io
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from deepnvme.data import DataLoader, SampleDataset, SampleWriter

SIDE = 160
KINDS = 3


# -- the images --------------------------------------------------------------------------------------------------------


def image(number: int) -> bytes:
    """Return a JPEG with a circle, a square or stripes, by ``number % KINDS``."""
    from PIL import Image

    torch.manual_seed(number)
    x, y, size = (torch.rand(3) * torch.tensor([SIDE, SIDE, SIDE / 4]) + torch.tensor([0, 0, SIDE / 8])).tolist()
    across, down = torch.meshgrid(torch.arange(SIDE) - x, torch.arange(SIDE) - y, indexing="ij")
    shapes = (across**2 + down**2 < size**2, (across.abs() < size) & (down.abs() < size), (across / size).floor() % 2 == 0)
    pixels = torch.randint(0, 156, (SIDE, SIDE, 3)) + 100 * shapes[number % KINDS][..., None]
    data = io.BytesIO()
    Image.frombytes("RGB", (SIDE, SIDE), pixels.to(torch.uint8).numpy().tobytes()).save(data, "JPEG", quality=90)
    return data.getvalue()


def decode(jpeg: bytes) -> torch.Tensor:
    """Return an image, smaller, as float32 of shape (3, SIDE / 4, SIDE / 4). Pillow releases the GIL meanwhile."""
    from PIL import Image

    picture = Image.open(io.BytesIO(jpeg)).resize((SIDE // 4, SIDE // 4))
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return pixels.view(SIDE // 4, SIDE // 4, 3).permute(2, 0, 1) / 255


def transform(sample: dict) -> tuple[torch.Tensor, torch.Tensor]:
    return decode(sample["image"]), sample["label"]


class Files(torch.utils.data.Dataset):
    """The same images, each in a file: what torch's DataLoader gets."""

    def __init__(self, directory: Path) -> None:
        self.paths = sorted(directory.iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return decode(self.paths[number].read_bytes()), torch.tensor(number % KINDS)


def write(directory: Path, count: int, progress: Progress) -> int:
    """Write all images twice, as samples and as files. Returns the bytes of all."""
    (directory / "files").mkdir()
    written = 0
    with SampleWriter(directory / "samples", {"image": "bytes", "label": torch.int64}) as writer:
        for number in progress.track(range(count), description="making images"):
            jpeg = image(number)
            writer.append(image=jpeg, label=number % KINDS)
            (directory / "files" / f"{number:08}.jpg").write_bytes(jpeg)
            written += len(jpeg)
    os.sync()
    return written


# -- training ----------------------------------------------------------------------------------------------------------


class Classifier:
    """A small network and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 5, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 5, stride=2), torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(256, KINDS),
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        loss = torch.nn.functional.cross_entropy(self.net(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@dataclass
class Epoch:
    """What an epoch took."""

    losses: list[float] = field(default_factory=list)
    images: int = 0
    waited: list[float] = field(default_factory=list)
    """Seconds of each step in which the training waited for its batch."""
    ended: list[float] = field(default_factory=list)
    """When each step ended, in seconds from the start."""


def train(classifier: Classifier, batches: Iterable, epoch: Epoch, progress: Progress, task: TaskID) -> None:
    """Train with these batches, and note losses and times."""
    begun = asked = time.perf_counter()
    for images, labels in batches:
        epoch.waited.append(time.perf_counter() - asked)
        epoch.losses.append(classifier.step(images, labels))
        epoch.images += len(images)
        asked = time.perf_counter()
        epoch.ended.append(asked - begun)
        progress.update(task, advance=len(images))


def resumed(directory: Path, options: dict, progress: Progress, task: TaskID) -> list[float]:
    """Train half an epoch, save, and train the rest with new objects from what was saved. Returns all losses."""
    path, epoch = directory / "checkpoint.pt", Epoch()
    with DataLoader(SampleDataset(directory / "samples"), **options) as loader:
        classifier = Classifier()
        train(classifier, islice(loader, len(loader) // 2), epoch, progress, task)
        state = {"net": classifier.net.state_dict(), "optimizer": classifier.optimizer.state_dict()}
        torch.save({**state, "loader": loader.state_dict()}, path)
    with DataLoader(SampleDataset(directory / "samples"), **options) as loader:
        saved, classifier = torch.load(path), Classifier()
        classifier.net.load_state_dict(saved["net"])
        classifier.optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        train(classifier, loader, epoch, progress, task)
    return epoch.losses


def plot(path: Path, epochs: dict[str, Epoch]) -> None:
    """Draw images a second and waits over the time of each epoch."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), layout="constrained")
    for name, epoch in epochs.items():
        each = epoch.images / len(epoch.ended)
        above.plot(epoch.ended, [(step + 1) * each / end for step, end in enumerate(epoch.ended)], label=name)
        below.plot(epoch.ended, torch.tensor(epoch.waited).cumsum(0), label=name)
    above.set_ylabel("images/s so far")
    above.legend()
    below.set_ylabel("seconds waited")
    below.set_xlabel("seconds")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--memory", default="16MiB", help="the loader's memory (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="of torch's DataLoader (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture of images/s and waits, such as images.png")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the drive (default: the current one)")
    given = parser.parse_args()
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"other processes use this machine (load {load:.1f}): the times will vary", file=sys.stderr)
    console = Console()
    options = {"batch_size": given.batch, "shuffle": True, "seed": 1, "transform": transform, "memory_budget": given.memory}
    ours, theirs = Epoch(), Epoch()
    with tempfile.TemporaryDirectory(prefix="images-", dir=given.dir) as name, Progress(console=console) as progress:
        nbytes = write(Path(name), given.images, progress)
        with DataLoader(SampleDataset(Path(name, "samples")), **options) as loader:
            train(Classifier(), loader, ours, progress, progress.add_task("deepnvme", total=given.images))
            limit = loader.stats().limit
        losses = resumed(Path(name), options, progress, progress.add_task("stopped and resumed", total=given.images))
        files = torch.utils.data.DataLoader(Files(Path(name, "files")), given.batch, True, num_workers=given.workers)
        train(Classifier(), files, theirs, progress, progress.add_task("torch's DataLoader", total=given.images))
    each, total = nbytes / given.images / 1000, nbytes / 1e6
    console.print(f"{given.images} images of {each:.0f} KB: {total:.0f} MB; memory: {given.memory}")
    table = Table("", "images/s", "time waited", "first batch, s")
    epochs = {"deepnvme": ours, f"torch's DataLoader, {given.workers} workers": theirs}
    for who, epoch in epochs.items():
        share = f"{100 * sum(epoch.waited) / epoch.ended[-1]:.0f} %"
        table.add_row(who, f"{epoch.images / epoch.ended[-1]:.0f}", share, f"{epoch.waited[0]:.3f}")
    console.print(table)
    console.print(f"The speed depends on: {limit}")
    same = losses == ours.losses
    console.print("Stopped and resumed, the losses have the same bits." if same else "Stopped and resumed, the losses differ.")
    if given.plot:
        plot(given.plot, epochs)
        console.print(f"{given.plot}: images a second, and waits")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
