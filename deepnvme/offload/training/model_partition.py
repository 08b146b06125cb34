"""Division of a model's parameters into blocks, and those that stay in memory."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from deepnvme.model.structure import Structure, structure_of, weights_by_name
from deepnvme.offload.activations.saved_tensor import is_distributed
from deepnvme.offload.tiles.layers import tile_names


class ModelPartition(NamedTuple):
    """Division of a model's parameters into blocks, and a rest that stays in memory."""

    modules: list[nn.Module]
    """The module of each block. A module may be inside of another."""
    params: list[list[nn.Parameter]]
    """The parameters of each block: those of its module that belong to no block inside of it. No list is empty."""
    rest: list[nn.Parameter]
    """Parameters that stay in memory, because they are in no block, several blocks use them, or they have one element."""
    tiles: set[nn.Module]
    """The modules in :attr:`modules` that are tiles of a :class:`TiledLayer`."""


def names_of_parameters(model: nn.Module) -> dict[torch.Tensor, str]:
    """Return the first name of each parameter."""
    return {param: name for name, param in reversed(list(model.named_parameters(remove_duplicate=False)))}


def partition_model(model: nn.Module, blocks: Iterable[nn.Module | str] | None = None) -> ModelPartition:
    """Divide the parameters of a model into blocks.

    Args:
        model: On the CPU or the meta device.
        blocks: None to find the blocks. Names and patterns of some, to find others beside them: see
            :func:`deepnvme.model.structure.structure_of`. Tiles of tiled layers are always found. Or modules of the model; then
            no other module is a block.

    Raises:
        ValueError: If there are both modules and names in ``blocks``; if a module is not the model's, or is a list, which is
            never called; if a name matches nothing; if a parameter cannot be offloaded.
    """
    for param in model.parameters():
        if is_distributed(param):
            raise ValueError(
                "the model was wrapped by fully_shard(), and OffloadedTraining gathers and averages itself: build the model anew,"
                ' with torch.device("meta"), call OffloadedTraining(model_on_meta, ..., process_group=mesh.get_group()), and give'
                " its load_state_dict() the states of the model and its optimizer. Each rank then has the same shards"
            )
        if hasattr(param, "on_demand"):
            raise ValueError(
                "the model has experts that are read on demand, and OffloadedTraining reads weights itself: close(restore=True)"
                " the OffloadedExperts, or train adapters of the other modules with an optimizer of torch"
            )
        if type(param) is not nn.Parameter or param.device.type not in ("cpu", "meta") or param.layout is not torch.strided:
            kind = f"a {type(param).__name__} of layout {param.layout} on {param.device}"
            raise ValueError(f"only parameters that are dense, on the CPU, and of no subclass can be offloaded, got {kind}")
    structure = _structure_with_tiles(model, None if blocks is None else list(blocks))
    weights = weights_by_name(model)
    tiles = {model.get_submodule(name): name for name in tile_names(model)}
    users = Counter([*structure.rest, *(name for block in structure.blocks for name in set(block.weights))])
    alone = {name for name, number in users.items() if number == 1} - set(structure.rest)
    found = ModelPartition([], [], [], set())
    for block in structure.blocks:
        names = dict.fromkeys(name for name in block.weights if name in alone)
        # Those of one element take no memory to speak of, have no rows to divide among ranks, and programs change them between
        # steps: CLIP's clamps its logit_scale. Such a write to a parameter on the drive would be lost: it may leave NaN as it is.
        own = [each for name in names if isinstance(each := weights[name], nn.Parameter) and each.numel() != 1]
        if own:
            module = model.get_submodule(block.name)
            found.modules.append(module)
            found.params.append(own)
            found.tiles.update({module} & tiles.keys())
    in_blocks = {param for params in found.params for param in params}
    found.rest.extend(param for param in model.parameters() if param not in in_blocks)
    return found


def _structure_with_tiles(model: nn.Module, blocks: list[nn.Module | str] | None) -> Structure:
    names = [each for each in blocks or () if isinstance(each, str)]
    if blocks is None or (names and len(names) == len(blocks)):
        return structure_of(model, [*names, *map(glob.escape, tile_names(model))])
    inside: dict[object, str] = {each: name for name, each in model.named_modules()}
    for each in blocks:
        if each not in inside:
            raise ValueError(f"blocks must be modules of the model, or names of some, and not both, got {each!r}")
    with_parameters = [each for each in blocks if isinstance(each, nn.Module) and next(each.parameters(), None) is not None]
    return structure_of(model, [glob.escape(inside[each]) for each in with_parameters], find=False)
