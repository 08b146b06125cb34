"""The modules of a model that have experts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn


@dataclass
class ExpertLayer:
    """A module with packed experts, or a module that is one expert."""

    name: str
    """Name of the module."""
    module: nn.Module
    """The module."""
    number: int | None
    """Number of the expert that the module is; None if it has packed experts."""
    weights: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    """By the name of each weight that is read on demand: the module that it belongs to, and its name in there."""
    _own_forward: Any = None

    @property
    def mixture(self) -> str:
        """Name of the module that has all experts of this layer: of packed ones, this module, and else the list around it."""
        return self.name if self.number is None else self.name.rpartition(".")[0]

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield name and tensor of each of the weights."""
        return ((name, self.tensor(name)) for name in self.weights)

    def tensor(self, name: str) -> Any:
        """Return the parameter, or the placeholder for it, that is in the module now."""
        module, key = self.weights[name]
        return module._parameters[key]

    def put(self, name: str, weight: Any) -> None:
        """Put a parameter, or a placeholder for it, into the module."""
        module, key = self.weights[name]
        module._parameters[key] = weight

    def wrap(self, forward: Any) -> None:
        """Replace the module's forward, until :meth:`unwrap` restores its own."""
        self._own_forward = self.module.__dict__.get("forward")
        self.module.forward = forward

    def unwrap(self) -> None:
        """Restore the module's own forward."""
        if self._own_forward is not None:
            self.module.forward = self._own_forward
        else:
            del self.module.forward

    def chosen(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[int, int], int]:
        """Return the experts that a call of the module uses, each with its number of tokens; and the number of all tokens.

        Of packed experts, these are the numbers in the first argument that is a tensor of integers, of one dimension or more.
        Negative numbers count from the last expert, and numbers out of range mean no expert. Without such an argument nothing is
        known ahead.
        """
        if self.number is not None:
            return {0: 1}, 0
        integers = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.dtype in _INTEGERS)
        numbers = next(integers, None)
        if numbers is None or not numbers.dim() or not numbers.numel():
            return {}, 0
        experts = min(self.tensor(name).shape[0] for name in self.weights)
        counts = torch.bincount(numbers[(numbers >= -experts) & (numbers < experts)] % experts).tolist()
        return {number: count for number, count in enumerate(counts) if count}, numbers.numel() // numbers.shape[-1]

    def order(self, chosen: Sequence[int]) -> list[tuple[str, int]]:
        """Return the weights of the chosen experts in the order in which the module uses them.

        transformers' eager implementation computes expert by expert; the others multiply by the first weight of all experts, then
        by the second.
        """
        config = getattr(self.module, "config", None)
        if getattr(config, "_experts_implementation", None) in (None, "eager"):
            return [(name, number) for number in chosen for name in self.weights]
        return [(name, number) for name in self.weights for number in chosen]


_INTEGERS = (torch.int64, torch.int32)


def expert_layers(model: nn.Module, patterns: Sequence[str] | None) -> list[ExpertLayer]:
    """Return the modules with experts, in the order of the model: see :func:`offload_experts`.

    Raises:
        ValueError: If there are none, or none for one of the patterns.
    """
    layers: list[ExpertLayer] = []
    unmatched = set(patterns or ())
    for name, module in model.named_modules():
        found = [pattern for pattern in patterns or () if _matches(name, pattern)]
        unmatched.difference_update(found)
        inside = any(name.startswith(f"{layer.name}.") for layer in layers[-1:])
        if inside or not (found if patterns is not None else _has_experts(name, module)):
            continue
        own = {f"{name}.{key}": (module, key) for key, weight in module._parameters.items() if weight is not None}
        packed = {each: place for each, place in own.items() if module._parameters[place[1]].dim() == 3}
        number = re.search(r"\.(\d+)$", name)
        if packed:
            layers.append(ExpertLayer(name, module, None, packed))
        elif any(True for _ in module.parameters()):
            own |= {
                f"{name}.{path}.{key}": (part, key)
                for path, part in module.named_modules()
                for key, weight in part._parameters.items()
                if path and weight is not None
            }
            layers.append(ExpertLayer(name, module, int(number[1]) if number else 0, own))
    if unmatched:
        raise ValueError(f"modules: no module of {type(model).__name__} is called {', '.join(map(repr, sorted(unmatched)))}")
    if not layers:
        raise ValueError(f"{type(model).__name__} has no experts that could be read on demand: name modules=[...] that have them")
    return layers


def expert_weights(model: nn.Module) -> set[str]:
    """Return the names of the weights of experts that can be read on demand; none if the model is no mixture."""
    try:
        return {name for layer in expert_layers(model, None) for name in layer.weights}
    except ValueError:
        return set()


def _matches(name: str, pattern: str) -> bool:
    parts = name.split(".")
    return len(parts) == pattern.count(".") + 1 and all(map(fnmatchcase, parts, pattern.split(".")))


def _has_experts(name: str, module: nn.Module) -> bool:
    """Return whether a module has packed experts of transformers, or is in a list named "experts"."""
    *_, last_but_one, last = ("", "", *name.split("."))
    return (hasattr(module, "is_transposed") and hasattr(module, "has_gate")) or (last_but_one == "experts" and last.isdigit())
