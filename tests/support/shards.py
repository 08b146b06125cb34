"""Safetensors files with an index, as the Hugging Face hub has them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from deepnvme.safetensors import save_file


def save_sharded(tensors: dict[str, torch.Tensor], directory: Path, most: int) -> list[Path]:
    """Fill shards of at most ``most`` bytes in the order of the dict; return their paths and that of the index."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(each.nbytes for each in shards[-1].values()) + tensor.nbytes > most:
            shards.append({})
        shards[-1][name] = tensor
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for shard, path in zip(shards, paths, strict=True):
        save_file(shard, path)
    weights = {name: path.name for shard, path in zip(shards, paths, strict=True) for name in shard}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return [*paths, index]
