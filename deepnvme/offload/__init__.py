"""Training with optimizer states, gradients and weights in full precision on a drive."""

from .optimizer import OffloadedOptimizer

__all__ = ["OffloadedOptimizer"]
