"""The store of a model's weights: their sources, their layout in extents, quantisation, building and reading."""
