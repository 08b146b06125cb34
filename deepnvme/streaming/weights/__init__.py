"""The store of a model's weights: their sources, their layout in extents, quantisation, building and reading."""

from deepnvme._lazy import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
