"""Training with more than fits into memory: parameters, gradients, optimizer states and activations on a drive."""

from deepnvme.states import StepReport

from .activations import ActivationReport, save_on_disk
from .optimizer import OffloadedOptimizer
from .options import OptimizerOptions, TrainingOptions
from .tiles import TiledEmbedding, TiledLinear, tile_large_layers, untiled_state_dict
from .training import OffloadedTraining, TrainingReport, WriteEstimate

__all__ = [
    "ActivationReport", "OffloadedOptimizer", "OffloadedTraining", "OptimizerOptions", "StepReport", "TiledEmbedding",
    "TiledLinear", "TrainingOptions", "TrainingReport", "WriteEstimate", "save_on_disk", "tile_large_layers",
    "untiled_state_dict",
]  # fmt: skip


def __dir__() -> list[str]:
    """Return the public names, without the submodules that define them."""
    return sorted(__all__)
