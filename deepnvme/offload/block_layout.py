"""Where the tensors of a sub-group lie in its block: the piece of memory that is read and written in one request."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepnvme.memory.alignment import PAGE, padded

if TYPE_CHECKING:
    import torch

CACHE_LINE = 64


@dataclass(frozen=True)
class BlockSection:
    """One tensor in a block."""

    piece: int
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the block's start."""
    nbytes: int
    stride: tuple[int, ...]
    """As in the parameter: fused kernels take all tensors of one in the order of memory."""

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """The view into a block, a tensor of bytes."""
        return block[self.offset : self.offset + self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class BlockLayout:
    """All tensors in a block."""

    sections: tuple[BlockSection, ...]
    nbytes: int


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its own if its elements fill a piece of memory, or else what an empty_like of it has."""
    import torch

    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def lay_out(tensors: Sequence[tuple[int, str, torch.Tensor]], on_pages: Container[int] = ()) -> BlockLayout:
    """A place for each (piece, key, tensor), in this order: on a page where it fills one, or its piece is one of
    ``on_pages``; or else on a cache line."""
    sections = []
    end = 0
    for piece, key, tensor in tensors:
        alignment = PAGE if tensor.nbytes >= PAGE or piece in on_pages else CACHE_LINE
        begin = padded(end, alignment)
        end = begin + tensor.nbytes
        sections.append(BlockSection(piece, key, tensor.dtype, tuple(tensor.shape), begin, tensor.nbytes, dense_strides(tensor)))
    return BlockLayout(tuple(sections), padded(end, PAGE))
