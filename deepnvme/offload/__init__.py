"""Train with optimizer states, gradients and float32 master weights on a drive."""

from .optimizer import OffloadedOptimizer

__all__ = ["OffloadedOptimizer"]
