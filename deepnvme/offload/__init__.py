"""Train with more than fits into memory: optimizer states, gradients, master weights and activations on a drive."""

from .activation_checkpointing import checkpoint_on_disk
from .activation_report import ActivationReport
from .activations import save_on_disk
from .optimizer import OffloadedOptimizer

__all__ = ["ActivationReport", "OffloadedOptimizer", "checkpoint_on_disk", "save_on_disk"]
