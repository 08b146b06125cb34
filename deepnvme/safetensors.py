"""Save and load safetensors files at the speed of the drive, without the ``safetensors`` package.

    from deepnvme.safetensors import load_file, save_file

The functions have the interface of ``safetensors.torch`` and write the same bytes. ``save``, ``load`` and ``safe_open`` are not
here, because they do not move whole files. Those of the ``safetensors`` package read the files written here.
"""

from deepnvme.checkpoint.safetensors_files import load_file, load_model, save_file, save_model

from .checkpoint.formats.pt_records import CorruptCheckpoint

__all__ = ["CorruptCheckpoint", "load_file", "load_model", "save_file", "save_model"]
