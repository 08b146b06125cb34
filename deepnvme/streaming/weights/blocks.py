"""Groups a model's weights: into blocks, the modules for whose forward they are read, and extents, which are read as one.

Works on a model's tree of modules, or only on the names in a checkpoint. Does no I/O.
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
"""Name of the extent of weights in no block, which stays in memory. A module is unlikely to have a name with parentheses."""
SMALL = 1 << 20
"""A module with fewer bytes of weights is not made a block, unless a list does: reading it again each time is not worth it."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules without a forward of their own."""


class Block(NamedTuple):
    """A module whose weights are in memory only during its forward."""

    name: str
    """Name of the module."""
    weights: tuple[str, ...]
    """First names of its weights, in the order of registration; without those of blocks inside it."""


class ExtentPlan(NamedTuple):
    """Weights that will be read as one: all that are needed by exactly the same blocks, or by none."""

    name: str
    """The block's name; for weights that several blocks need, the name of the first weight; REST for those in no block."""
    weights: tuple[str, ...]
    """First names of the weights."""


@dataclass(frozen=True)
class Structure:
    """How the weights of a model are divided into blocks and extents; known without their values."""

    blocks: tuple[Block, ...]
    """All blocks, in the order of registration."""
    rest: tuple[str, ...]
    """Names of weights in no block, and of persistent buffers."""
    ties: Mapping[str, str]
    """First names of tied weights, by each of their further names."""

    def extents(self) -> list[ExtentPlan]:
        """Return the extents, in the order in which they are first needed.

        A weight that is needed by a block and also in ``rest`` is only in the extent REST.
        """
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
        """Return the names of the extents that each block needs, without REST; blocks that need no other are left out."""
        extent_of = {weight: extent.name for extent in self.extents() for weight in extent.weights}
        found = {
            block.name: tuple(dict.fromkeys(extent_of[weight] for weight in block.weights if extent_of[weight] != REST))
            for block in self.blocks
        }
        return {name: extents for name, extents in found.items() if extents}


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters and persistent buffers by all of their names, in the order of registration."""
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
    """Return the first name of each tensor that has several, by each of its further names."""
    first: dict[int, str] = {}
    return {name: first[id(weight)] for name, weight in weights.items() if first.setdefault(id(weight), name) != name}


def structure_of(model: nn.Module, blocks: Sequence[str] | None = None) -> Structure:
    """Divide a model into blocks.

    Modules named in ``blocks`` are blocks; a weight belongs to the innermost block around it. Elsewhere blocks are found: the
    children of a ModuleList or Sequential that has several of one type (of lists in lists, those of the outer one), else a module
    with weights of its own, together with all modules in it. Outside of lists, a module with less than 1 MiB of weights in all is
    not made a block.

    Args:
        model: May be on the meta device.
        blocks: Names of modules, or patterns such as "model.layers.*.mlp", where ``*`` stands for one part of a name.

    Raises:
        ValueError: If a name or pattern matches no module with weights, or one without a forward.
    """
    weights = weights_of(model)
    ties = ties_of(weights)
    buffers = {name for name, weight in weights.items() if not isinstance(weight, nn.Parameter)}
    named = _named(model, blocks or ())
    return _structure(_place_of(model, "", weights, ties), named, ties, [name for name in buffers if name not in ties])


def structure_of_names(sizes: Mapping[str, int], ties: Mapping[str, str], blocks: Sequence[str] | None = None) -> Structure:
    """Divide a checkpoint's weights into blocks by their names, as :func:`structure_of` does for a model.

    Several children with numbers as names count as a list, and every weight as a parameter.

    Args:
        sizes: Bytes of the weights, by all of their names.
        ties: First names of tied weights, by each of their further names.
        blocks: As for :func:`structure_of`.

    Raises:
        ValueError: If a name or pattern matches no module with weights.
    """
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
    """A node of the tree of modules. A module that is in several places has several nodes of one identity."""

    name: str
    identity: object
    weights: list[tuple[str, int]] = field(default_factory=list)
    """First names and bytes of the module's own weights."""
    children: dict[str, _Place] = field(default_factory=dict)
    """Nodes of the submodules, by the last part of their names."""
    alike: bool = False
    """Whether the module is a list with several children of one type."""
    has_forward: bool = True

    def all(self) -> Iterator[_Place]:
        """Yield this node and all nodes below it."""
        yield self
        for child in self.children.values():
            yield from child.all()

    def has_weights(self) -> bool:
        return any(place.weights for place in self.all())


def _place_of(module: nn.Module, name: str, weights: Mapping[str, torch.Tensor], ties: Mapping[str, str]) -> _Place:
    """Return the tree of nodes for a module."""
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
        if isinstance(child, nn.ParameterList | nn.ParameterDict):  # its weights are used by the forward of its parent
            place.weights += [weight for each in below.all() for weight in each.weights]
            continue
        place.children[key] = below
        if below.has_weights():
            kinds[type(child)] += 1
    place.alike = isinstance(module, nn.ModuleList | nn.Sequential) and max(kinds.values(), default=0) > 1
    return place


def _named(model: nn.Module, patterns: Sequence[str]) -> set[object]:
    """Return the identities of the modules that the patterns match."""
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
    """Return the names that a pattern matches. Raises ValueError, with similar names, if there is none."""
    names = list(names)
    parts = pattern.split(".")
    found = [name for name in names if name.count(".") == pattern.count(".") and all(map(fnmatchcase, name.split("."), parts))]
    if not found:
        close = difflib.get_close_matches(pattern, names, n=3)
        hint = f"; there is {', '.join(map(repr, close))}" if close else ""
        raise ValueError(f"blocks: {pattern!r} is no module that has weights{hint}")
    return found


def _structure(root: _Place, named: set[object], ties: Mapping[str, str], rest: Iterable[str]) -> Structure:
    """Divide a tree into blocks; ``rest`` are weights that belong to none in any case."""
    chosen: dict[object, bool] = dict.fromkeys(named, False)  # True: a block only if it is large enough
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
    """Add the blocks that are found in a node and below it to ``chosen``; a named block is not searched."""
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
    """Fill ``needed`` with the weights of each block (a weight is the innermost block's around it, or None's), and ``names``."""
    if place.identity in chosen:
        block = place.identity
        names.setdefault(block, place.name)
    needed.setdefault(block, {}).update(place.weights)
    for child in place.children.values():
        _assign(child, block, chosen, needed, names)
