"""Files and directories: replaced atomically, locked, preallocated, and read without trusting them."""

from deepnvme._lazy import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
