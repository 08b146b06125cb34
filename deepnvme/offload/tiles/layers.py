"""A linear layer and an embedding whose weights are cut into tiles, each of which is a module of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

ALIGNED_ROWS = 96
"""Tiles with at least this many rows begin at a multiple of it.

The bits of a row then do not depend on the tile that has it. Measured with MKL: float64 needs a multiple of 24, float32 of 8;
bfloat16 (oneDNN) needs none.
"""

Slices = tuple[slice, ...]
_Layer = TypeVar("_Layer", bound="TiledLayer")


class Part(NamedTuple):
    """One tile's part of a parameter of the whole layer."""

    tile: int
    """Index of the tile in the layer's ``tiles``."""
    slices: Slices
    """Where the part lies in the whole parameter: one slice for each dimension."""


class TiledLayer(nn.Module):
    """A layer whose parameters are divided among smaller layers, its ``tiles``."""

    tiles: nn.ModuleList

    def parts(self) -> dict[str, list[Part]]:
        """Return how each parameter of the whole layer is divided among the tiles, by the parameter's name."""
        raise NotImplementedError

    def take_over(self: _Layer, layer: nn.Module, taken: dict[tuple[int, str], nn.Parameter] | None = None) -> _Layer:
        """Give the tiles the parameters of a whole layer, and this layer its training mode.

        Args:
            layer: The whole layer. Tiles that are contiguous in its memory share it; others get copies.
            taken: Tile parameters made by earlier calls, by the ``id`` of the whole parameter and the text of the slices. They
                are used again for tied parameters, and new ones are added.

        Returns:
            This layer.
        """
        taken = {} if taken is None else taken
        for name, parts in self.parts().items():
            whole = getattr(layer, name)
            for tile, slices in parts:
                key = (id(whole), str(slices))
                if key not in taken:
                    taken[key] = _part_of(whole, slices)
                setattr(self.tiles[tile], name, taken[key])
        return self.train(layer.training)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any) -> None:
        """Cut parameters of the whole layer, if the state dict has them, into the tiles' parameters, which torch loads next."""
        assign = local_metadata.get("assign_to_params_buffers", False)
        error_messages = args[-1]
        for name, parts in self.parts().items():
            if prefix + name not in state_dict:
                continue
            whole, shape = state_dict.pop(prefix + name), shape_of(parts)
            if whole.shape != shape:
                error_messages.append(
                    f"size mismatch for {prefix}{name}: copying a param with shape {whole.shape} from checkpoint,"
                    f" the shape in current model is {shape}."
                )
                continue
            for tile, slices in parts:
                part = whole[slices]
                state_dict[f"{prefix}tiles.{tile}.{name}"] = part.contiguous() if assign else part
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            raise AttributeError(
                f"a {type(self).__name__} has no {name!r} of its own but one in each of its tiles;"
                " deepnvme.offload.untiled_state_dict puts them together"
            )
        return super().__getattr__(name)


class TiledLinear(TiledLayer):
    """A :class:`torch.nn.Linear` whose weight is cut into tiles, used one after the other in forward and backward.

    ``tiles`` are ordinary :class:`torch.nn.Linear` modules, with parameters, hooks and gradients of their own. They are in the
    order of their outputs, and those with the same outputs in the order of their inputs. The output of a tile is written into
    the whole output at once, so that in addition there is the output of only one tile at a time.

    If the layer is split by outputs only, its output and the gradients of weight and bias have the bits of
    :class:`torch.nn.Linear`, as far as the matrix multiplication computes a row alike in matrices of other heights (see the
    guide). The gradient of the input is a sum over the tiles, and equal up to rounding. If the layer is split by inputs, the
    output is such a sum as well.

    ``load_state_dict`` takes the state dict of a :class:`torch.nn.Linear` as well as one with the tiles' names, which
    ``state_dict`` returns; :func:`untiled_state_dict` returns the former.

    Args:
        in_features: As in :class:`torch.nn.Linear`.
        out_features: As in :class:`torch.nn.Linear`.
        bias: As in :class:`torch.nn.Linear`. It belongs to the first tile of a row of tiles.
        out_splits: Number of tiles along the outputs, or how many outputs each has.
        in_splits: Number of tiles along the inputs, or how many inputs each has.
        device: As in :class:`torch.nn.Linear`.
        dtype: As in :class:`torch.nn.Linear`.

    Raises:
        ValueError: If there are fewer features than splits, or the sizes do not add up to the features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        out_splits: int | Sequence[int] = 1,
        in_splits: int | Sequence[int] = 1,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.in_sizes = sizes_of("in_splits", in_splits, in_features)
        self.out_sizes = sizes_of("out_splits", out_splits, out_features)
        self.tiles = nn.ModuleList(
            nn.Linear(columns, rows, bias and number == 0, device=device, dtype=dtype)
            for rows in self.out_sizes
            for number, columns in enumerate(self.in_sizes)
        )
        self._has_bias = bias
        if len(self.in_sizes) > 1:  # the tiles were initialized as if they had no inputs but their own
            self.reset_parameters()

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, out_splits: int | Sequence[int] = 1, in_splits: int | Sequence[int] = 1
    ) -> TiledLinear:
        """Return a tiled layer with the parameters of a linear layer. The linear layer must not be used afterwards.

        Args:
            linear: A :class:`torch.nn.Linear`, on any device, ``"meta"`` too. If it is split by outputs only, the tiles share its
                memory and nothing is copied. Tiles of a split by inputs are copies.
            out_splits: As for the class.
            in_splits: As for the class.

        Raises:
            TypeError: If ``linear`` is of a subclass, or its parameters are not plain ``torch.nn.Parameter`` objects.
            ValueError: If ``linear`` has hooks, a ``forward`` of its own or gradients; or for splits as the class.
        """
        check_replaceable(linear, nn.Linear, type(linear).__name__)
        return cls._like(linear, out_splits, in_splits).take_over(linear)

    @classmethod
    def _like(cls, linear: nn.Linear, out_splits: int | Sequence[int], in_splits: int | Sequence[int] = 1) -> TiledLinear:
        """Return a tiled layer on the meta device with the sizes of a linear layer, for :meth:`take_over`."""
        has_bias = linear.bias is not None
        shape = linear.in_features, linear.out_features
        return cls(*shape, has_bias, out_splits=out_splits, in_splits=in_splits, device="meta", dtype=linear.weight.dtype)

    def reset_parameters(self) -> None:
        """Initialize the parameters with the distribution of :class:`torch.nn.Linear`."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the output of the whole layer, of shape ``(*, out_features)`` for an input of shape ``(*, in_features)``."""
        if len(self.tiles) == 1:
            return self.tiles[0](input)  # type: ignore[no-any-return]
        inputs = torch.split(input, self.in_sizes, -1)
        tiles = iter(self.tiles)
        output: torch.Tensor | None = None
        for columns in _ranges(self.out_sizes):
            for index, part in enumerate(inputs):
                product = next(tiles)(part)
                if output is None:
                    output = product.new_empty((*input.shape[:-1], self.out_features))
                output = _write(output, product, (..., columns), index > 0)
                del product  # before the next tile computes
        assert output is not None
        return output

    def parts(self) -> dict[str, list[Part]]:
        """Return how ``weight`` and ``bias`` are divided among the tiles."""
        grid = [(rows, columns) for rows in _ranges(self.out_sizes) for columns in _ranges(self.in_sizes)]
        parts = {"weight": [Part(*each) for each in enumerate(grid)]}
        if self._has_bias:
            parts["bias"] = [Part(tile, (rows,)) for tile, (rows, columns) in enumerate(grid) if columns.start == 0]
        return parts

    def extra_repr(self) -> str:
        """Return the sizes of the whole layer and whether it has a bias, as :class:`torch.nn.Linear` shows them."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._has_bias}"


class TiledEmbedding(TiledLayer):
    """A :class:`torch.nn.Embedding` whose rows are cut into tiles, each of which looks up only its own rows.

    ``tiles`` are ordinary :class:`torch.nn.Embedding` modules, with parameters, hooks and gradients of their own. Output and
    gradients have the bits of :class:`torch.nn.Embedding`. Each forward calls all tiles, even one that has no row to look up,
    whose gradient is then zero. On a GPU, the host waits once for each tile, to know how many rows it has to look up.

    State dicts are as for :class:`TiledLinear`.

    Args:
        num_embeddings: As in :class:`torch.nn.Embedding`.
        embedding_dim: As in :class:`torch.nn.Embedding`.
        padding_idx: As in :class:`torch.nn.Embedding`.
        splits: Number of tiles, or how many rows each has.
        scale_grad_by_freq: As in :class:`torch.nn.Embedding`.
        sparse: As in :class:`torch.nn.Embedding`: each tile's gradient is sparse.
        device: As in :class:`torch.nn.Embedding`.
        dtype: As in :class:`torch.nn.Embedding`.

    ``max_norm`` is missing: it changes weights in the forward, and if the weights are on a drive and only read for the forward,
    the change is lost.

    Raises:
        ValueError: If there are fewer rows than splits, or the sizes do not add up to the rows; or for a ``padding_idx`` out
            of range.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        splits: int | Sequence[int] = 1,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx must be in [{-num_embeddings}, {num_embeddings}), got {padding_idx}")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.sizes = sizes_of("splits", splits, num_embeddings)
        self.tiles = nn.ModuleList()
        for rows in _ranges(self.sizes):
            here = self.padding_idx is not None and rows.start <= self.padding_idx < rows.stop
            self.tiles.append(
                nn.Embedding(
                    rows.stop - rows.start,
                    embedding_dim,
                    self.padding_idx - rows.start if here and self.padding_idx is not None else None,
                    scale_grad_by_freq=scale_grad_by_freq,
                    sparse=sparse,
                    device=device,
                    dtype=dtype,
                )
            )

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, *, splits: int | Sequence[int] = 1) -> TiledEmbedding:
        """Return a tiled embedding with the weight of an ordinary one. The ordinary one must not be used afterwards.

        Args:
            embedding: A :class:`torch.nn.Embedding`, on any device, ``"meta"`` too. The tiles share its memory: nothing is
                copied.
            splits: As for the class.

        Raises:
            TypeError: If ``embedding`` is of a subclass, or its weight is not a plain ``torch.nn.Parameter``.
            ValueError: If ``embedding`` has ``max_norm``, hooks, a ``forward`` of its own or a gradient; or for splits as the
                class.
        """
        check_replaceable(embedding, nn.Embedding, type(embedding).__name__)
        return cls._like(embedding, splits).take_over(embedding)

    @classmethod
    def _like(cls, embedding: nn.Embedding, splits: int | Sequence[int]) -> TiledEmbedding:
        """Return a tiled embedding on the meta device with the sizes of an ordinary one, for :meth:`take_over`."""
        return cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            splits=splits,
            scale_grad_by_freq=embedding.scale_grad_by_freq,
            sparse=embedding.sparse,
            device="meta",
            dtype=embedding.weight.dtype,
        )

    def reset_parameters(self) -> None:
        """Initialize the weights with the distribution of :class:`torch.nn.Embedding`."""
        for tile in self.tiles:
            tile.reset_parameters()  # type: ignore[operator]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows at the indices in ``input``, of shape ``(*, embedding_dim)`` for an input of shape ``(*)``.

        Raises:
            IndexError: For an index that is out of range.
        """
        if len(self.tiles) == 1:
            return self.tiles[0](input)  # type: ignore[no-any-return]
        numbers = input.flatten()
        output: torch.Tensor | None = None
        found = 0
        for rows, tile in zip(_ranges(self.sizes), self.tiles, strict=True):
            here = ((numbers >= rows.start) & (numbers < rows.stop)).nonzero().squeeze(1)
            looked_up = tile(numbers[here] - rows.start)
            if output is None:
                output = looked_up.new_empty((numbers.numel(), self.embedding_dim))
            output = _write(output, looked_up, (here,), False)
            del looked_up
            found += here.numel()
        if found < numbers.numel():
            raise IndexError(f"index out of range: the embedding has {self.num_embeddings} rows")
        assert output is not None
        return output.view((*input.shape, self.embedding_dim))

    def parts(self) -> dict[str, list[Part]]:
        """Return how the rows of ``weight`` are divided among the tiles."""
        columns = slice(0, self.embedding_dim)
        return {"weight": [Part(tile, (rows, columns)) for tile, rows in enumerate(_ranges(self.sizes))]}

    def extra_repr(self) -> str:
        """Return the size of the whole embedding and its padding index, as :class:`torch.nn.Embedding` shows them."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


class _Write(torch.autograd.Function):
    """An autograd function for ``output[index] = part``, or ``+=``, in place.

    With a plain assignment, autograd would copy the gradient of the whole output for each part.
    """

    @staticmethod
    def forward(output: torch.Tensor, part: torch.Tensor, index: tuple[Any, ...], add: bool) -> torch.Tensor:
        if add:
            output[index] += part
        else:
            output[index] = part
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.mark_dirty(inputs[0])
        ctx.index = inputs[2]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        output_needs, part_needs, *_ = ctx.needs_input_grad
        return gradient if output_needs else None, gradient[ctx.index] if part_needs else None, None, None


# A function that calls this one would be compiled by itself where a tile breaks the graph, and autograd refuses the change in
# place of what a compiled function was given.
_write: Callable[[torch.Tensor, torch.Tensor, tuple[Any, ...], bool], torch.Tensor] = _Write.apply


def tile_names(model: nn.Module) -> list[str]:
    """Return the names of the tiles in a model, without a tile that is a whole layer or is tiled itself."""
    return [
        f"{path}.tiles.{index}" if path else f"tiles.{index}"
        for path, module in model.named_modules()
        if isinstance(module, TiledLayer) and len(module.tiles) > 1
        for index, tile in enumerate(module.tiles)
        if not isinstance(tile, TiledLayer)
    ]


def sizes_of(name: str, splits: int | Sequence[int], features: int) -> list[int]:
    """Return the sizes of the tiles along one dimension.

    Args:
        name: Name of the user's argument that ``splits`` is, for messages.
        splits: The number of tiles, or the size of each tile.
        features: Size of the whole dimension, which the sizes of the tiles add up to.

    Raises:
        ValueError: If there are fewer features than splits, or the sizes are not positive or do not add up.
    """
    if not isinstance(splits, int):
        if sum(splits) != features or min(splits, default=0) < 1:
            raise ValueError(f"{name} must be positive and add up to {features}, got {list(splits)}")
        return list(splits)
    if not 1 <= splits <= features:
        raise ValueError(f"{name} must be in [1, {features}], got {splits}")
    unit = ALIGNED_ROWS if features // splits >= ALIGNED_ROWS else 1
    units = math.ceil(features / unit)
    ends = [min(units * number // splits * unit, features) for number in range(splits + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def splits_within(features: int, most: int) -> int:
    """Return the smallest number of tiles for :func:`sizes_of` so that none has more than ``most`` (at least 1) features."""
    unit = ALIGNED_ROWS if most >= ALIGNED_ROWS else 1
    return math.ceil(math.ceil(features / unit) / (most // unit))


def _ranges(sizes: Sequence[int]) -> Iterator[slice]:
    return (slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True))


def shape_of(parts: Sequence[Part]) -> tuple[int, ...]:
    """Return the shape of a parameter of the whole layer, given its parts in order."""
    return tuple(each.stop for each in parts[-1].slices)


def _part_of(whole: nn.Parameter, slices: Slices) -> nn.Parameter:
    """Return a part of a parameter as a new parameter, which shares the memory if the part is contiguous.

    It is taken from ``data``, because a view would share one version counter with all other parts, and autograd would see a
    change of one part in place as a change of all.
    """
    part = nn.Parameter(whole.data[slices].contiguous(), whole.requires_grad)
    vars(part).update(vars(whole))  # what the user or a framework has noted on it
    return part


def check_replaceable(layer: nn.Module, kind: type[nn.Module], name: str) -> None:
    """Check that a tiled layer can take the place of a whole one without losing anything.

    Args:
        layer: The whole layer.
        kind: The class that ``layer`` must have, not a subclass of it.
        name: The layer's name, for messages.

    Raises:
        TypeError: If ``layer`` is of another class, or its parameters are not plain ``torch.nn.Parameter`` objects.
        ValueError: If ``layer`` has ``max_norm``, parametrizations, hooks, a ``forward`` of its own, gradients, or parameters,
            buffers or modules that its class does not have.
    """
    if is_parametrized(layer):
        raise ValueError(f"{name} has parametrizations, which tiles cannot have: tile it before they are registered")
    if type(layer) is not kind:
        raise TypeError(f"{name} must be a torch.nn.{kind.__name__} and no subclass, got {type(layer).__name__}")
    parameters = dict(layer.named_parameters(recurse=False))
    if any(type(parameter) is not nn.Parameter for parameter in parameters.values()):
        classes = ", ".join(type(parameter).__name__ for parameter in parameters.values())
        raise TypeError(f"the parameters of {name} must be of class torch.nn.Parameter, got {classes}")
    if getattr(layer, "max_norm", None) is not None:
        raise ValueError(f"{name} has max_norm, which changes weights in the forward: that is lost where they are only read")
    if parameters.keys() - {"weight", "bias"} or [*layer.children(), *layer.buffers()]:
        raise ValueError(f"{name} has parameters, buffers or modules that were added to it: tile it before they are")
    if "forward" in vars(layer):
        raise ValueError(f"{name} has a forward of its own, which tiles cannot have: tile it before it is changed")
    for owner in (layer, *parameters.values()):
        named = {each: getattr(owner, each) for each in dir(owner) if each.endswith("_hooks")}
        hooks = [each for each, found in named.items() if isinstance(found, dict) and found]
        if hooks:
            raise ValueError(f"{name} has hooks ({', '.join(hooks)}), which would be lost: tile it before they are registered")
    if any(parameter.grad is not None for parameter in parameters.values()):
        raise ValueError(f"{name} has gradients, which would be lost: call zero_grad() before")
