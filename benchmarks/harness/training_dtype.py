"""In which dtype to train: bfloat16 unless this machine multiplies such matrices slowly."""

from __future__ import annotations

import time

import torch
from torch.nn import functional

_TIMES = 3
_SLOWER = 2.0
"""Without instructions for bfloat16, torch takes ten times as long in it and more: computing would hide the drive."""


def choose(width: int, inner: int, tokens: int) -> tuple[str, str]:
    """Return "bfloat16" or "float32", and why: a product like those of the model, forward and backward, was timed in both."""
    seconds = {dtype: _seconds(dtype, width, inner, tokens) for dtype in (torch.bfloat16, torch.float32)}
    low, full = seconds[torch.bfloat16], seconds[torch.float32]
    product = f"{tokens} x {width} by {width} x {inner}, forward and backward, takes {low * 1e3:.3g} ms in bfloat16"
    why = f"{product} and {full * 1e3:.3g} ms in float32 (bfloat16 may take {_SLOWER:g} times as long)"
    return ("float32" if low > _SLOWER * full else "bfloat16"), why


def _seconds(dtype: torch.dtype, width: int, inner: int, tokens: int) -> float:
    """The least of some."""
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(inner, width, dtype=dtype, requires_grad=True)
    gradient = torch.randn(tokens, inner, dtype=dtype)
    taken = []
    for _ in range(_TIMES):
        begun = time.perf_counter()
        functional.linear(x, weight).backward(gradient)
        taken.append(time.perf_counter() - begun)
    return min(taken)
