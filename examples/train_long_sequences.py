"""Train a small GPT on long sequences, with its activations kept in five ways: how much memory each takes, and how long.

    python examples/train_long_sequences.py [--dir DIR] [--tokens N] [--layers N] [--budget MIB] [--plot FILE]

A forward saves activations for the backward, in proportion to the length of the sequence, and soon they are most of what is in
memory. The losses of all ways are compared. Files go to a temporary directory under DIR (default: the current directory).
"""

import argparse
import contextlib
import ctypes
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import deepnvme

ALPHABET = "0123456789+= \n"
MIB = 1 << 20
M_MMAP_THRESHOLD = -3  # of mallopt(3)


# -- the model, and what it learns -------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.before_attention, self.before_mlp = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            each.view(batch, length, self.heads, -1).transpose(1, 2)
            for each in self.qkv(self.before_attention(x)).split(width, dim=2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(torch.nn.Module):
    def __init__(self, width: int, layers: int, tokens: int, checkpointed: bool) -> None:
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(len(ALPHABET), width), torch.nn.Embedding(tokens, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, len(ALPHABET), bias=False)
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


def text(numbers: random.Random, length: int) -> str:
    """Return sums, one on each line."""
    lines: list[str] = []
    while sum(map(len, lines)) < length:
        a, b = numbers.randrange(100), numbers.randrange(100)
        lines.append(f"{a} + {b} = {a + b}\n")
    return "".join(lines)[:length]


def sequence_of(numbers: random.Random, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sequence of tokens, and for each the token that follows it."""
    sequence = torch.tensor([[ALPHABET.index(letter) for letter in text(numbers, tokens + 1)]])
    return sequence[:, :-1], sequence[:, 1:]


# -- ways to keep activations, and training ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One of the ways. ``context``: what the forward runs in."""

    name: str
    checkpointed: bool
    context: contextlib.AbstractContextManager


@dataclass
class Training:
    """Results of one training. ``memory``: of each step, many times in seconds with the bytes beyond model and gradients."""

    losses: list[float] = field(default_factory=list)
    memory: list[list[tuple[float, int]]] = field(default_factory=list)
    bytes_written: int = 0

    @property
    def peak(self) -> int:
        return max(nbytes for samples in self.memory for _, nbytes in samples)

    @property
    def step_seconds(self) -> list[float]:
        return [samples[-1][0] for samples in self.memory]

    @property
    def fastest(self) -> list[tuple[float, int]]:
        """Memory over the fastest step. The others may have shared the machine; the first is slow, since everything is new."""
        return min(self.memory, key=lambda samples: samples[-1][0])


@contextlib.contextmanager
def each_way(arguments: argparse.Namespace, directory: Path) -> Iterator[list[Way]]:
    """Provide the five ways. Both that use the drive have files of their own, which are removed in the end."""
    budget = arguments.budget * MIB
    with (
        contextlib.closing(deepnvme.save_on_disk(directory / "all", memory_budget=budget)) as on_disk,
        contextlib.closing(deepnvme.save_on_disk(directory / "checkpoints", memory_budget=0)) as checkpoints_on_disk,
    ):
        yield [
            Way("in memory", False, contextlib.nullcontext()),
            Way("save_on_cpu", False, save_on_cpu(pin_memory=True)),
            Way("checkpointing", True, contextlib.nullcontext()),
            Way("save_on_disk", False, on_disk),
            Way("checkpoints on disk", True, checkpoints_on_disk),
        ]


def train(arguments: argparse.Namespace, way: Way, progress: Progress) -> Training:
    torch.manual_seed(0)
    model = GPT(arguments.width, arguments.layers, arguments.tokens, way.checkpointed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    numbers = random.Random(0)
    task = progress.add_task(way.name, total=arguments.steps)
    training, before = Training(), resident()
    for _ in range(arguments.steps):
        tokens, following = sequence_of(numbers, arguments.tokens)
        with watching_memory(before) as memory:
            with way.context:
                loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        training.memory.append(memory)
        training.losses.append(loss.item())
        progress.advance(task)
    if isinstance(way.context, deepnvme.save_on_disk):
        report = way.context.report()
        training.bytes_written = report.bytes_written
        progress.console.print(report.line(), highlight=False)
    return training


# -- memory ------------------------------------------------------------------------------------------------------------


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    return next(
        int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:")
    )


@contextlib.contextmanager
def watching_memory(before: int) -> Iterator[list[tuple[float, int]]]:
    """Provide a list that gets a time and the bytes beyond ``before``, every few milliseconds and at the end of the block."""
    samples: list[tuple[float, int]] = []
    begin, over = time.perf_counter(), threading.Event()

    def watch() -> None:
        while True:
            samples.append((time.perf_counter() - begin, max(0, resident() - before)))
            if over.is_set():
                return
            over.wait(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield samples
    finally:
        over.set()
        watcher.join()


def plot(trainings: dict[str, Training], path: Path) -> None:
    """Draw memory over the fastest step of each training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for name, training in trainings.items():
        seconds, nbytes = zip(*training.fastest, strict=True)
        axes.plot(seconds, [each / MIB for each in nbytes], label=name, linewidth=1.3)
    axes.set(xlabel="seconds of a step", ylabel="MiB beyond model and gradients", xlim=0, ylim=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100)


# -- the command line --------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the drive to use")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the sequence (default: 2048)")
    parser.add_argument("--width", type=int, default=256, help="width of the model, a multiple of 64 (default: 256)")
    parser.add_argument("--layers", type=int, default=16, help="layers of the model (default: 16)")
    parser.add_argument("--steps", type=int, default=3, help="training steps of each way (default: 3)")
    parser.add_argument("--budget", type=int, default=128, help="MiB that save_on_disk keeps in memory (default: 128)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw memory over a step there; needs matplotlib")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"other processes use this machine (load {load:.1f}): the times will vary", file=sys.stderr)
    # What is freed is to leave the process, so that its memory shows what is in use. By default glibc keeps much of it.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    console = Console()
    small = argparse.Namespace(**{**vars(arguments), "tokens": 64, "layers": 1, "steps": 1})
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        # What is loaded at the first use of anything, code above all, is to count for none of the ways.
        with each_way(small, Path(directory) / "small") as ways:
            for way in ways:
                train(small, way, Progress(console=Console(quiet=True)))
        with each_way(arguments, Path(directory) / "large") as ways, Progress(console=console) as progress:
            trainings = {way.name: train(arguments, way, progress) for way in ways}

    columns = ("peak\nMiB", "s/step, median\n(of all)", "MB\nwritten", "first\nloss", "last\nloss")
    table = Table("", *columns, title="Memory beyond model and gradients")
    for name, training in trainings.items():
        of_all = training.step_seconds
        seconds = f"{statistics.median(of_all):.2f} ({min(of_all):.2f}-{max(of_all):.2f})"
        first, last = (f"{training.losses[index]:.4f}" for index in (0, -1))
        table.add_row(name, f"{training.peak / MIB:.0f}", seconds, f"{training.bytes_written / 1e6:.0f}", first, last)
    console.print(table)
    if arguments.plot:
        plot(trainings, arguments.plot)
    expected = trainings["in memory"].losses
    for name, training in trainings.items():
        if training.losses != expected:
            raise SystemExit(f"the losses differ: {expected} in memory, {training.losses} with {name}")
    console.print(f"{arguments.steps} losses, every one the same in all ways")


if __name__ == "__main__":
    main()
