"""The structure of a model: its blocks, its weights by name, and weights in int8 or int4."""

from deepnvme._lazy import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
