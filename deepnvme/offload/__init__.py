"""Train with more than fits into memory: optimizer states, gradients, master weights and activations on a drive."""

from .activation_checkpointing import checkpoint_on_disk
from .activation_report import ActivationReport
from .activations import save_on_disk
from .optimizer import OffloadedOptimizer
from .tiled_layers import TiledEmbedding, TiledLinear
from .tiling import tile_large_layers, untiled_state_dict

__all__ = [
    "ActivationReport",
    "OffloadedOptimizer",
    "TiledEmbedding",
    "TiledLinear",
    "checkpoint_on_disk",
    "save_on_disk",
    "tile_large_layers",
    "untiled_state_dict",
]
