"""Keys, and blocks whose bytes follow from their key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

BLOCK = 16 << 10


def keys_of(numbers: Iterable[int]) -> list[bytes]:
    return [b"key %d" % number for number in numbers]


def content(key: bytes, nbytes: int = BLOCK) -> torch.Tensor:
    """No two keys have the same block."""
    digest = hashlib.sha256(key + nbytes.to_bytes(4, "little")).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8).repeat(nbytes // 32 + 1)[:nbytes]
