"""The blocks of a model in training: parameters, gradients and optimizer states, on the drive, and in memory while in use."""

from deepnvme._lazy import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
