"""Tensors of known bytes, in host memory or on a device. Needs torch alone: it runs in the interpreter of every contender."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness import pattern


def fill_with(tensor: torch.Tensor, seed: int, start: int = 0) -> None:
    """Bytes from ``start`` of the pattern ``seed``."""
    for piece, content in _pieces(tensor, seed, start):
        piece.copy_(content)


def holds(tensor: torch.Tensor, seed: int, start: int = 0) -> bool:
    """Whether a tensor has the pattern of a seed."""
    return all(torch.equal(piece.cpu(), content) for piece, content in _pieces(tensor, seed, start))


def _pieces(tensor: torch.Tensor, seed: int, start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces of a tensor, each with the pattern that belongs there."""
    for done, chunk in pattern.chunks(seed, start, tensor.numel()):
        # A bytearray, because torch warns of memory that it may not write.
        yield tensor[done : done + len(chunk)], torch.frombuffer(bytearray(chunk), dtype=torch.uint8)
