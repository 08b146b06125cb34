"""The structure of a model: its blocks, its weights by name, and weights in int8 or int4."""
