"""The store of a model's weights: sources of weights, layout in extents, quantisation, building and reading."""
