"""Safetensors files, written and read at the speed of the drive; without the package of that name.

    from deepnvme.safetensors import load_file, save_file

The functions, and every byte of the files, are those of ``safetensors.torch``. Not here is what does not move whole files:
``save``, ``load`` and ``safe_open``; that of safetensors reads what these functions write.
"""

from deepnvme.checkpoint.safetensors_files import load_file, load_model, save_file, save_model, save_sharded

from .checkpoint.formats.contents import CorruptCheckpoint

__all__ = ["CorruptCheckpoint", "load_file", "load_model", "save_file", "save_model", "save_sharded"]
