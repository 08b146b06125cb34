"""The model that is trained: a Llama in plain PyTorch, and what a step is given.

Runs in interpreters that have DeepSpeed and not this package.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

STEPS_TO_SETTLE = 4
"""Of each contender, before any is timed. The first one makes the states and their files, the second one is the first that knows
the order of blocks, and after the third OffloadedTraining measures the drive and divides the memory anew."""
_HEAD = 64  # values
_BATCHES = 2
"""So many come in turn: what was learnt shows in the losses, and whether two trainings are the same. New tokens would hide it."""


@dataclass(frozen=True)
class TrainingShape:
    """Size of the model, and the batch that a step has."""

    width: int
    layers: int
    vocabulary: int
    sequences: int
    tokens: int
    dropout: float = 0.0
    dtype: str = "bfloat16"
    """Of the parameters: "bfloat16", which have master weights in float32, or "float32"."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[self.dtype]

    @property
    def feed_forward(self) -> int:
        return self.width * 11 // 4

    @property
    def layer_elements(self) -> int:
        return 4 * self.width**2 + 3 * self.width * self.feed_forward + 2 * self.width

    @property
    def elements(self) -> int:
        return self.layers * self.layer_elements + 2 * self.vocabulary * self.width + self.width

    @property
    def largest_parameter(self) -> int:
        return max(self.vocabulary * self.width, self.width * self.feed_forward)

    @property
    def numels(self) -> list[int]:
        """Elements of each parameter, in the model's order."""
        width, inner = self.width, self.feed_forward
        layer = [width, width, *[width**2] * 4, *[width * inner] * 3]
        return [self.vocabulary * width, *layer * self.layers, width, self.vocabulary * width]

    @property
    def nbytes(self) -> int:
        """Parameters and gradients, AdamW's two averages, and master weights in float32 where parameters are in bfloat16."""
        masters = 0 if self.dtype == "float32" else 4
        return (2 * self.torch_dtype.itemsize + masters + 8) * self.elements


class Embedding(nn.Embedding):
    """Has small values from the beginning: DeepSpeed takes them away as soon as they are made."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.weight.mul_(0.02)


class Layer(nn.Module):
    """Attention and a gated MLP, as Llama has them. Positions are in no way encoded: nothing here depends on what is learned."""

    def __init__(self, shape: TrainingShape) -> None:
        super().__init__()
        width = shape.width
        self._heads, self._dropout = max(1, width // _HEAD), shape.dropout
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, shape.feed_forward, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.feed_forward, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        normed = self.before_attention(x)
        query, key, value = (
            project(normed).view(batch, length, self._heads, -1).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        normed = self.before_mlp(x)
        changed = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return x + functional.dropout(changed, self._dropout, self.training)


class Llama(nn.Module):
    """Returns the loss of predicting each next token. ``recomputed``: layers keep only their input for the backward."""

    def __init__(self, shape: TrainingShape, recomputed: bool = False) -> None:
        super().__init__()
        self.embedding = Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self._recomputed = recomputed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self._recomputed else layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    @property
    def blocks(self) -> list[nn.Module]:
        """What can leave memory: all but the last norm."""
        return [self.embedding, *self.layers, self.head]


def make(shape: TrainingShape, recomputed: bool = False) -> Llama:
    """Return the model in training mode, the same at each call."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(shape.torch_dtype)  # never in float32 in between, which would be a second model in memory
    try:
        return Llama(shape, recomputed)
    finally:
        torch.set_default_dtype(before)


def batch(shape: TrainingShape, step: int) -> torch.Tensor:
    """Return the tokens of a step, the same at each call."""
    numbers = torch.Generator().manual_seed(step % _BATCHES)
    return torch.randint(0, shape.vocabulary, (shape.sequences, shape.tokens), generator=numbers)
