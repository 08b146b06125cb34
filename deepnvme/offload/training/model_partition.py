"""Division of a model's parameters into blocks, and those that stay in memory."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from deepnvme.model.structure import ModelBlock, Structure, structure_of, weights_by_name
from deepnvme.offload.activations.saved_tensor import is_distributed
from deepnvme.offload.tiles.layers import tile_names

T = TypeVar("T")


class ModelPartition(NamedTuple):
    """Division of a model's parameters into blocks, and a rest that stays in memory."""

    modules: list[nn.Module]
    """The module of each block; of tied tiles, which are one block, the first tile. A module may be inside of another."""
    params: list[list[nn.Parameter]]
    """The parameters of each block: those of its module that belong to no block inside of it. No list is empty."""
    rest: list[nn.Parameter]
    """Parameters that stay in memory, because they are in no block, or several blocks use them."""
    tied: dict[nn.Module, nn.Module]
    """For each further tile of a block of tied tiles, the first tile, which is in :attr:`modules`."""
    tiles: set[nn.Module]
    """The modules in :attr:`modules` and :attr:`tied` that are tiles of a :class:`TiledLayer`."""

    def by_module(self, blocks: Sequence[T]) -> dict[nn.Module, T]:
        """Map each block's module, and tiles tied to it, to the block's value. ``blocks`` has one value for each block."""
        found = dict(zip(self.modules, blocks, strict=False))
        return {**found, **{module: found[first] for module, first in self.tied.items()}}

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
    groups = _tied_groups(structure, set(tiles.values()))
    needed = [{name for block in group for name in block.weights} for group in groups]
    users = Counter([*structure.rest, *(name for names in needed for name in names)])
    alone = {name for name, number in users.items() if number == 1} - set(structure.rest)
    found = ModelPartition([], [], [], {}, set())
    for group in groups:
        names = dict.fromkeys(name for block in group for name in block.weights if name in alone)
        own = [weight for name in names if isinstance(weight := weights[name], nn.Parameter)]
        if own:
            first, *others = (model.get_submodule(block.name) for block in group)
            found.modules.append(first)
            found.params.append(own)
            found.tied.update(dict.fromkeys(others, first))
            found.tiles.update(each for each in (first, *others) if each in tiles)
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


def _tied_groups(structure: Structure, tiles: set[str]) -> list[list[ModelBlock]]:
    """Return the blocks in groups: each block by itself, and tiles that share a weight together, since they are one block."""
    groups: list[list[ModelBlock]] = []
    group_of: dict[str, list[ModelBlock]] = {}
    for block in structure.blocks:
        tied = [group_of[name] for name in block.weights if name in group_of] if block.name in tiles else []
        group = tied[0] if tied else []
        group.append(block)
        if block.name in tiles:
            group_of.update((name, group) for name in block.weights if name not in structure.rest)
        if not tied:
            groups.append(group)
    return groups
