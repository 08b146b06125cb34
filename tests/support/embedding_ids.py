"""Sizes of small embeddings for tests, and ids of their rows."""

from __future__ import annotations

import torch

ROWS, DIM = 1000, 24
SMALL = 60_000
"""Bytes of memory for rows, of 96 000 bytes and more that all have."""


def some_ids(*shape: int) -> torch.Tensor:
    """Ids many of which occur several times."""
    ids = torch.randint(0, ROWS, shape)
    ids.view(-1)[::3] %= 7
    return ids
