"""Models whose activations are to be offloaded: a GPT's blocks, and a chain that computes little for what autograd saves."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils.checkpoint import checkpoint

Checkpointing = Literal["none", "torch"]


@dataclass(frozen=True)
class GPTShape:
    """Blocks of a GPT, and the batch that a step has."""

    width: int
    layers: int
    sequences: int
    tokens: int
    dropout: float = 0.0


@dataclass(frozen=True)
class ChainShape:
    """A chain of element-wise functions, each of which saves its result."""

    nbytes: int
    """Of each tensor, in float32."""
    length: int


class Block(torch.nn.Module):
    """Attention and an MLP, as GPT-2 has them."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        width = shape.width
        self._heads, self._dropout = max(1, width // 64), shape.dropout
        self.before_attention, self.before_mlp = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width),
            torch.nn.GELU(),
            torch.nn.Linear(4 * width, width),
            torch.nn.Dropout(shape.dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            each.view(batch, length, self._heads, -1).transpose(1, 2)
            for each in self.qkv(self.before_attention(x)).split(width, dim=2)
        )
        dropout = self._dropout if self.training else 0.0
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        result: torch.Tensor = x + self.mlp(self.before_mlp(x))
        return result


class GPT(torch.nn.Module):
    """A stack of blocks, without embeddings. ``checkpointed``: by torch, block by block."""

    def __init__(self, shape: GPTShape, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self._checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._checkpointed else block(x)
        return x


class Chain(torch.nn.Module):
    """Sigmoids, one after the other: of each, backward needs the result and little time."""

    def __init__(self, shape: ChainShape) -> None:
        super().__init__()
        self._length = shape.length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self._length):
            x = torch.sigmoid(x)
        return x


def make(shape: GPTShape | ChainShape) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return the model and its input, the same at each call. The chain's input has a gradient, since it has no parameters."""
    torch.manual_seed(0)
    if isinstance(shape, GPTShape):
        return GPT(shape), torch.randn(shape.sequences, shape.tokens, shape.width)
    return Chain(shape), torch.randn(shape.nbytes // 4, requires_grad=True)


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts what autograd saves in its block, from outside of whatever offloads it: the bytes of different storages.

    Parameters and tensors of less than ``min_bytes`` do not count. Every tensor stays where it is, so that no storage's address
    can come twice before the graph is freed.
    """

    def __init__(self, model: torch.nn.Module, min_bytes: int) -> None:
        self._sizes: dict[int, int] = {}
        not_counted = {tensor.untyped_storage().data_ptr() for tensor in itertools.chain(model.parameters(), model.buffers())}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in not_counted and storage.nbytes() >= min_bytes:
                self._sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        super().__init__(pack, lambda tensor: tensor)

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())
