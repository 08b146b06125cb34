"""Replace large layers of a model by tiled ones, and convert state dicts between whole and tiled weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from deepnvme.model.weight_differences import WeightMismatch
from deepnvme.telemetry.sizes import ByteCount, byte_count

from .layers import Part, Taken, TiledEmbedding, TiledLayer, TiledLinear, check_replaceable, tile_sizes


def tile_large_layers(model: nn.Module, max_bytes: ByteCount) -> list[str]:
    """Replace a model's linear layers and embeddings by tiled ones, if their weights are large. Changes the model in place.

    Each :class:`torch.nn.Linear` becomes a :class:`TiledLinear` split by outputs, each :class:`torch.nn.Embedding` a
    :class:`TiledEmbedding`. The tiles use the memory of the whole weights: nothing is copied, also on the ``"meta"`` device.
    Tied weights stay tied, and parameters keep ``requires_grad``, dtype and device. They are new objects: make optimizers
    afterwards.

    Args:
        model: The model. Subclasses of the two classes, also those of parametrizations, are left as they are.
        max_bytes: Most bytes of a tile's weight, or a size such as "256MiB". A layer with a larger weight is tiled. The bias is
            not counted.

    Returns:
        The names of the layers that were replaced, in the order of ``model.named_modules()``.

    Raises:
        ValueError: If one row of a large weight has more than ``max_bytes``; if a large layer has hooks, ``max_norm``,
            gradients or parameters of a subclass, such as DTensor; if its weight is tied to a parameter outside of
            the layers to be tiled; if it is the model itself; if the model has tiled layers already. The model is unchanged then.
    """
    max_bytes = byte_count(max_bytes, "max_bytes")
    if any(isinstance(module, TiledLayer) for module in model.modules()):
        raise ValueError("the model has tiled layers already: make it anew to tile it in another way")
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    layers: list[nn.Module] = [each for each in names if type(each) in (nn.Linear, nn.Embedding)]
    large = [each for each in layers if each.get_parameter("weight").nbytes > max_bytes]
    taken: Taken = {}
    tiled = {layer: _tiled(layer, names[layer][0], max_bytes, taken) for layer in large}
    _check_ties(names, tiled)
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
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, TiledLayer):
            continue
        prefix = f"{path}." if path else ""
        for name, parts in module.parts().items():
            tensors = [state.pop(f"{prefix}tiles.{part.tile}.{name}") for part in parts]
            key = tuple(map(id, tensors))
            if key not in joined:
                joined[key] = torch.cat([each.detach() for each in tensors])
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
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, TiledLayer):
            continue
        prefix = f"{path}." if path else ""
        for name, parts in module.parts().items():
            if prefix + name not in found:
                continue
            whole = found.pop(prefix + name)
            wanted = (parts[-1].rows.stop, *getattr(module.tiles[0], name).shape[1:])
            if shape(whole) != wanted:
                raise WeightMismatch(what, [f"shape: '{prefix}{name}' should be {list(wanted)}, found {list(shape(whole))}"])
            for tile, rows in parts:
                found[f"{prefix}tiles.{tile}.{name}"] = part(whole, [rows, *map(slice, wanted[1:])])
    return found


def _tiled(layer: nn.Module, name: str, max_bytes: int, taken: Taken) -> TiledLayer:
    """Return a tiled layer to take the place of a whole one. Raises ValueError if the layer cannot be tiled."""
    if not name:
        raise ValueError("the model is a large layer itself: put it into a module, and tile that")
    check_replaceable(layer, name)
    assert isinstance(layer, nn.Linear | nn.Embedding)
    rows, columns = layer.weight.shape
    row_bytes = columns * layer.weight.element_size()
    if row_bytes > max_bytes:
        raise ValueError(f"max_bytes must be at least the {row_bytes} bytes of a row of {name}.weight, got {max_bytes}")
    sizes = tile_sizes(rows, max_bytes // row_bytes)
    return TiledLinear(layer, sizes, taken) if isinstance(layer, nn.Linear) else TiledEmbedding(layer, sizes, taken)


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
