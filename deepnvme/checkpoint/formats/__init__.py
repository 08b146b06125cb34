"""File formats: zip archives as torch.save writes them, the pickles in them, and safetensors."""

from deepnvme._lazy import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
