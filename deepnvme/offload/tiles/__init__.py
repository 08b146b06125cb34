"""Large layers cut into tiles: modules that are used one after the other, so that a whole layer need not fit into memory."""

from .layers import TiledEmbedding, TiledLinear
from .tiling import tile_large_layers, untiled_state_dict

__all__ = ["TiledEmbedding", "TiledLinear", "tile_large_layers", "untiled_state_dict"]
