"""Optimizer states on a drive, and the step that updates them. OffloadedOptimizer and OffloadedTraining are built on it."""

from deepnvme._lazy import public_names

from .report import StepReport

__all__ = ["StepReport"]

__dir__ = public_names(__name__)
