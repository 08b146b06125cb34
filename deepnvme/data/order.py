"""The order of samples: a global shuffle that begins anywhere, in O(1) time and memory, and is the same on every machine.

The shuffle is a Feistel network with cycle walking, keyed by seed and epoch. The halves of a number with an even count of bits,
4 ** half >= n, go through 8 rounds: ``left, right = right, left ^ F(right)``. That is a permutation whatever F is. A result that
is not below n goes through the network again, until it is below n: at most 3 more times on average. All numbers stay below 2**63,
so every machine and every version of torch computes the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

_ROUNDS = 8
_WORD = (1 << 32) - 1
_BLOCK = 1 << 14
"""Positions that are permuted at a time: 0.1 us each, where a batch of 64 takes 3 us each. From twice as many on, torch uses
threads, which takes longer while other threads decode."""


class Permutation:
    """A permutation of the numbers 0 to ``count - 1``, the same for the same arguments on every machine.

    Args:
        count: How many numbers: 1 to 2**62.
        key: Integers that choose the permutation, such as a seed and an epoch.
    """

    def __init__(self, count: int, *key: int) -> None:
        self._count = count
        self._half = max((count - 1).bit_length() + 1, 2) // 2
        digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=4 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[at : at + 4], "little") for at in range(0, len(digest), 4)]

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the numbers at these positions.

        Args:
            positions: int64 of one dimension, each from 0 to ``count - 1``.
        """
        found = self._network(positions)
        while len(outside := (found >= self._count).nonzero().flatten()):
            found[outside] = self._network(found[outside])
        return found

    def _network(self, numbers: torch.Tensor) -> torch.Tensor:
        mask = (1 << self._half) - 1
        left, right = numbers >> self._half, numbers & mask
        for key in self._keys:
            mixed = (right + key) & _WORD  # a hash of 32 bits, by multiplications with 31 bits
            mixed = ((mixed ^ (mixed >> 16)) * 0x21F0AAAD) & _WORD
            mixed = ((mixed ^ (mixed >> 15)) * 0x735A2D97) & _WORD
            left, right = right, left ^ ((mixed ^ (mixed >> 15)) & mask)
        return (left << self._half) | right


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class EpochSampler(Sampler[int]):
    """Samples in a new random order each epoch, or in their own order, without a list of them.

    Also a sampler for torch's own DataLoader, with :meth:`set_epoch` as ``DistributedSampler`` has it. Each rank gets every
    ``world_size``-th sample of one common order, and equally many samples.

    Args:
        dataset: A dataset, or anything else that has a length.
        shuffle: Whether the order is random.
        seed: Chooses the order, together with the epoch: the same seed has the same order on every machine.
        rank: Number of this process, from 0 on. None for torch.distributed's rank, or 0 if torch.distributed is not in use.
        world_size: Number of processes. None for torch.distributed's, or 1.
        drop_last: Whether samples that are left over at the end, less than one for each rank, are left out. Otherwise, some
            samples of the beginning are repeated.

    Raises:
        ValueError: If the rank is not one of the processes.
        RuntimeError: From the iterator, if torch.distributed was initialised after the sampler took the rank from it.
    """

    def __init__(
        self, dataset: Sized, shuffle: bool = True, seed: int = 0, rank: int | None = None, world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:  # fmt: skip
        distributed = _distributed()
        self.world_size = (torch.distributed.get_world_size() if distributed else 1) if world_size is None else world_size
        self.rank = (torch.distributed.get_rank() if distributed else 0) if rank is None else rank
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in 0 to world_size - 1, got rank={self.rank} and world_size={self.world_size}")
        self._unused_before = rank is None and world_size is None and not distributed
        self.samples = len(dataset)
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self._length = self.samples // self.world_size if drop_last else -(-self.samples // self.world_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration has."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of samples of this rank in an epoch."""
        return self._length

    def __iter__(self) -> Iterator[int]:
        return (number for batch in self.batches(self.epoch, 0, _BLOCK) for number in batch.tolist())

    def batches(self, epoch: int, start: int, size: int) -> Iterator[torch.Tensor]:
        """Yield the numbers of this rank's samples by ``size``, from the ``start``-th of an epoch on."""
        if self._unused_before and _distributed() and torch.distributed.get_world_size() > 1:  # each rank would have all samples
            raise RuntimeError("the sampler was made before torch.distributed was initialised: make it (or its loader) later")
        permutation = Permutation(self.samples, self.seed, epoch) if self.shuffle and self.samples else None
        block = max(_BLOCK // size, 1) * size
        for begin in range(start, self._length, block):
            places = torch.arange(begin, min(begin + block, self._length)) * self.world_size + self.rank
            places %= self.samples
            yield from torch.split(places if permutation is None else permutation(places), size)
