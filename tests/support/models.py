"""Small models of every build, whose blocks are named: each of their modules with weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

WIDTH = 16


def blocks_of(model: nn.Module) -> list[str]:
    """Each module that owns parameters."""
    return [name for name, module in model.named_modules() if name and module._parameters]


class Scale(nn.Module):
    """Gives back what it was given, or its own weight: an output that is a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def own(self) -> torch.Tensor:
        return self.weight


class Residual(nn.Module):
    """A block with weights of its own around one that has some too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.gain * x
        return (before + self.inner(x)) * self.gain


class Calls(nn.Module):
    """Calls its children in the order that the caller says."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)

    def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.parts[index](x))
        return x


def stack(count: int = 6) -> Calls:
    torch.manual_seed(0)
    return Calls(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def entangled() -> Calls:
    """Shared modules, tied weights within a block and across, nested blocks."""
    torch.manual_seed(0)
    shared = nn.Linear(WIDTH, WIDTH)
    tied = nn.Linear(WIDTH, WIDTH, bias=False)
    tied.weight = shared.weight
    other = nn.Linear(WIDTH, WIDTH)
    other.bias = shared.bias
    return Calls(shared, tied, Residual(shared), other, Residual(Residual(nn.Linear(WIDTH, WIDTH))), Scale(), shared)
