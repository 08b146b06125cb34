"""Compute where each tensor of a sub-group lies in its block, the contiguous bytes read and written in one request."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepnvme.memory.alignment import PAGE, padded

if TYPE_CHECKING:
    import torch

CACHE_LINE = 64
"""Bytes."""


@dataclass(frozen=True)
class BlockSection:
    """Where one tensor lies in a block, and its dtype, shape and stride."""

    piece: int
    """Index in the sub-group's ``pieces``."""
    key: str
    """Name in the optimizer's state, or ``MASTER`` for the master weight."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the block's start."""
    nbytes: int
    stride: tuple[int, ...]
    """In elements, and the same as the parameter's: fused kernels walk a parameter and its states in memory order."""

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of ``block``, the block's bytes (uint8, one dimension)."""
        return block[self.offset : self.offset + self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class BlockLayout:
    """Where all tensors of a block lie."""

    sections: tuple[BlockSection, ...]
    nbytes: int
    """Size of the block, a multiple of the page size."""


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides (elements) of a dense copy: the tensor's own if contiguous, else those of ``torch.empty_like``."""
    import torch

    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def lay_out(tensors: Sequence[tuple[int, str, torch.Tensor]], on_pages: Container[int] = ()) -> BlockLayout:
    """Assign each tensor an offset in one block, in the given order.

    Args:
        tensors: (piece index, key, tensor). Only dtype, shape and strides of the tensor are used.
        on_pages: Indices of pieces whose tensors begin on a page. So do all tensors of a page or more; the others begin on a
            cache line.
    """
    sections = []
    end = 0
    for piece, key, tensor in tensors:
        alignment = PAGE if tensor.nbytes >= PAGE or piece in on_pages else CACHE_LINE
        begin = padded(end, alignment)
        end = begin + tensor.nbytes
        sections.append(BlockSection(piece, key, tensor.dtype, tuple(tensor.shape), begin, tensor.nbytes, dense_strides(tensor)))
    return BlockLayout(tuple(sections), padded(end, PAGE))
