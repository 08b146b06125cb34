"""Distributed checkpoints of ``torch.distributed.checkpoint``."""
