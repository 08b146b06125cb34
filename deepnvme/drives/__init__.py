"""The drive that a path is on, the engine settings stored for it, and DeepSpeed's ``aio`` block with such settings."""

from .mounts import Drive, drive_of

__all__ = ["Drive", "drive_of"]
