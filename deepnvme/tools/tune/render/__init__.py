"""Formats results as text, JSON, charts, an HTML report and DeepSpeed's logs."""

from deepnvme._lazy import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
