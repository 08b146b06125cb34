"""A KV cache for transformers that is kept in host memory or on a drive instead of the compute device."""

from deepnvme._lazy import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
