"""Searches for the best settings of a drive."""

from deepnvme._lazy import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
