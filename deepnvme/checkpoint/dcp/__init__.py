"""Distributed checkpoints: storage writers and readers for ``torch.distributed.checkpoint``."""
