"""Measures transfers of a tensor to and from folders: in this process, in several, and by fio."""

from deepnvme._lazy import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
