"""The drive that a path is on, the engine settings stored for it, and DeepSpeed's ``aio`` block with such settings."""

from deepnvme._lazy import public_names

from .mounts import Drive, drive_of

__all__ = ["Drive", "drive_of"]

__dir__ = public_names(__name__)
