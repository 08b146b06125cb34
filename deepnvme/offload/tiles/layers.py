"""A linear layer and an embedding whose rows are cut into tiles, each of which is a module of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import nn

_ALIGNED_ROWS = 96
"""Tiles with at least this many rows begin at a multiple of it.

The bits of a row then do not depend on the tile that has it. Measured with MKL: float64 needs a multiple of 24, float32 of 8;
bfloat16 (oneDNN) needs none.
"""

Taken = dict[tuple[int, int, int], nn.Parameter]
"""Parameters of tiles by the ``id`` of the whole parameter and the tile's rows: tied parameters are cut once."""


class Part(NamedTuple):
    """One tile's part of a parameter of the whole layer."""

    tile: int
    """Index of the tile in the layer's ``tiles``."""
    rows: slice
    """The rows of the whole parameter that the tile has."""


class TiledLayer(nn.Module):
    """A layer whose parameters are divided by rows among smaller layers, its ``tiles``.

    Args:
        sizes: How many rows each tile has.
        tiles: The tiles, on the meta device.
        layer: The whole layer. Contiguous parameters share their memory with those of the tiles.
        taken: Parameters of tiles that earlier calls have made. New ones are added.
    """

    def __init__(self, sizes: Sequence[int], tiles: Sequence[nn.Module], layer: nn.Module, taken: Taken) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.rows = [slice(begin, end) for begin, end in pairwise([0, *accumulate(sizes)])]
        """The rows of each tile."""
        self.tiles = nn.ModuleList(tiles)
        for name, whole in layer.named_parameters(recurse=False):
            for tile, rows in self.parts()[name]:
                key = (id(whole), rows.start, rows.stop)
                if key not in taken:
                    taken[key] = _part_of(whole, rows)
                setattr(self.tiles[tile], name, taken[key])
        self.train(layer.training)

    def parts(self) -> dict[str, list[Part]]:
        """Return how each parameter of the whole layer is divided among the tiles, by the parameter's name."""
        return {name: [Part(*each) for each in enumerate(self.rows)] for name, _ in self.tiles[0].named_parameters()}


class TiledLinear(TiledLayer):
    """A :class:`torch.nn.Linear` whose outputs are cut into tiles, used one after the other in forward and backward.

    ``tiles`` are ordinary :class:`torch.nn.Linear` modules, with parameters, hooks and gradients of their own.

    The output and the gradients of weight and bias have the bits of :class:`torch.nn.Linear`, as far as the matrix
    multiplication computes a row alike in matrices of other heights (see the guide). The gradient of the input is a sum over
    the tiles, and equal up to rounding.

    :func:`tile_large_layers` makes it. State dicts have the names of the tiles; :func:`untiled_state_dict` joins them.
    """

    def __init__(self, linear: nn.Linear, sizes: Sequence[int], taken: Taken) -> None:
        has_bias, dtype = linear.bias is not None, linear.weight.dtype
        tiles = [nn.Linear(linear.in_features, rows, has_bias, device="meta", dtype=dtype) for rows in sizes]
        super().__init__(sizes, tiles, linear, taken)
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the output of the whole layer, of shape ``(*, out_features)`` for an input of shape ``(*, in_features)``."""
        return torch.cat([tile(input) for tile in self.tiles], -1)


class TiledEmbedding(TiledLayer):
    """A :class:`torch.nn.Embedding` whose rows are cut into tiles, each of which looks up only its own rows.

    ``tiles`` are ordinary :class:`torch.nn.Embedding` modules, with parameters, hooks and gradients of their own. Output and
    gradients have the bits of :class:`torch.nn.Embedding`. Each forward calls all tiles, even one that has no row to look up,
    whose gradient is then zero. On a GPU, the host waits once for each tile, to know how many rows it has to look up.

    :func:`tile_large_layers` makes it. State dicts are as for :class:`TiledLinear`.
    """

    def __init__(self, embedding: nn.Embedding, sizes: Sequence[int], taken: Taken) -> None:
        padding, begin, tiles = embedding.padding_idx, 0, []
        for rows in sizes:
            here = padding is not None and begin <= padding < begin + rows
            tiles.append(
                nn.Embedding(
                    rows,
                    embedding.embedding_dim,
                    padding - begin if here and padding is not None else None,
                    scale_grad_by_freq=embedding.scale_grad_by_freq,
                    sparse=embedding.sparse,
                    device="meta",
                    dtype=embedding.weight.dtype,
                )
            )
            begin += rows
        super().__init__(sizes, tiles, embedding, taken)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows at the indices in ``input``, of shape ``(*, embedding_dim)`` for an input of shape ``(*)``.

        Raises:
            IndexError: For an index that is out of range.
        """
        numbers = input.flatten()
        places, found = [], []
        for rows, tile in zip(self.rows, self.tiles, strict=True):
            here = ((numbers >= rows.start) & (numbers < rows.stop)).nonzero().squeeze(1)
            places.append(here)
            found.append(tile(numbers[here] - rows.start))
        place = torch.cat(places)
        if place.numel() < numbers.numel():
            raise IndexError(f"index out of range: the embedding has {self.num_embeddings} rows")
        return torch.cat(found)[place.argsort()].view((*input.shape, self.embedding_dim))


def tile_names(model: nn.Module) -> list[str]:
    """Return the names of the tiles in a model."""
    return [
        f"{path}.tiles.{index}" if path else f"tiles.{index}"
        for path, module in model.named_modules()
        if isinstance(module, TiledLayer)
        for index in range(len(module.tiles))
    ]


def tile_sizes(rows: int, most: int) -> list[int]:
    """Divide a layer's rows into as few and as even tiles as possible, each of at most ``most`` rows. Return their rows."""
    unit = _ALIGNED_ROWS if most >= _ALIGNED_ROWS else 1
    units = math.ceil(rows / unit)
    count = math.ceil(units / (most // unit))
    ends = [min(units * number // count * unit, rows) for number in range(count + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def _part_of(whole: nn.Parameter, rows: slice) -> nn.Parameter:
    """Return rows of a parameter as a new parameter, which shares the memory if they are contiguous.

    The rows are taken from ``data``: views of the parameter would share one version counter, and autograd would take an in-place
    change of one part for a change of all.
    """
    part = nn.Parameter(whole.data[rows].contiguous(), whole.requires_grad)
    vars(part).update(vars(whole))  # what the user or a framework has noted on it
    return part


def check_replaceable(layer: nn.Module, name: str) -> None:
    """Raise ValueError if a layer has properties that tiles would lose. ``name``: the layer's name, for the message."""
    parameters = dict(layer.named_parameters(recurse=False))
    owners = (layer, *parameters.values())
    hooks = (getattr(owner, each) for owner in owners for each in dir(owner) if each.endswith("_hooks"))
    added = parameters.keys() - {"weight", "bias"} or [*layer.children(), *layer.buffers()]
    lost = {
        "parameters of a subclass": any(type(each) is not nn.Parameter for each in parameters.values()),
        "max_norm": getattr(layer, "max_norm", None) is not None,
        "parameters, buffers or modules that were added to it": bool(added),
        "a forward of its own": "forward" in vars(layer),
        "hooks": any(isinstance(each, dict) and each for each in hooks),
        "gradients": any(each.grad is not None for each in parameters.values()),
    }
    found = [what for what, has in lost.items() if has]
    if found:
        raise ValueError(f"{name} has {', '.join(found)}, which tiles would lose: tile the model before")
