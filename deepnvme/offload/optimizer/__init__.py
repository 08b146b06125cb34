"""An optimizer that keeps its states, master weights and gradients on a drive, and steps one sub-group after the other."""

from .optimizer import OffloadedOptimizer

__all__ = ["OffloadedOptimizer"]
