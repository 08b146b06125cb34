"""The random numbers that OffloadedTraining gives each micro-batch of a step, for a reference in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def seeded_micro_batches(count: int) -> Iterator[int]:
    """Yield the number of each micro-batch, with the default generator in the state that the micro-batch begins with."""
    if count == 1:
        yield 0
        return
    seeds = torch.randint(1 << 62, (count,)).tolist()
    state = torch.get_rng_state()
    for number, seed in enumerate(seeds):
        torch.manual_seed(seed)
        yield number
    torch.set_rng_state(state)
