"""The bytes of a host tensor, without numpy, which need not be there."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def memory_of(tensor: torch.Tensor, start: int = 0, count: int | None = None) -> memoryview:
    """``count`` bytes from ``start`` on, or all, of a contiguous tensor of bytes. Valid for as long as the tensor is."""
    nbytes = tensor.nbytes - start if count is None else count
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr() + start)).cast("B")
