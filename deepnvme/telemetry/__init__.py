"""What is told to people: progress, reports, sizes as text, bytes written to a drive, ranges in profiles."""

from deepnvme._lazy import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
