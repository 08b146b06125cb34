"""Whether an offloaded optimizer trains to the same bits as the plain one in memory."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepnvme import OffloadedOptimizer
from deepnvme.tools.tune.figures import Spread
from harness.command_line import Progress
from harness.figures import Verdict
from harness.in_memory import InMemory


class SignOfMomentum(torch.optim.Optimizer):
    """Someone's own optimizer, of Lion's kind: steps by the sign of an average, and decays weights."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            fast, slow = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                average = self.state[param].setdefault("average", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(group["lr"] * (average * fast + param.grad * (1 - fast)).sign())
                average.mul_(slow).add_(param.grad, alpha=1 - slow)
        return loss


@dataclass(frozen=True)
class Case:
    """An optimizer class with its options."""

    name: str
    optimizer_class: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("AdamW, fused", torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    Case("Adam", torch.optim.Adam, {"lr": 1e-3}),
    Case("SGD with momentum", torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    Case("Adagrad", torch.optim.Adagrad, {"lr": 1e-2}),
    Case("one of Lion's kind", SignOfMomentum, {"lr": 1e-4, "weight_decay": 0.1}),
)


def compare(directory: Path, steps: int, progress: Progress) -> Iterator[Verdict]:
    """Each optimizer, with parameters in float32, and in bfloat16 with masters; the figure is how many values differ."""
    for case in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            text = "fp32" if dtype == torch.float32 else "bf16 + masters"
            progress(f"bit by bit: {case.name}, {text}")
            differing = differences(case, dtype, directory, steps)
            what = f"losses and weights unlike those in memory, {steps} steps: {case.name}, {text}"
            yield Verdict(what, Spread.of([differing]), "at most", 0)


def differences(case: Case, dtype: torch.dtype, directory: Path, steps: int) -> int:
    """How many losses and final weights differ. NaN, which nothing equals, counts as well."""
    reference, model = _network(dtype), _network(dtype)
    plain = InMemory(reference.parameters(), case.optimizer_class, **case.options)
    with (
        tempfile.TemporaryDirectory(dir=directory) as own,
        OffloadedOptimizer(
            model.parameters(),
            case.optimizer_class,
            path=own,
            master_weights=dtype != torch.float32,
            sub_group_size=1 << 14,
            **case.options,
        ) as offloaded,
    ):
        expected, losses = _train(reference, plain, steps), _train(model, offloaded, steps)
    pairs = [(torch.tensor(expected), torch.tensor(losses)), *zip(reference.parameters(), model.parameters(), strict=True)]
    return sum(int((ours != theirs).sum()) for ours, theirs in pairs)


def _network(dtype: torch.dtype) -> torch.nn.Module:
    """A small network, the same at each call."""
    torch.manual_seed(0)
    # Parameters that are cut, that fill a sub-group and that share one; biases that end on no boundary.
    sizes = (96, 333, 256, 65, 1)
    layers: list[torch.nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers).to(dtype)


def _train(model: torch.nn.Module, optimizer: InMemory | OffloadedOptimizer, steps: int) -> list[float]:
    """Train for some steps on random batches, the same at each call, and return the losses."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    losses = []
    for _ in range(steps):
        batch = torch.randn(32, 96, generator=generator)
        wanted = batch.sum(1, keepdim=True).tanh()
        loss = (model(batch.to(dtype)).float() - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
