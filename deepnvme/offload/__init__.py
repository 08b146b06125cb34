"""Train with more than fits into memory: parameters, gradients, optimizer states and activations on a drive."""

from .activation_checkpointing import checkpoint_on_disk
from .activation_report import ActivationReport
from .activations import save_on_disk
from .optimizer import OffloadedOptimizer
from .tiled_layers import TiledEmbedding, TiledLinear
from .tiling import tile_large_layers, untiled_state_dict
from .training import OffloadedTraining
from .training_plan import TrainingPlan
from .training_report import TrainingReport

__all__ = [
    "ActivationReport", "OffloadedOptimizer", "OffloadedTraining", "TiledEmbedding", "TiledLinear", "TrainingPlan",
    "TrainingReport", "checkpoint_on_disk", "save_on_disk", "tile_large_layers", "untiled_state_dict",
]  # fmt: skip
