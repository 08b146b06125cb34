"""The rows that an embedding begins with, some at a time: the same bits as ``torch.nn.Embedding`` makes of the same seed."""

from __future__ import annotations

import torch

_PART_BYTES = 4 << 20
"""Bytes of rows that are made at a time."""


class NormalRows:
    """Returns rows of normally distributed numbers, in their order, from torch's default generator.

    ``normal_`` makes 16 numbers of 16, in their order, and the last 16 of a tensor once more if it has no multiple of 16: so
    parts have a multiple of 16 rows, and the last of them is no shorter than 16 rows.

    Args:
        rows: How many.
        embedding_dim: Elements of each.
        dtype: Of the elements.
        zero_row: A row of zeros; None if there is none.
    """

    def __init__(self, rows: int, embedding_dim: int, dtype: torch.dtype, zero_row: int | None) -> None:
        self._rows, self._zero_row = rows, zero_row
        self._step = max(_PART_BYTES // max(embedding_dim * dtype.itemsize, 1) // 16 * 16, 16)
        self._made = torch.empty(0, embedding_dim, dtype=dtype)  # and not returned yet
        self._begin = 0  # the first row in it

    def __call__(self, begin: int, end: int) -> torch.Tensor:
        """Return rows ``begin`` to ``end``: all up to ``begin`` were returned before."""
        parts = [self._made]
        made = self._begin + len(self._made)
        while made < end:
            rest = self._rows - made
            count = rest if rest < 2 * self._step else self._step
            part = self._made.new_empty(count, self._made.shape[1]).normal_()
            if self._zero_row is not None and made <= self._zero_row < made + count:
                part[self._zero_row - made] = 0
            parts.append(part)
            made += count
        whole = torch.cat(parts)
        self._made, self._begin = whole[end - begin :].clone(), end
        return whole[: end - begin]
