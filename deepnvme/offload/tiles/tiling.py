"""Replace large layers of a model by tiled ones, and convert state dicts between whole and tiled weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from deepnvme.model.weight_differences import WeightMismatch
from deepnvme.telemetry.sizes import ByteCount, byte_count

from .layers import Part, TiledEmbedding, TiledLayer, TiledLinear, check_replaceable, shape_of, splits_within


def tile_large_layers(model: nn.Module, max_bytes: ByteCount) -> list[str]:
    """Replace a model's linear layers and embeddings by tiled ones, if their weights are large. Changes the model in place.

    Each :class:`torch.nn.Linear` becomes a :class:`TiledLinear` split by outputs, each :class:`torch.nn.Embedding` a
    :class:`TiledEmbedding`. The tiles share the memory that the weights have: nothing is copied, also on the ``"meta"`` device.
    Tied weights stay tied, and parameters keep ``requires_grad``, dtype and device. They are new objects: make optimizers
    afterwards.

    Args:
        model: The model. Subclasses of the two classes are left as they are, with a warning if they are large.
        max_bytes: Most bytes of a tile's weight, or a size such as "256MiB". A layer with a larger weight is tiled. The bias is
            not counted.

    Returns:
        The names of the layers that were replaced, in the order of ``model.named_modules()``.

    Raises:
        ValueError: If one row of a large weight has more than ``max_bytes``; if a large layer has hooks, parametrizations,
            ``max_norm`` or gradients; if its weight is tied to a parameter outside of the layers to be tiled; if it is the
            model itself. The model is unchanged then.
        TypeError: If a parameter of a large layer is of a subclass, such as DTensor. The model is unchanged then.
    """
    max_bytes = byte_count(max_bytes, "max_bytes")
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    large = _large_layers(names, max_bytes)
    taken: dict[tuple[int, str], nn.Parameter] = {}
    tiled = {layer: _tiled(layer, names[layer][0], max_bytes) for layer in large}
    _check_ties(names, tiled)
    for layer, replacement in tiled.items():
        replacement.take_over(layer, taken)
    for layer, replacement in tiled.items():
        for name in names[layer]:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, replacement)
    return [names[layer][0] for layer in tiled]


def untiled_state_dict(model: nn.Module, state: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the state dict that a model would have without tiled layers, for code that does not know tiles.

    The parameters of tiled layers are copied, which takes as much memory as these layers do. Tied ones are copied once, and
    are the same tensor. The other tensors share the model's memory, as in ``model.state_dict()``.

    >>> deepnvme.save(untiled_state_dict(model, training.state_dict()["model"]), "model.pt")  # of an OffloadedTraining

    Args:
        model: The model.
        state: A state dict of ``model``, whose tensors may be mapped from a file. It is not changed. None for
            ``model.state_dict()``; all parameters must be in memory then.
    """
    # The parameters themselves show what is tied.
    state = model.state_dict(keep_vars=True) if state is None else dict(state)
    joined: dict[tuple[int, ...], torch.Tensor] = {}
    modules = list(model.named_modules(remove_duplicate=False))
    for path, module in reversed(modules):  # a tile may be tiled itself
        if not isinstance(module, TiledLayer):
            continue
        prefix = f"{path}." if path else ""
        for name, parts in module.parts().items():
            tensors = [state.pop(f"{prefix}tiles.{part.tile}.{name}") for part in parts]
            key = tuple(map(id, tensors))
            if key not in joined:
                joined[key] = _join_parts(tensors, parts)
            state[prefix + name] = joined[key]
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = value.detach() if value.requires_grad else value
    return state


Weight = TypeVar("Weight")


def cut_into_tiles(
    model: nn.Module,
    weights: Mapping[str, Weight],
    shape: Callable[[Weight], tuple[int, ...]],
    part: Callable[[Weight, Sequence[slice]], Weight],
    what: str,
) -> dict[str, Weight]:
    """Cut the weights of a model without tiled layers into the tiles of the same model with tiled layers.

    Args:
        model: The model with tiled layers.
        weights: The weights by name. A tiled layer's weight may be given whole or in tiles. Of tied weights one is enough.
        shape: Returns the shape of a weight.
        part: Returns a part of a weight, given a slice for each dimension.
        what: Beginning of an error's message.

    Returns:
        The weights by their names in ``model``.

    Raises:
        WeightMismatch: If a whole weight has another shape than the layer.
    """
    found = dict(weights)
    wrong = []
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, TiledLayer):
            continue
        prefix = f"{path}." if path else ""
        for name, parts in module.parts().items():
            if prefix + name not in found:
                continue
            whole = found.pop(prefix + name)
            if shape(whole) != shape_of(parts):
                wrong.append(f"shape: '{prefix}{name}' should be {list(shape_of(parts))}, found {list(shape(whole))}")
            else:
                found.update({f"{prefix}tiles.{each.tile}.{name}": part(whole, each.slices) for each in parts})
    if wrong:
        raise WeightMismatch(what, wrong)
    return found


def _large_layers(names: dict[nn.Module, list[str]], max_bytes: int) -> list[nn.Module]:
    """Return the layers to be tiled, among the modules that are the keys of ``names``. Warns of large layers of a subclass."""
    layers = [each for each in names if isinstance(each, nn.Linear | nn.Embedding) and each.weight.nbytes > max_bytes]
    left = [each for each in layers if type(each) not in (nn.Linear, nn.Embedding) and not is_parametrized(each)]
    if left:
        listed = ", ".join(f"{names[each][0]} ({type(each).__name__})" for each in left)
        warnings.warn(f"larger than {max_bytes} bytes, but of a subclass and not tiled: {listed}", stacklevel=3)
    return [each for each in layers if each not in left]


def _tiled(layer: nn.Module, name: str, max_bytes: int) -> TiledLayer:
    """Return a tiled layer without memory, to take the place of a whole one. Raises ValueError if the layer cannot be tiled."""
    if not name:
        raise ValueError(f"the model is a large layer itself: use Tiled{type(layer).__name__} instead")
    check_replaceable(layer, nn.Linear if isinstance(layer, nn.Linear) else nn.Embedding, name)
    assert isinstance(layer, nn.Linear | nn.Embedding)
    rows, columns = layer.weight.shape
    row_bytes = columns * layer.weight.element_size()
    if row_bytes > max_bytes:
        raise ValueError(f"max_bytes must be at least the {row_bytes} bytes of a row of {name}.weight, got {max_bytes}")
    splits = splits_within(rows, max_bytes // row_bytes)
    return TiledLinear._like(layer, splits) if isinstance(layer, nn.Linear) else TiledEmbedding._like(layer, splits)


def _check_ties(names: dict[nn.Module, list[str]], tiled: dict[nn.Module, TiledLayer]) -> None:
    """Raise ValueError if a parameter to be cut is tied to one that is not cut, or that is cut differently."""
    cuts: dict[nn.Parameter, tuple[str, list[Part]]] = {}
    for layer, replacement in tiled.items():
        for name, parts in replacement.parts().items():
            full_name = f"{names[layer][0]}.{name}"
            first, cut = cuts.setdefault(getattr(layer, name), (full_name, parts))
            if cut != parts:
                raise ValueError(f"{full_name} is tied to {first}, and max_bytes cuts them differently: untie them")
    for module in names.keys() - tiled.keys():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in cuts:
                raise ValueError(
                    f"{cuts[parameter][0]} is tied to {names[module][0]}.{name}, which is not in a torch.nn.Linear or Embedding"
                    " that can be tiled: untie them, or raise max_bytes"
                )


def _join_parts(tensors: list[torch.Tensor], parts: list[Part]) -> torch.Tensor:
    """Return the whole tensor, joined from its parts."""
    with torch.no_grad():
        whole = tensors[0].new_empty(shape_of(parts))
        for tensor, part in zip(tensors, parts, strict=True):
            whole[part.slices] = tensor
    return whole
