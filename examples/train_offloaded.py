"""Train a small GPT with its optimizer's states on the drive, and in memory: the same losses, in less memory.

    python examples/train_offloaded.py [--dir DIR] [--width N] [--layers N] [--steps N] [--processes N]

Its text is sums, which it makes itself: "37 + 5 = 42". With ``--processes 2`` it runs under torchrun, and FSDP2 shards the model;
each rank then keeps the states of its own shard. Files go to a temporary directory under DIR (default: the current directory).
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import deepnvme

ALPHABET = "0123456789+= \n"
CONTEXT = 64
MIB = 1 << 20


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
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(len(ALPHABET), width), torch.nn.Embedding(CONTEXT, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, len(ALPHABET), bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text(numbers: random.Random, length: int) -> str:
    """Return sums, one on each line."""
    lines = ""
    while len(lines) < length:
        a, b = numbers.randrange(100), numbers.randrange(100)
        lines += f"{a} + {b} = {a + b}\n"
    return lines[:length]


def batch_of(numbers: random.Random, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens, and for each the token that follows it."""
    tokens = torch.tensor([[ALPHABET.index(letter) for letter in text(numbers, CONTEXT + 1)] for _ in range(rows)])
    return tokens[:, :-1], tokens[:, 1:]


# -- training ----------------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """Results of one training. ``peak``: most bytes of memory beyond the weights; None where the kernel does not say."""

    losses: list[float]
    step_seconds: list[float]
    peak: int | None


def train(arguments: argparse.Namespace, path: Path | None, progress: Progress) -> Training:
    """Train with states and gradients on the drive or, with ``path=None``, in memory."""
    torch.manual_seed(0)
    model = GPT(arguments.width, arguments.layers)
    if dist.is_initialized():
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    parameters = list(model.parameters())

    before = reset_peak()
    optimizer = in_memory(parameters) if path is None else offloaded(parameters, path)
    task = progress.add_task("in memory" if path is None else "on the drive", total=arguments.steps)
    numbers = random.Random(rank())
    training = Training([], [], None)
    for _ in range(arguments.steps):
        tokens, following = batch_of(numbers, arguments.batch)
        begin = time.perf_counter()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        training.step_seconds.append(time.perf_counter() - begin)
        training.losses.append(mean_over_ranks(loss.detach()))
        progress.advance(task)
    if before is not None:
        training.peak = resident("VmHWM") - before
    if isinstance(optimizer, deepnvme.OffloadedOptimizer):
        progress.console.print(optimizer.report().line(), highlight=False)
        optimizer.close()
    return training


def in_memory(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def offloaded(parameters: list[torch.nn.Parameter], path: Path) -> deepnvme.OffloadedOptimizer:
    elements = sum(local(parameter).numel() for parameter in parameters)
    return deepnvme.OffloadedOptimizer(
        parameters,
        torch.optim.AdamW,
        path=path,
        memory_budget=elements * 8 // 4,  # a quarter of the states: AdamW's two averages, in float32
        sub_group_size=max(1024, elements // 32),
        offload_gradients=True,
        lr=1e-3,
        fused=True,
    )


# -- this process, and the others --------------------------------------------------------------------------------------


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def mean_over_ranks(value: torch.Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def resident(field: str) -> int:
    """Return this process's resident bytes: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def reset_peak() -> int | None:
    """Reset VmHWM. Return the bytes resident now, or None where the kernel refuses."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return resident("VmRSS")


def under_torchrun(processes: int) -> None:
    """Replace this process by torchrun, which starts this program once for each rank."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the drive to use")
    parser.add_argument("--width", type=int, default=512, help="width of the model, a multiple of 64 (default: 512)")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (default: 8, which make 25 M parameters)")
    parser.add_argument("--batch", type=int, default=4, help="lines of text in a step, for each process (default: 4)")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: 20)")
    parser.add_argument("--processes", type=int, default=1, help="ranks that FSDP2 shards the model over (default: 1)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.processes > 1:
        if not dist.is_torchelastic_launched():
            under_torchrun(arguments.processes)
        dist.init_process_group("gloo")
    console = Console(quiet=rank() != 0)
    if (load := os.getloadavg()[0]) > 0.5 and rank() == 0:
        print(f"other processes use this machine (load {load:.1f}): the times will vary", file=sys.stderr)
    small = argparse.Namespace(**{**vars(arguments), "width": 64, "layers": 1, "steps": 2})
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        # What is loaded at the first use of anything, code above all, is to count for neither training.
        for path in (Path(directory), None):
            train(small, path, Progress(console=Console(quiet=True)))
        with Progress(console=console) as progress:
            on_drive, plain = train(arguments, Path(directory), progress), train(arguments, None, progress)

    table = Table("", "first\nloss", "last\nloss", "s/step, median\n(of all)", "peak MiB beyond\nthe weights")
    for name, training in (("in memory", plain), ("on the drive", on_drive)):
        peak = "-" if training.peak is None else f"{training.peak / MIB:.0f}"
        of_all = training.step_seconds
        seconds = f"{statistics.median(of_all):.3f} ({min(of_all):.3f} to {max(of_all):.3f})"
        table.add_row(name, f"{training.losses[0]:.4f}", f"{training.losses[-1]:.4f}", seconds, peak)
    console.print(table)
    if dist.is_initialized():
        dist.destroy_process_group()
    if on_drive.losses != plain.losses:
        step = next(i for i, pair in enumerate(zip(plain.losses, on_drive.losses, strict=True)) if pair[0] != pair[1])
        raise SystemExit(
            f"step {step + 1}: the losses differ, {plain.losses[step]!r} in memory, {on_drive.losses[step]!r} on the drive"
        )
    console.print(f"{arguments.steps} losses, every one the same")


if __name__ == "__main__":
    main()
