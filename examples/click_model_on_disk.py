"""Train a model of clicks whose embedding tables exceed the memory that they are given: the losses that it has in memory.

    python examples/click_model_on_disk.py [--rows N] [--width N] [--budget-mib MIB] [--steps N] [--batch N] [--plot FILE]
                                           [--dir DIR]

A small model in the way of DLRM: eight tables of categories, of which each example has a few, dense features, and what predicts
whether there is a click. The data are made here; which categories occur is Zipf-distributed, as in real ones. The same training
follows in memory, for comparison. Files go to a temporary directory under DIR (default: the current directory).
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as PrintedTable

from deepnvme.nn import EmbeddingBagOnDisk
from deepnvme.tables import Lookahead, RowOptimizer

MIB = 1 << 20
STAGING = 48 * MIB  # pinned memory for rows on their way, of all tables together
TABLES, OF_EACH, DENSE = 8, 4, 13  # of each table an example has four categories
EXPONENT = 1.05
EVERY = 10  # steps between the points of the plot

Batch = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]


class Clicks(torch.nn.Module):
    """Sums of embeddings, what dense features say, how these fit one another, and a prediction."""

    def __init__(self, bags: list[torch.nn.Module], width: int) -> None:
        super().__init__()
        self.bags = torch.nn.ModuleList(bags)
        self.bottom = torch.nn.Sequential(torch.nn.Linear(DENSE, 64), torch.nn.ReLU(), torch.nn.Linear(64, width))
        pairs = (TABLES + 1) * TABLES // 2
        self.top = torch.nn.Sequential(torch.nn.Linear(width + pairs, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def forward(self, ids: list[torch.Tensor], dense: torch.Tensor) -> torch.Tensor:
        first = self.bottom(dense)
        parts = torch.stack([first, *(bag(each) for bag, each in zip(self.bags, ids, strict=True))], dim=1)
        fits = parts @ parts.mT / parts.shape[2] ** 0.5
        upper = torch.triu_indices(TABLES + 1, TABLES + 1, offset=1)
        return self.top(torch.cat([first, fits[:, upper[0], upper[1]]], dim=1)).squeeze(1)


class Data:
    """Batches of examples, the same each time. Whether there is a click depends on the categories and the dense features."""

    def __init__(self, rows: int, batch: int, steps: int) -> None:
        self._rows, self._batch, self._steps = rows, batch, steps
        weights = torch.arange(1, rows + 1, dtype=torch.float64).pow(-EXPONENT)
        self._cumulative = weights.cumsum(0) / weights.sum()
        # What is frequent is anywhere in the table.
        self._names = torch.randperm(rows, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(2)
        for _ in range(self._steps):
            drawn = torch.rand(TABLES, self._batch, OF_EACH, dtype=torch.float64, generator=generator)
            ranks = torch.searchsorted(self._cumulative, drawn).clamp_(max=self._rows - 1)
            dense = torch.randn(self._batch, DENSE, generator=generator)
            score = (ranks % 7 == 0).float().sum(dim=(0, 2)) - 4 + dense[:, 0]
            clicks = (torch.rand(self._batch, generator=generator) < torch.sigmoid(score)).float()
            yield list(self._names[ranks]), dense, clicks


@dataclass
class Result:
    """What a training did, every few steps. ``ends``: the time at its begin, and at the end of each step."""

    losses: list[float] = field(default_factory=list)
    hit_rates: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=lambda: [time.perf_counter()])
    seconds: float = 0.0

    def step(self) -> str:
        """Return the median of the milliseconds of a step, and the least and the most."""
        each = [1e3 * (end - begin) for begin, end in itertools.pairwise(self.ends)]
        return f"{statistics.median(each):.0f} ({min(each):.0f}-{max(each):.0f})"


def model_of(bags: list[torch.nn.Module], width: int) -> Clicks:
    torch.manual_seed(3)
    return Clicks(bags, width)


def train_on_disk(given: argparse.Namespace, directory: Path, progress: Progress) -> Result:
    torch.manual_seed(0)
    budget, staging = given.budget_mib * MIB // TABLES, STAGING // TABLES
    bags: list[torch.nn.Module] = [
        EmbeddingBagOnDisk(
            given.rows,
            given.width,
            mode="sum",
            path=directory / f"table{number}",
            optimizer=torch.optim.SparseAdam,
            memory_budget=budget,
            staging_bytes=staging,
        )
        for number in range(TABLES)
    ]
    model = model_of(bags, given.width)
    rows, others = RowOptimizer(model, lr=1e-3), torch.optim.AdamW(model.parameters(), lr=1e-3)
    result = Result()
    task = progress.add_task("on the drive", total=given.steps, loss="")
    begun = time.perf_counter()
    data = Data(given.rows, given.batch, given.steps)
    read_before = asked = 0
    for step, (ids, dense, clicks) in enumerate(Lookahead(data, lambda batch: dict(zip(bags, batch[0], strict=True)))):
        asked += sum(each.unique().numel() for each in ids)
        loss = F.binary_cross_entropy_with_logits(model(ids, dense), clicks)
        loss.backward()
        for optimizer in (rows, others):
            optimizer.step()
            optimizer.zero_grad()
        result.ends.append(time.perf_counter())
        if step % EVERY == 0 or step == given.steps - 1:
            read = sum(bag.table.stats().rows_read for bag in bags)
            result.losses.append(loss.item())
            result.hit_rates.append(max(1 - (read - read_before) / asked, 0))  # the first step also reads ahead for the second
            read_before, asked = read, 0
        in_memory = f"{100 * result.hit_rates[-1]:.0f} % of rows were in memory"
        progress.update(task, advance=1, loss=f"loss {loss.item():.4f}, {in_memory}")
    rows.commit({"steps": given.steps})
    result.seconds = time.perf_counter() - begun
    for bag in bags:
        bag.table.close()
    return result


def train_in_memory(given: argparse.Namespace, progress: Progress) -> Result:
    torch.manual_seed(0)
    bags: list[torch.nn.Module] = [torch.nn.EmbeddingBag(given.rows, given.width, mode="sum", sparse=True) for _ in range(TABLES)]
    model = model_of(bags, given.width)
    sparse = [bag.weight for bag in bags]
    dense_parameters = [each for name, each in model.named_parameters() if not name.startswith("bags.")]
    optimizers = [torch.optim.SparseAdam(sparse, lr=1e-3), torch.optim.AdamW(dense_parameters, lr=1e-3)]
    result = Result()
    task = progress.add_task("in memory", total=given.steps, loss="")
    begun = time.perf_counter()
    for step, (ids, dense, clicks) in enumerate(Data(given.rows, given.batch, given.steps)):
        loss = F.binary_cross_entropy_with_logits(model(ids, dense), clicks)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        result.ends.append(time.perf_counter())
        if step % EVERY == 0 or step == given.steps - 1:
            result.losses.append(loss.item())
        progress.update(task, advance=1, loss=f"loss {loss.item():.4f}")
    result.seconds = time.perf_counter() - begun
    return result


def plot(path: Path, on_disk: Result, in_memory: Result) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), layout="constrained")
    steps = [EVERY * index for index in range(len(on_disk.losses))]
    above.plot(steps, in_memory.losses, color="0.7", linewidth=4, label="in memory")
    above.plot(steps, on_disk.losses, color="C0", linewidth=1.5, label="on the drive")
    above.set_ylabel("loss")
    above.legend()
    below.plot(steps, [100 * each for each in on_disk.hit_rates], color="C1")
    below.set_ylabel("rows in memory, %")
    below.set_ylim(0, 100)
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=500_000, help="of each of the eight tables (default: 500000)")
    parser.add_argument("--width", type=int, default=32, help="of a row, in floats (default: 32)")
    parser.add_argument("--budget-mib", type=int, help="memory for rows and states (default: a tenth of what they are)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture of losses and hit rates, such as clicks.png")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the drive (default: the current one)")
    given = parser.parse_args()
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"other processes use this machine (load {load:.1f}): the times will vary", file=sys.stderr)
    whole = TABLES * given.rows * given.width * 3 * 4  # with SparseAdam's two states
    given.budget_mib = given.budget_mib or max(whole // 10 // MIB, 8)
    console = Console()
    states = f"{whole / MIB:.0f} MiB with their states"
    console.print(f"{TABLES} tables of {given.rows} rows: {states}, {given.budget_mib} MiB of memory")
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}")]
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        with tempfile.TemporaryDirectory(prefix="clicks-", dir=given.dir) as directory:
            on_disk = train_on_disk(given, Path(directory), progress)
        in_memory = train_in_memory(given, progress)
    printed = PrintedTable("", "seconds", "ms/step, median\n(of all)", "first\nloss", "last\nloss", "rows in\nmemory")
    hit_rate = f"{100 * on_disk.hit_rates[-1]:.0f} %"
    for name, result, rate in (("on the drive", on_disk, hit_rate), ("in memory", in_memory, "100 %")):
        losses = (f"{result.losses[index]:.6f}" for index in (0, -1))
        printed.add_row(name, f"{result.seconds:.1f}", result.step(), *losses, rate)
    console.print(printed)
    same = on_disk.losses == in_memory.losses
    console.print("The losses have the same bits." if same else "The losses differ.")
    if given.plot:
        plot(given.plot, on_disk, in_memory)
        console.print(f"{given.plot}: losses and hit rates")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
