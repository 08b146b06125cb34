"""A Llama in bfloat16 with random weights, as transformers has it: in memory, as a checkpoint, and without its weights.

Raises ContenderFailed where transformers is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.workloads import ContenderFailed

_HEAD = 128  # values


@dataclass(frozen=True)
class Shape:
    """Size of a Llama."""

    width: int
    layers: int
    vocabulary: int

    @property
    def nbytes(self) -> int:
        """Of all weights."""
        feed_forward = 3 * self.width * self.feed_forward
        attention = 2 * self.width**2 + 2 * self.width * self.key_value_heads * _HEAD
        norms = 2 * self.width * self.layers + self.width
        return 2 * (self.layers * (feed_forward + attention) + 2 * self.vocabulary * self.width + norms)

    @property
    def feed_forward(self) -> int:
        return self.width * 11 // 4

    @property
    def heads(self) -> int:
        return self.width // _HEAD

    @property
    def key_value_heads(self) -> int:
        return max(1, self.heads // 4)


def empty(shape: Shape) -> Any:
    """On the meta device, but for what is not stored."""
    try:
        from transformers import AutoModelForCausalLM, LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    except ImportError as error:
        raise ContenderFailed(f"not run: install transformers ({error})") from error
    config = LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=4096,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    model.generation_config.eos_token_id = None
    return model.eval()


def save(shape: Shape, directory: Path) -> None:
    """As safetensors, in several files."""
    model = empty(shape)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module._parameters[name] = torch.nn.Parameter(_values(parameter.shape), requires_grad=False)
    model.save_pretrained(directory, max_shard_size=max(shape.nbytes // 4, 1 << 20))


def _values(shape: torch.Size) -> torch.Tensor:
    """Values for a weight, ones for a norm."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    # The same values again and again: no drive or file system finds them easier, and they cost no minutes.
    return _NORMAL.repeat(-(-shape.numel() // _NORMAL.numel()))[: shape.numel()].view(shape).clone()


_NORMAL = (torch.randn((1 << 20) + 7, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)


def loaded(shape: Shape, directory: Path) -> Any:
    """In memory, from what ``save`` wrote."""
    from safetensors.torch import load_file

    model = empty(shape)
    for path in sorted(directory.glob("*.safetensors")):
        missing = model.load_state_dict(load_file(path), strict=False, assign=True)
        if missing.unexpected_keys:
            raise ContenderFailed(f"'{path.name}' holds {missing.unexpected_keys[0]}, which no Llama has")
    return model.eval()
