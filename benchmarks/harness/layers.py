"""The model whose optimizer is measured: square matrices, which every library groups alike.

Runs in interpreters that have DeepSpeed and not this package.
"""

from __future__ import annotations

import torch


class Layers(torch.nn.Module):
    """``count`` matrices of ``width`` x ``width``. Its output does not fade with depth, nor do its gradients."""

    def __init__(self, width: int, count: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss_of(model: torch.nn.Module, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Of one row: all weights get gradients, in the least time."""
    row = torch.linspace(-1, 1, width).to(dtype)[None]
    return model(row).float().square().mean()
