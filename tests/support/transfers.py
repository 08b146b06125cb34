"""The dtypes and lengths that transfers are tried with."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
    *(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64") if hasattr(torch, name)),
]  # fmt: skip


@st.composite
def lengths(draw: st.DrawFn, most: int) -> int:
    """Bytes: near multiples of sectors and pages as often as not."""
    units, times = st.sampled_from([512, 4096]), st.integers(0, 64)
    near = st.builds(lambda unit, times, by: unit * times + by, units, times, st.integers(-2, 2))
    return min(max(draw(st.one_of(near, st.integers(0, most))), 0), most)
