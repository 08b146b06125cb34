"""Optimizer states on a drive, and the step that updates them. OffloadedOptimizer and OffloadedTraining are built on it."""

from .report import StepReport

__all__ = ["StepReport"]
