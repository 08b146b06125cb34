"""Which weights are needed together: a model's tree, or only the names of a checkpoint, as blocks and extents.

Nothing is read here.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

REST = "(rest)"
"""The extent of what is in no block: it is to stay in memory. No module's name, most likely."""
SMALL = 1 << 20
"""Bytes of weights that are not worth reading again, where no list makes their module a block."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Have no forward of their own."""


class Block(NamedTuple):
    """A module whose forward needs its weights in memory."""

    name: str
    weights: tuple[str, ...]
    """By the first of their names, in the order of registration; without those of blocks inside."""


class ExtentPlan(NamedTuple):
    """Weights that are read as one: those that only one block needs, or the same several, or no block."""

    name: str
    """The block's; of weights that several need, the first one's; or REST."""
    weights: tuple[str, ...]


@dataclass(frozen=True)
class Structure:
    """What is known of a model before its weights are."""

    blocks: tuple[Block, ...]
    """In the order of registration."""
    rest: tuple[str, ...]
    """Weights in no block, and buffers."""
    ties: Mapping[str, str]
    """Further names of weights, with the first."""

    def extents(self) -> list[ExtentPlan]:
        """In the order in which they are first needed. A weight that is in the rest, too, is there only."""
        users: dict[str, list[str]] = {weight: [] for weight in self.rest}
        resident = set(users)
        for block in self.blocks:
            for weight in block.weights:
                if weight not in resident:
                    users.setdefault(weight, []).append(block.name)
        together: dict[tuple[str, ...], list[str]] = {}
        for weight, names in users.items():
            together.setdefault(tuple(names), []).append(weight)
        return [
            ExtentPlan(names[0] if len(names) == 1 else weights[0] if names else REST, tuple(weights))
            for names, weights in together.items()
        ]

    def needs(self) -> dict[str, tuple[str, ...]]:
        """The extents of each block that needs any beside the rest."""
        extent_of = {weight: extent.name for extent in self.extents() for weight in extent.weights}
        found = {
            block.name: tuple(dict.fromkeys(extent_of[weight] for weight in block.weights if extent_of[weight] != REST))
            for block in self.blocks
        }
        return {name: extents for name, extents in found.items() if extents}


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, by all of their names, in the order of registration."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found[prefix + name] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[prefix + name] = buffer
    return found


def ties_of(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Further names of the same tensor, with the first."""
    first: dict[int, str] = {}
    return {name: first[id(weight)] for name, weight in weights.items() if first.setdefault(id(weight), name) != name}


def structure_of(model: nn.Module, blocks: Sequence[str] | None = None) -> Structure:
    """Of a module, which may be on the meta device.

    ``blocks``: names of modules, or patterns such as "model.layers.*.mlp", whose ``*`` stands for one part of a name: each is a
    block, and a weight belongs to the innermost around it. Where none is named, they are found: the children of a ModuleList or
    Sequential that has several of one type (of lists in lists the outer one's), else a module that has weights of its own, with
    all that is in it; what has less than 1 MiB of weights in all is none, outside lists.

    Raises ValueError for a name or pattern of no module with weights, or of one without a forward.
    """
    weights = weights_of(model)
    ties = ties_of(weights)
    buffers = {name for name, weight in weights.items() if not isinstance(weight, nn.Parameter)}
    named = _named(model, blocks or ())
    return _structure(_place_of(model, "", weights, ties), named, ties, [name for name in buffers if name not in ties])


def structure_of_names(
    sizes: Mapping[str, int], ties: Mapping[str, str], blocks: Sequence[str] | None = None
) -> Structure:
    """Of a checkpoint, by its weights' names and bytes: as that of a module, but for what only a module knows. Several children
    that are numbered make a list, and every weight is a parameter.

    ``ties``: further names among those of ``sizes``. Raises ValueError for a name or pattern that is nobody's."""
    root = _Place("", object())
    for name, nbytes in sizes.items():
        place = root
        *path, _ = name.split(".")
        for part in path:
            full = f"{place.name}.{part}" if place.name else part
            place = place.children.setdefault(part, _Place(full, object()))
        place.weights.append((ties.get(name, name), nbytes))
    for place in root.all():
        place.alike = sum(part.isdigit() for part in place.children) > 1
    names = {place.name: place for place in root.all() if any(each.weights for each in place.all())}
    named = {names[name].identity for pattern in blocks or () for name in _matching(pattern, names)}
    return _structure(root, named, ties, [])


@dataclass
class _Place:
    """A module's, in the tree. One that is in several places has one identity."""

    name: str
    identity: object
    weights: list[tuple[str, int]] = field(default_factory=list)
    """Its own, by their first names, with their bytes."""
    children: dict[str, _Place] = field(default_factory=dict)
    """By the last part of their names."""
    alike: bool = False
    """Whether it is a list with several children of one kind."""
    has_forward: bool = True

    def all(self) -> Iterator[_Place]:
        yield self
        for child in self.children.values():
            yield from child.all()

    def has_weights(self) -> bool:
        return any(place.weights for place in self.all())


def _place_of(module: nn.Module, name: str, weights: Mapping[str, torch.Tensor], ties: Mapping[str, str]) -> _Place:
    prefix = f"{name}." if name else ""
    place = _Place(name, id(module), has_forward=not isinstance(module, _CONTAINERS))
    for key, parameter in module._parameters.items():
        if parameter is not None:
            first = ties.get(prefix + key, prefix + key)
            place.weights.append((first, weights[first].numel() * weights[first].element_size()))
    kinds: Counter[type] = Counter()
    for key, child in module._modules.items():
        if child is None:
            continue
        below = _place_of(child, prefix + key, weights, ties)
        if isinstance(child, nn.ParameterList | nn.ParameterDict):  # whose weights the module itself uses
            place.weights += [weight for each in below.all() for weight in each.weights]
            continue
        place.children[key] = below
        if below.has_weights():
            kinds[type(child)] += 1
    place.alike = isinstance(module, nn.ModuleList | nn.Sequential) and max(kinds.values(), default=0) > 1
    return place


def _named(model: nn.Module, patterns: Sequence[str]) -> set[object]:
    modules = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters())}
    found: set[object] = set()
    for pattern in patterns:
        for name in _matching(pattern, modules):
            if isinstance(modules[name], _CONTAINERS):
                kind = type(modules[name]).__name__
                raise ValueError(f"blocks: {name!r} is a {kind}, whose forward nobody calls: name what is in it, {name + '.*'!r}")
            found.add(id(modules[name]))
    return found


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    parts = pattern.split(".")
    found = [
        name
        for name in names
        if name.count(".") == pattern.count(".") and all(map(fnmatchcase, name.split("."), parts))
    ]
    if not found:
        close = difflib.get_close_matches(pattern, names, n=3)
        hint = f"; there is {', '.join(map(repr, close))}" if close else ""
        raise ValueError(f"blocks: {pattern!r} is no module that has weights{hint}")
    return found


def _structure(root: _Place, named: set[object], ties: Mapping[str, str], rest: Iterable[str]) -> Structure:
    chosen: dict[object, bool] = dict.fromkeys(named, False)  # whether it has to have some size to be a block
    _choose(root, chosen)
    needed: dict[object, dict[str, int]] = {}
    names: dict[object, str] = {}
    _assign(root, None, chosen, needed, names)
    remaining = dict(needed.pop(None, {}))
    blocks = []
    for identity, weights in needed.items():
        if chosen[identity] and sum(weights.values()) < SMALL:
            remaining.update(weights)
        elif weights:
            blocks.append(Block(names[identity], tuple(weights)))
    return Structure(tuple(blocks), tuple(dict.fromkeys((*remaining, *rest))), ties)


def _choose(place: _Place, chosen: dict[object, bool]) -> None:
    """Note the blocks in a place, with all that is in it, where none was named."""
    if place.identity in chosen:
        return
    if place.alike:
        for child in place.children.values():
            if child.has_forward and child.has_weights():
                chosen.setdefault(child.identity, False)
            else:
                _choose(child, chosen)
        return
    if place.weights and place.has_forward:
        chosen[place.identity] = True
        if not any(each.alike for each in place.all()):
            return
    for child in place.children.values():
        _choose(child, chosen)


def _assign(
    place: _Place,
    block: object,
    chosen: Mapping[object, bool],
    needed: dict[object, dict[str, int]],
    names: dict[object, str],
) -> None:
    """Give each weight to the innermost block around it, or to None."""
    if place.identity in chosen:
        block = place.identity
        names.setdefault(block, place.name)
    needed.setdefault(block, {}).update(place.weights)
    for child in place.children.values():
        _assign(child, block, chosen, needed, names)

