"""What a stream of weights has read, and who has waited for it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_SHOWN = 5


@dataclass(frozen=True)
class StreamReport:
    """Of a :class:`Streaming`, since it was made or :meth:`Streaming.reset`. Seconds and bytes; a GB is 10^9 bytes."""

    passes: int
    """Calls of the model."""
    seconds: float
    """In the model, and in blocks that were called without it."""
    bytes_read: int
    """From the drive, what was read ahead in vain included."""
    stalls: Mapping[str, float]
    """Seconds in which nothing was done but wait for the weights of a block, by its name."""
    tokens: int
    """Elements of ``input_ids``, ``decoder_input_ids`` or a first argument of whole numbers."""
    resident_bytes: int
    """Of weights that stay in memory once they have been read."""
    limit: float | None
    """Bytes/s that the drive gives; None before :meth:`Streaming.measure_limit`, and where that had nothing to read."""

    @property
    def stalled(self) -> float:
        """Seconds of all blocks."""
        return sum(self.stalls.values())

    @property
    def bytes_per_second(self) -> float:
        """Read, over all the time in the model."""
        return self.bytes_read / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def share_of_limit(self) -> float | None:
        """1 where the drive was never idle."""
        return None if self.limit is None else self.bytes_per_second / self.limit

    def __str__(self) -> str:
        share = "" if self.share_of_limit is None else f", {self.share_of_limit:.0%} of the drive's limit"
        lines = [
            f"{self.passes} pass{'' if self.passes == 1 else 'es'} in {self.seconds:.3f} s:"
            f" {self.tokens} tokens, {self.tokens_per_second:.1f}/s",
            f"read {self.bytes_read / 1e9:.3f} GB at {self.bytes_per_second / 1e9:.2f} GB/s{share};"
            f" {self.resident_bytes / 1e9:.3f} GB stay in memory",
            f"waited {self.stalled:.3f} s for weights",
        ]
        longest = sorted(self.stalls.items(), key=lambda stall: -stall[1])[:_SHOWN]
        lines += [f"  {seconds:8.3f} s  {block}" for block, seconds in longest if seconds >= 0.0005]
        return "\n".join(lines)


@dataclass
class Tally:
    """What a report is made of."""

    passes: int = 0
    seconds: float = 0.0
    tokens: int = 0
    bytes_before: int = 0
    """That were read before it began."""
    stalls: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    begun: float = 0.0

    def enter(self) -> None:
        self.begun = time.perf_counter()

    def leave(self) -> None:
        self.seconds += time.perf_counter() - self.begun

    def called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The model was, with these."""
        self.passes += 1
        ids = kwargs.get("input_ids")
        ids = kwargs.get("decoder_input_ids") if ids is None else ids
        ids = args[0] if ids is None and args else ids
        if isinstance(ids, torch.Tensor) and ids.dtype in (torch.int64, torch.int32):
            self.tokens += ids.numel()
