"""Whether a model trains to the same bits with its activations on the drive as with all of them in memory."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import deepnvme
from deepnvme.tools.tune.figures import Spread
from harness.activation_models import GPT, Checkpointing, GPTShape
from harness.command_line import Progress
from harness.figures import Verdict

_SHAPE = {"width": 64, "layers": 3, "sequences": 4, "tokens": 32}
_CHECKPOINTING: tuple[tuple[Checkpointing, str], ...] = (
    ("none", "no checkpointing"),
    ("torch", "torch's checkpointing"),
)


@dataclass(frozen=True)
class Case:
    """How a model computes."""

    name: str
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    dropout: float = 0.0


CASES = (Case("fp32"), Case("bf16", torch.bfloat16), Case("autocast", autocast=True), Case("dropout", dropout=0.1))


@dataclass(frozen=True)
class Trained:
    """What comes out of a training. ``bytes_written``: the least that a step wrote to the drive; None in memory."""

    losses: torch.Tensor
    weights: list[torch.Tensor]
    bytes_written: int | None = None


def compare(directory: Path, steps: int, progress: Progress) -> Iterator[Verdict]:
    """Each case with and without checkpointing; the figure is how many values differ. Last, whether the drive took part."""
    least_written = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several do nothing but wait for one another with a model this small
    try:
        for case, (checkpointing, text) in itertools.product(CASES, _CHECKPOINTING):
            progress(f"bit by bit: {case.name}, {text}")
            offloaded = train(case, checkpointing, steps, directory)
            differing = differences(train(case, checkpointing, steps), offloaded)
            what = f"losses and weights unlike those in memory, {steps} steps: {case.name}, {text}"
            yield Verdict(what, Spread.of([differing]), "at most", 0)
            assert offloaded.bytes_written is not None
            least_written.append(offloaded.bytes_written)
    finally:
        torch.set_num_threads(threads)
    what = "least that any of these steps wrote to the drive"
    yield Verdict(what, Spread.of([min(least_written) / 1000]), "at least", 1, "KB")


def differences(expected: Trained, found: Trained) -> int:
    """How many losses and final weights differ. NaN, which nothing equals, counts as well."""
    pairs = zip([expected.losses, *expected.weights], [found.losses, *found.weights], strict=True)
    return sum(int((ours != theirs).sum()) for ours, theirs in pairs)


def train(case: Case, checkpointing: Checkpointing, steps: int, directory: Path | None = None) -> Trained:
    """Train a small GPT, the same at each call. With a directory, every tensor that autograd saves goes there."""
    torch.manual_seed(0)
    shape = GPTShape(**_SHAPE, dropout=case.dropout)
    with contextlib.ExitStack() as stack:
        model = GPT(shape, checkpointed=checkpointing == "torch")
        model.to(case.dtype)
        offloading: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        offloader: deepnvme.save_on_disk | None = None
        if directory is not None:
            own = stack.enter_context(tempfile.TemporaryDirectory(dir=directory))
            offloader = deepnvme.save_on_disk(own, memory_budget=0, min_bytes=1)
            stack.callback(offloader.close)
            offloading = offloader
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1)
        losses, written = [], []
        for _ in range(steps):
            batch = torch.randn(shape.sequences, shape.tokens, shape.width, generator=generator).to(case.dtype)
            wanted = batch.roll(1, dims=1).float()
            with offloading, torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                loss = (model(batch).float() - wanted).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if offloader is not None:
                written.append(offloader.report().bytes_written)
        weights = [parameter.detach() for parameter in model.parameters()]
    return Trained(torch.stack(losses), weights, min(written) if written else None)
