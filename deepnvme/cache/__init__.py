"""One cache of blocks on a drive whose next uses are known."""

from deepnvme._lazy import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
