"""Optimizer states on a drive, and the steps made with them: the machine under every trainer of this package."""

from deepnvme._lazy import public_names

from .counted_io import StepReport

__all__ = ["StepReport"]

__dir__ = public_names(__name__)
