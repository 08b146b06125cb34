"""The memory of blocks that are put or got: tensors, buffers, or parts of one large buffer by their numbers."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from deepnvme.ops import load_async_io

if TYPE_CHECKING:
    from typing_extensions import Buffer

Blocks: TypeAlias = "torch.Tensor | Buffer | Sequence[torch.Tensor | Buffer]"
"""Memory of blocks: a tensor or buffer whose rows (along its first dimension) are blocks, or a sequence of blocks."""


class BlockMemory:
    """Addresses and lengths of the memory of blocks, which stays allocated as long as this object.

    Args:
        blocks: The blocks.
        index: Numbers of the rows of ``blocks``, one for each block; None for all rows, or for a sequence.
        writable: Whether the memory is to be written to.

    Raises:
        TypeError: If a block is neither a tensor nor a buffer of numbers, or a number of a row is not an integer.
        ValueError: If a block is not contiguous, is not on the CPU, or may not be written to, or two blocks to be written to
            overlap.
        IndexError: If there is no row with a number.
    """

    def __init__(self, blocks: Blocks, index: Iterable[int] | None, writable: bool) -> None:
        self.addresses, self.lengths = array("Q"), array("Q")
        self._owners: list[Any] = []
        self._rows_of_buffer = load_async_io().kvstore.rows_of  # once: it takes as long as the rest of a block
        if index is None and not _is_one(blocks):
            for block in cast("Sequence[torch.Tensor | Buffer]", blocks):
                address, rows, _, row_bytes = self._rows_of(block, writable, rows=False)
                self.addresses.append(address)
                self.lengths.append(rows * row_bytes)
        else:
            self._add_rows(blocks, index, writable)
        begins_and_lengths = sorted(zip(self.addresses, self.lengths, strict=True)) if writable else []
        if any(begin + length > following for (begin, length), (following, _) in pairwise(begins_and_lengths)):
            raise ValueError("two blocks must not be read into the same memory")

    def _add_rows(self, blocks: Any, index: Iterable[int] | None, writable: bool) -> None:
        """Add the rows of a tensor or buffer: all, or those with the numbers in ``index``."""
        address, rows, stride, row_bytes = self._rows_of(blocks, writable, rows=True)
        numbers = range(rows) if index is None else index.tolist() if isinstance(index, torch.Tensor) else index
        for row in map(operator.index, numbers):
            if not 0 <= row < rows:
                raise IndexError(f"there is no block {row} in a buffer of {rows}")
            self.addresses.append(address + row * stride)
        self.lengths.extend([row_bytes] * len(self.addresses))

    def _rows_of(self, block: Any, writable: bool, rows: bool) -> tuple[int, int, int, int]:
        """Return the address of a tensor or buffer, the number of its rows, and bytes from row to row and of each row.

        ``rows``: Whether there may be gaps between the rows. If not, the whole memory is one row.
        """
        if not isinstance(block, torch.Tensor):
            view = memoryview(block)  # while there is a view, the memory is not moved
            self._owners.append(view)
            if view.format == "O":
                raise TypeError("a block must not have Python objects")
            found: tuple[int, int, int, int] = self._rows_of_buffer(view, writable)
        else:
            if block.device.type != "cpu" or block.layout is not torch.strided:
                raise ValueError(
                    f"blocks must be dense and on the CPU, got one of {block.layout} on {block.device}: copy it there"
                )
            self._owners.append(block.untyped_storage())
            count = len(block) if rows and block.dim() > 0 else 1
            row = block[0] if rows and block.dim() > 0 and count > 0 else block
            if not row.is_contiguous():
                raise ValueError(f"a block must be contiguous, got shape {tuple(row.shape)} with strides {row.stride()}")
            stride = block.stride(0) * block.element_size() if row is not block else row.nbytes
            found = (block.data_ptr(), count, stride, row.nbytes)
        if not rows and found[1] > 1 and found[2] != found[3]:
            raise ValueError("a block must be contiguous")
        return found


def _is_one(blocks: object) -> bool:
    """Return whether the blocks are in one tensor or buffer."""
    if isinstance(blocks, torch.Tensor):
        return True
    try:
        memoryview(blocks)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
