"""Bytes that tell where they belong, so that a benchmark notices a transfer that was fast because it was wrong.

Standard library only: it runs in the interpreter of every contender.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

# A prime: no block size divides it, so a block that lands at another block's place never matches there.
_PERIOD = 1_000_003
_CHUNK = 1 << 20


@functools.lru_cache(maxsize=2)
def _repeated(seed: int) -> bytes:
    return random.Random(seed).randbytes(_PERIOD) * 3


def chunks(seed: int, start: int, nbytes: int) -> Iterator[tuple[int, bytes]]:
    """Bytes [start, start + nbytes) of the endless pattern ``seed``, as (bytes since start, at most 1 MiB) pieces."""
    pattern = _repeated(seed)
    for done in range(0, nbytes, _CHUNK):
        phase = (start + done) % _PERIOD
        yield done, pattern[phase : phase + min(_CHUNK, nbytes - done)]
