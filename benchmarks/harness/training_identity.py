"""Whether training with everything on the drive gives the same bits as training in memory."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepnvme.offload.training import OffloadedTraining
from deepnvme.tools.tune.figures import Spread
from harness import training_models
from harness.command_line import Progress
from harness.figures import Verdict
from harness.in_memory import InMemory
from harness.training_models import TrainingShape
from harness.workloads import ContenderFailed

_SHAPE = TrainingShape(width=128, layers=3, vocabulary=97, sequences=4, tokens=64, dropout=0.1)
_BUDGET = 0
"""Bytes of blocks in memory: as few as the largest block needs, so that nearly nothing stays."""
_MIN_BYTES = 1 << 12
"""Activations that are large enough for the drive here: by default, none of a model that is trained in seconds would be."""
_OPTIONS: dict[str, Any] = {"lr": 1e-3, "fused": True}


@dataclass(frozen=True)
class Case:
    """A way to train."""

    dtype: str
    activations: str
    """ "memory", "nvme" or "recomputed"."""
    micro_batches: int
    accumulation: str | None = None
    """ "vertical" or "horizontal"; None for what is the default."""

    def __str__(self) -> str:
        dtype = "fp32" if self.dtype == "float32" else "bf16 + masters"
        batches = f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"
        kind = f", {self.accumulation}" if self.accumulation else ""
        return f"{dtype}, activations: {self.activations}, {batches}{kind}"


CASES = tuple(
    Case(dtype, activations, micro_batches)
    for dtype, activations, micro_batches in itertools.product(("float32", "bfloat16"), ("memory", "nvme", "recomputed"), (1, 4))
)


def compare(directory: Path, steps: int, progress: Progress) -> Iterator[Verdict]:
    """Each case; the figure is how many values differ."""
    for case in CASES:
        progress(f"bit by bit: {case}")
        differing = differences(case, directory, steps)
        what = f"losses and weights unlike those in memory, {steps} steps: {case}"
        yield Verdict(what, Spread.of([differing]), "at most", 0)


def differences(case: Case, directory: Path, steps: int) -> int:
    """How many losses and final weights differ. NaN, which nothing equals, counts as well."""
    recomputed = case.activations == "recomputed"
    # Each of several micro-batches draws random numbers of its own, unlike a loop in memory.
    dropout = _SHAPE.dropout if case.micro_batches == 1 else 0.0
    shape = dataclasses.replace(_SHAPE, dtype=case.dtype, dropout=dropout)
    reference = training_models.make(shape, recomputed)
    expected = _train_in_memory(reference, case.micro_batches, steps)
    model = training_models.make(shape, recomputed)
    options: dict[str, Any] = {**_OPTIONS, "micro_batches": case.micro_batches}
    if case.accumulation is not None:
        options["accumulation"] = case.accumulation
    with (
        tempfile.TemporaryDirectory(dir=directory) as own,
        OffloadedTraining(
            model,
            torch.optim.AdamW,
            blocks=model.blocks,
            path=own,
            memory_budget=_BUDGET,
            activations="nvme" if case.activations == "nvme" else "memory",
            activation_budget=0,
            master_weights=case.dtype != "float32",
            **options,
        ) as training,
    ):
        saver = training._saver
        if saver is not None:
            saver._min_bytes = _MIN_BYTES  # which OffloadedTraining leaves at the default
        torch.manual_seed(1)  # of dropout
        losses = []
        for step in range(steps):
            loss = training.step(training_models.batch(_SHAPE, step))
            assert loss is not None
            losses.append(loss)
        if saver is not None and not saver.report().bytes_written:
            raise ContenderFailed(f"no activations were on the drive: {case}")
        weights = training.state_dict()["model"]
        pairs = [(torch.stack(expected), torch.stack(losses))]
        pairs += [(value, weights[name]) for name, value in reference.state_dict().items()]
        return sum(int((ours != theirs).sum()) for ours, theirs in pairs)


def _train_in_memory(model: training_models.Llama, micro_batches: int, steps: int) -> list[torch.Tensor]:
    """Train as anybody would, and return the losses."""
    optimizer = InMemory(model.parameters(), torch.optim.AdamW, **_OPTIONS)
    torch.manual_seed(1)
    losses = []
    for step in range(steps):
        total: torch.Tensor | None = None
        for part in training_models.batch(_SHAPE, step).chunk(micro_batches):
            loss = model(part)
            if micro_batches > 1:
                loss = loss * (1 / micro_batches)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
