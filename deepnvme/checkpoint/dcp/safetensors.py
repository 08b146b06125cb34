"""The variant of the safetensors format that ``torch.distributed.checkpoint`` writes and reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.planner import WriteItem

from deepnvme.checkpoint.formats.file_image import FileImage
from deepnvme.checkpoint.formats.safetensors_header import make_header, read_header
from deepnvme.checkpoint.formats.tensor_archive import Elements, contiguous_strides


def add_safetensors(image: FileImage, tensors: Sequence[tuple[WriteItem, torch.Tensor]]) -> None:
    """Append a safetensors file to the image, with the metadata that torch needs to combine shards.

    Args:
        image: Image to append to.
        tensors: The shards with their items.

    Raises:
        ValueError: If the format cannot hold the tensors: two shards of one name, a tensor that is not dense, or a dtype that
            the format does not have.
    """
    sources: dict[str, torch.Tensor] = {}
    shards = {}
    for item, tensor in tensors:
        name = item.index.fqn
        if name in sources:
            raise ValueError(f"two shards of {name!r} on one rank: a safetensors file holds one tensor of a name")
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name!r} is a {tensor.layout} tensor, which safetensors cannot hold")
        sources[name] = tensor.detach().contiguous()
        shards[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets) if item.tensor_data else []}
    header, names = make_header(sources, {"DCP_SHARDING_INFO": json.dumps(shards), "DCP_VERSION": "1.0", "format": "pt"})
    image.add_text(header)
    for name in names:
        image.add(sources[name].view(-1))


def elements_of_safetensors(path: Path, begin: int = 0) -> dict[str, Elements]:
    """Return where the tensors of a safetensors file are, by name.

    Args:
        path: The file.
        begin: Offset at which the safetensors format begins within the file.

    Raises:
        CorruptCheckpoint: If the file is damaged.
        OSError: If the file cannot be read.
    """
    return {
        entry.name: Elements(entry.offset, entry.dtype, entry.shape, contiguous_strides(entry.shape))
        for entry in read_header(path, begin).tensors
    }
