"""Where the elements of a tensor are in a file."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepnvme.memory.tensor_bytes import contiguous_strides, span_nbytes


class Elements(NamedTuple):
    """Where the elements of a tensor, or of a part of one, are in a file."""

    offset: int
    """Offset of the first element, in bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Stride of each dimension, in elements."""

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the last, which is what has to be read."""
        return span_nbytes(self.shape, self.stride, self.dtype.itemsize)

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow each other without gaps in row-major order."""
        steps = zip(self.shape, self.stride, contiguous_strides(self.shape), strict=True)
        return all(size == 1 or stride == step for size, stride, step in steps)

    def narrow(self, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Elements:
        """Return the part that begins at ``offsets`` and has the shape ``lengths``.

        Raises:
            ValueError: If the part is not within this tensor.
        """
        if len(offsets) != len(self.shape) or any(
            offset < 0 or offset + length > size for offset, length, size in zip(offsets, lengths, self.shape, strict=True)
        ):
            raise ValueError(f"{list(lengths)} elements from {list(offsets)} on are wanted of a tensor of {list(self.shape)}")
        first = sum(offset * stride for offset, stride in zip(offsets, self.stride, strict=True))
        return Elements(self.offset + first * self.dtype.itemsize, self.dtype, tuple(lengths), self.stride)
