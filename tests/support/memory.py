"""Tensors whose address and surroundings a test decides; and what buffer pools have lent."""

from __future__ import annotations

import gc
import mmap
import random
from collections.abc import Callable

import torch

from deepnvme.swap import BufferPool

PAGE = mmap.PAGESIZE
GUARD = b"\xa5"


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Bytes that tell every place from every other, and ``seed`` from every other seed."""
    return random.Random(seed).randbytes(nbytes)


_RANDOM = torch.randint(0, 256, (20 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def numbered(nbytes: int, seed: int = 0) -> torch.Tensor:
    """The same as a tensor, for many large ones: cut from one that was drawn once."""
    start = seed * 7919 % (4 << 20)
    return _RANDOM[start : start + nbytes].clone()


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes, in the order of its elements."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def leased_bytes() -> int:
    """Bytes that are leased of all buffer pools of this process, those that a program cannot ask for too."""
    return sum(each.in_use for each in gc.get_objects() if type(each) is BufferPool)


class Guarded:
    """A tensor of ``content``, ``misalignment`` bytes after the start of a page, with guard bytes before and after it."""

    def __init__(self, content: bytes, misalignment: int = 0, dtype: torch.dtype = torch.uint8) -> None:
        self._begin = PAGE + misalignment
        self._end = self._begin + len(content)
        self._memory = mmap.mmap(-1, (self._end // PAGE + 2) * PAGE)
        self._memory.write(GUARD * len(self._memory))
        self._memory[self._begin : self._end] = content
        if content:
            flat = torch.frombuffer(self._memory, dtype=torch.uint8, offset=self._begin, count=len(content))
            self.tensor = flat.view(dtype) if misalignment % dtype.itemsize == 0 else flat
        else:
            self.tensor = torch.empty(0, dtype=dtype)

    def content(self) -> bytes:
        return self._memory[self._begin : self._end]

    def guards_are_intact(self) -> bool:
        around = self._memory[: self._begin] + self._memory[self._end :]
        return around == GUARD * len(around)


def page_aligned(content: bytes) -> torch.Tensor:
    """A tensor that is transferred in place."""
    return Guarded(content).tensor


def zeros(nbytes: int, misalignment: int = 0) -> Guarded:
    """To read into."""
    return Guarded(bytes(nbytes), misalignment)


def _assign_data(tensor: torch.Tensor, other: torch.Tensor) -> None:
    tensor.data = other


EXCHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "data": _assign_data,
    "set_": lambda tensor, other: tensor.set_(other),  # type: ignore[call-overload]
    "swap_tensors": torch.utils.swap_tensors,
}
"""Ways to give a tensor the memory of another."""
