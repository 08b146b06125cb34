"""What both programs do with an engine of DeepSpeed's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch


def train(engine: Any, width: int, batches: range, before_step: Callable[[], object] = lambda: None) -> list[str]:
    """Of batches ``width`` wide, of each rank its own, the losses, exactly. ``before_step``: called after each backward."""
    losses = []
    for number in batches:
        torch.manual_seed(number + 1000 * int(os.environ["RANK"]))
        batch = torch.randn(4, width, dtype=torch.bfloat16 if engine.bfloat16_enabled() else torch.float32)
        loss = (engine(batch).float() - batch.float().roll(1)).pow(2).mean()
        engine.backward(loss)
        before_step()
        engine.step()
        losses.append(loss.item().hex())
    return losses
