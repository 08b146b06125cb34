"""Distributed checkpoints: storage writers and readers for ``torch.distributed.checkpoint``."""

from deepnvme._lazy import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
