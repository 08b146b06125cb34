"""Moves blocks between memory and a drive: a cache of blocks, and many small pieces in few large transfers."""

from deepnvme._lazy import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
