"""A KV cache for transformers that is kept in host memory or on a drive instead of the compute device."""
