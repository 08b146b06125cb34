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
    """Parameters that stay in memory, because they are in no block, or several blocks use them."""
    tiles: set[nn.Module]
    """The modules in :attr:`modules` that are tiles of a :class:`TiledLayer`."""

    def with_single_elements_in_memory(self) -> ModelPartition:
        """Return a partition in which parameters of one element stay in memory.

        They take none to speak of, have no rows to divide among ranks, and programs change them between steps: CLIP's clamps its
        ``logit_scale``. Such a write to a parameter on the drive would be lost, since it may leave NaN as it is.
        """
        params = [[param for param in some if param.numel() != 1] for some in self.params]
        single = [param for some in self.params for param in some if param.numel() == 1]
        kept = [index for index, some in enumerate(params) if some]
        return self._replace(
            modules=[self.modules[index] for index in kept], params=[params[index] for index in kept], rest=self.rest + single
        )


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
        TypeError: If there are both modules and names in ``blocks``.
        ValueError: If a module is not the model's, or is a list, which is never called; if a name matches nothing; if a
            parameter cannot be offloaded.
    """
    for param in model.parameters():
        if is_distributed(param):
            raise ValueError(
                "the model was wrapped by fully_shard(), and OffloadedTraining gathers and averages itself: build the model anew,"
                ' with torch.device("meta"), and call OffloadedTraining(model_on_meta, ..., checkpoint=model.state_dict(),'
                " process_group=mesh.get_group()). Each rank then reads the same shards"
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
        own = [weight for name in names if isinstance(weight := weights[name], nn.Parameter)]
        if own:
            module = model.get_submodule(block.name)
            found.modules.append(module)
            found.params.append(own)
            found.tiles.update({module} & tiles.keys())
    in_blocks = {param for params in found.params for param in params}
    found.rest.extend(param for param in model.parameters() if param not in in_blocks)
    return found


def _structure_with_tiles(model: nn.Module, blocks: list[nn.Module | str] | None) -> Structure:
    modules = [each for each in blocks or () if isinstance(each, nn.Module)]
    names = [each for each in blocks or () if isinstance(each, str)]
    if blocks is None or (names and not modules):
        return structure_of(model, [*names, *map(glob.escape, tile_names(model))])
    if len(modules) != len(blocks):
        kinds = ", ".join(sorted({type(each).__name__ for each in blocks}))
        raise TypeError(f"blocks must be modules, or names of modules, and not both, got {kinds}")
    inside = {each: name for name, each in model.named_modules()}
    for module in modules:
        if module not in inside:
            raise ValueError(f"blocks: a {type(module).__name__} is no module of the model")
    with_parameters = [module for module in modules if next(module.parameters(), None) is not None]
    return structure_of(model, [glob.escape(inside[module]) for module in with_parameters], find=False)
