"""Storage for tensors that autograd saves for the backward: in memory as far as a budget allows, otherwise on a drive."""

from .report import ActivationReport
from .saving import save_on_disk

__all__ = ["ActivationReport", "save_on_disk"]
