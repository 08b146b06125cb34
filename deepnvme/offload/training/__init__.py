"""Training of a model whose parameters are on a drive, with one block after the other in memory."""

from deepnvme.telemetry.drive_wear import WriteEstimate

from .report import TrainingReport
from .training import OffloadedTraining

__all__ = ["OffloadedTraining", "TrainingReport", "WriteEstimate"]
