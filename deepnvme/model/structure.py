"""A model's weights by name, and the blocks and extents that they form.

A block is a module whose weights are read for its forward. An extent is a set of weights that are read together in one
transfer. Works on a model's modules, or only on the names in a checkpoint. Does no I/O.
"""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar

import torch
from torch import nn

T = TypeVar("T")

UNBLOCKED_EXTENT = "(rest)"
"""Name of the extent of weights that belong to no block and stay in memory. No module name has its parentheses."""
SMALL = 1 << 20
"""Bytes. A module with fewer bytes of weights is not made a block, because rereading it each time is not worth it.

Modules named by the caller, and children of lists, are blocks whatever their size.
"""

_PARAMETERS = (nn.ParameterList, nn.ParameterDict)
"""Module types whose weights are used by the forward of the enclosing module."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, *_PARAMETERS)
"""Modules without a forward of their own."""


class ModelBlock(NamedTuple):
    """A module whose weights are in memory only during its forward."""

    name: str
    """Name of the module."""
    weights: tuple[str, ...]
    """Names of the block's weights, in the order of registration. Of a tied weight, the first name.

    Weights of blocks inside this block are left out.
    """


class ExtentPlan(NamedTuple):
    """Weights that will be read in one transfer: all weights needed by exactly the same blocks, or by no block."""

    name: str
    """Name of the block; of the first weight, if several blocks need the weights; UNBLOCKED_EXTENT, if no block does."""
    weights: tuple[str, ...]
    """Names of the weights; of a tied weight, the first name."""


@dataclass(frozen=True)
class Structure:
    """Division of a model's weights into blocks and extents. It is computed without the weights' values."""

    blocks: tuple[ModelBlock, ...]
    """All blocks, in the order of registration."""
    rest: tuple[str, ...]
    """Names of weights in no block, and of persistent buffers."""
    ties: Mapping[str, str]
    """For each further name of a tied weight, the weight's first name."""

    def extents(self) -> list[ExtentPlan]:
        """Return the extents, in the order in which they are first needed.

        A weight that a block needs and that is also in :attr:`rest` is only in the extent UNBLOCKED_EXTENT.
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
            ExtentPlan(names[0] if len(names) == 1 else weights[0] if names else UNBLOCKED_EXTENT, tuple(weights))
            for names, weights in together.items()
        ]

    def needs(self) -> dict[str, tuple[str, ...]]:
        """Return, for each block, the names of the extents that it needs besides UNBLOCKED_EXTENT. Omits blocks without any."""
        extent_of = {weight: extent.name for extent in self.extents() for weight in extent.weights}
        found = {
            block.name: tuple(
                dict.fromkeys(extent_of[weight] for weight in block.weights if extent_of[weight] != UNBLOCKED_EXTENT)
            )
            for block in self.blocks
        }
        return {name: extents for name, extents in found.items() if extents}


def weights_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters and persistent buffers by all of their names, in the order of registration.

    Leaves out parameters that are read from the drive on demand, which have an attribute ``on_demand``.
    """
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None and not hasattr(parameter, "on_demand"):
                found[prefix + name] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[prefix + name] = buffer
    return found


def find_ties(weights: Mapping[str, T], identity: Callable[[T], object] = id) -> dict[str, str]:
    """Return a mapping from each further name of a tied weight to the weight's first name.

    Args:
        weights: The weights by all of their names.
        identity: Returns a key that is equal for all names of one weight, or None for a weight without ties.
    """
    first: dict[object, str] = {}
    same = {name: identity(weight) for name, weight in weights.items()}
    return {name: first[key] for name, key in same.items() if key is not None and first.setdefault(key, name) != name}


def structure_of(model: nn.Module, blocks: Sequence[str] | None = None, find: bool = True) -> Structure:
    """Divide a model into blocks, which are modules whose weights are in memory only during their forward.

    A module named in ``blocks`` is a block. Elsewhere, blocks are found by these rules:

    1. In a ModuleList or Sequential with several children of one type, each child is a block. For lists in lists, these are
       the children of the outer list.
    2. Outside such lists, a module with weights of its own is a block, together with all modules in it, unless it has less
       than 1 MiB of weights in all.

    A weight belongs to the innermost block around it.

    Args:
        model: The model; it may be on the meta device.
        blocks: Names of modules, or patterns such as "model.layers.*.mlp", where ``*`` stands for one part of a name.
        find: Whether to find further blocks besides the named ones. If False, all other weights are in no block.

    Raises:
        ValueError: If a name or pattern matches no module with weights, or a module without a forward.
    """
    weights = weights_by_name(model)
    ties = find_ties(weights)
    sizes = {name: weight.nbytes for name, weight in weights.items() if isinstance(weight, nn.Parameter)}
    root = _tree(sizes, ties, dict(model.named_modules(remove_duplicate=False)))
    return _structure(root, blocks, ties, [name for name in weights if name not in sizes and name not in ties], find)


def structure_of_names(sizes: Mapping[str, int], ties: Mapping[str, str], blocks: Sequence[str] | None = None) -> Structure:
    """Divide a checkpoint's weights into blocks by their names, as :func:`structure_of` does for a model.

    A module with several children whose names are numbers counts as a list. Every weight counts as a parameter.

    Args:
        sizes: Bytes of the weights, by all of their names.
        ties: First names of tied weights, by each of their further names.
        blocks: As for :func:`structure_of`.

    Raises:
        ValueError: If a name or pattern matches no module with weights.
    """
    return _structure(_tree(sizes, ties, {}), blocks, ties, [], find=True)


@dataclass
class _ModuleNode:
    """A node of the tree of modules that have weights.

    A module that is registered under several names has several nodes, which have the same :attr:`identity`.
    """

    name: str
    module: nn.Module | None
    """The module; None if only names are known."""
    weights: list[tuple[str, int]] = field(default_factory=list)
    """Name and bytes of each of the module's own weights; of a tied weight, the first name."""
    children: dict[str, _ModuleNode] = field(default_factory=dict)
    """Nodes of the submodules, by the last part of their names."""

    @property
    def identity(self) -> int:
        """Key that identifies the module; if only names are known, the node."""
        return id(self if self.module is None else self.module)

    @functools.cached_property
    def alike(self) -> bool:
        """Whether the module is a list with several children of one type."""
        if self.module is None:
            return sum(part.isdigit() for part in self.children) > 1
        kinds = Counter(type(child.module) for child in self.children.values() if not isinstance(child.module, _PARAMETERS))
        return isinstance(self.module, nn.ModuleList | nn.Sequential) and max(kinds.values(), default=0) > 1

    @property
    def has_forward(self) -> bool:
        """Whether the module has a forward that other modules call, which containers such as ModuleList do not."""
        return not isinstance(self.module, _CONTAINERS)

    def uses_weights(self) -> bool:
        """Return whether the module's own forward uses weights, not only those of its submodules."""
        return self.has_forward and (
            bool(self.weights) or any(isinstance(child.module, _PARAMETERS) for child in self.children.values())
        )

    def all(self) -> Iterator[_ModuleNode]:
        """Yield this node and all nodes below it."""
        yield self
        for child in self.children.values():
            yield from child.all()


def _tree(sizes: Mapping[str, int], ties: Mapping[str, str], modules: Mapping[str, nn.Module]) -> _ModuleNode:
    """Return the tree of the modules that have weights, by the names of the weights.

    Args:
        sizes: Bytes of the weights, by all of their names, in the order of registration.
        ties: First names of tied weights, by each of their further names.
        modules: The modules by all of their names; empty if only names are known.
    """
    root = _ModuleNode("", modules.get(""))
    for name, nbytes in sizes.items():
        node = root
        *path, _ = name.split(".")
        for part in path:
            inner = f"{node.name}.{part}" if node.name else part
            node = node.children.setdefault(part, _ModuleNode(inner, modules.get(inner)))
        node.weights.append((ties.get(name, name), nbytes))
    return root


def _named(root: _ModuleNode, patterns: Iterable[str]) -> set[object]:
    """Return the identities of the modules that the patterns match."""
    first: dict[object, _ModuleNode] = {}
    for node in root.all():
        if node.weights or node.children:
            first.setdefault(node.identity, node)
    nodes = {node.name: node for node in first.values()}
    found: set[object] = set()
    for pattern in patterns:
        for name in _matching(pattern, nodes):
            if not nodes[name].has_forward:
                kind = type(nodes[name].module).__name__
                raise ValueError(f"blocks: {name!r} is a {kind}, whose forward nobody calls: name what is in it, {name + '.*'!r}")
            found.add(nodes[name].identity)
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


def _structure(
    root: _ModuleNode, named: Iterable[str] | None, ties: Mapping[str, str], rest: Iterable[str], find: bool
) -> Structure:
    """Divide a tree into blocks.

    Args:
        root: Root of the tree.
        named: Patterns of block names.
        ties: First names of tied weights, by each of their further names.
        rest: Further weights that belong to no block, such as persistent buffers.
        find: Whether to find further blocks besides the named ones.
    """
    chosen: dict[object, bool] = dict.fromkeys(_named(root, named or ()), False)  # True: a block only if it is large enough
    if find:
        _choose(root, chosen)
    needed: dict[object, dict[str, int]] = {}
    names: dict[object, str] = {}
    for node, block in _with_blocks(root, chosen):
        names.setdefault(block, node.name)
        needed.setdefault(block, {}).update(node.weights)
    remaining = dict(needed.pop(None, {}))
    blocks = []
    for identity, weights in needed.items():
        if chosen[identity] and sum(weights.values()) < SMALL:
            remaining.update(weights)
        elif weights:
            blocks.append(ModelBlock(names[identity], tuple(weights)))
    return Structure(tuple(blocks), tuple(dict.fromkeys((*remaining, *rest))), ties)


def _choose(node: _ModuleNode, chosen: dict[object, bool]) -> None:
    """Find blocks at or below a node. Modules already in ``chosen`` are not searched.

    Args:
        node: The node.
        chosen: Gets an entry for each block: the identity of its module -> whether the module is a block only if it has at least
            SMALL bytes of weights.
    """
    if node.identity in chosen:
        return
    if node.uses_weights() and not node.alike:
        chosen[node.identity] = True
        if not any(each.alike for each in node.all()):
            return
    for child in node.children.values():
        if node.alike and child.has_forward:
            chosen.setdefault(child.identity, False)
        else:
            _choose(child, chosen)


def _with_blocks(node: _ModuleNode, chosen: Mapping[object, bool], block: object = None) -> Iterator[tuple[_ModuleNode, object]]:
    """Yield a node and all nodes below it, each with the identity of the innermost block that it is in; None if in no block.

    Args:
        node: The node.
        chosen: Its keys are the identities of all blocks' modules.
        block: Identity of the innermost block around the node; None if there is none.
    """
    block = node.identity if node.identity in chosen else block
    yield node, block
    for child in node.children.values():
        yield from _with_blocks(child, chosen, block)
