"""Keys and values, each [batch, heads, positions, dim]."""

from __future__ import annotations

import torch


def states(batch: int = 2, positions: int = 1, heads: int = 2, dim: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, batch, heads, positions, dim, generator=generator)
    return keys, values
