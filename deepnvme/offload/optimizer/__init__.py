"""An optimizer that keeps its states, master weights and gradients on a drive, and steps one sub-group after the other."""

from deepnvme._lazy import public_names

from .counted_io import StepReport
from .optimizer import OffloadedOptimizer

__all__ = ["OffloadedOptimizer", "StepReport"]

__dir__ = public_names(__name__)
