"""FP8 weights with scales, made and dequantised by torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

LARGEST = 448.0
"""Of float8_e4m3fn."""


def widened(scales: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> torch.Tensor:
    """A scale for each value of a weight."""
    *_, rows, columns = shape
    block = min(block[0], rows), min(block[1], columns)
    return scales.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., :rows, :columns]


def quantized(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in FP8, and its scales."""
    *others, rows, columns = weight.shape
    block = min(block[0], rows), min(block[1], columns)
    high, wide = -(-rows // block[0]), -(-columns // block[1])
    whole = torch.zeros(*others, high * block[0], wide * block[1])
    whole[..., :rows, :columns] = weight
    most = whole.view(*others, high, block[0], wide, block[1]).abs().amax((-3, -1))
    scales = torch.where(most == 0, 1.0, most / LARGEST)
    return (weight.float() / widened(scales, weight.shape, block)).to(torch.float8_e4m3fn), scales


def dequantized(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return (weight.float() * widened(scales, weight.shape, block)).to(dtype)


def is_linear(name: str, weight: torch.Tensor) -> bool:
    """Whether a weight of a transformers' checkpoint is one that is in FP8 in published checkpoints."""
    kept = ("embed_tokens", "lm_head", "norm", ".gate.weight")
    return name.endswith(".weight") and weight.dim() > 1 and not any(part in name for part in kept)


def to_fp8(
    folder: Path,
    block: tuple[int, int] = (32, 32),
    suffix: str = "_scale_inv",
    chosen: Callable[[str, torch.Tensor], bool] = is_linear,
    **quantization: Any,
) -> dict[str, torch.Tensor]:
    """Turn the checkpoint in a folder into one in FP8, and return its weights, dequantised, by their names in the files."""
    known = {}
    for file in sorted(folder.glob("*.safetensors")):
        state = {}
        for name, weight in safetensors.torch.load_file(file).items():
            known[name] = state[name] = weight
            if chosen(name, weight):
                state[name], state[name + suffix] = quantized(weight, block)
                known[name] = dequantized(state[name], state[name + suffix], block, weight.dtype)
        safetensors.torch.save_file(state, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block), **quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return known
