"""Tensor I/O at the speed of the drive; compatible with DeepSpeed's DeepNVMe."""

from .config import AioConfig
from .engine import Engine, File, Future, Stats
from .version import __version__

__all__ = ["AioConfig", "Engine", "File", "Future", "Stats", "__version__"]
