"""A KV cache for transformers that is kept on a drive instead of the compute device."""
