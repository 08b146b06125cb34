"""Where a model's modules have their weights: placeholders, or what is in memory."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from .placeholder import Placeholder
from .weights.blocks import ties_of, weights_of

if TYPE_CHECKING:
    from .weights.manifest import Extent, Weight
    from .weights.weight_store import WeightStore


@dataclass
class _Place:
    """Of a parameter or a buffer. It is written to without its module, which would look at all that it knows first."""

    among: dict[str, torch.Tensor | None]
    name: str
    own: torch.Tensor | None
    """What the model had there."""


@dataclass
class _Weight:
    facts: Weight
    places: list[_Place] = field(default_factory=list)
    absent: torch.Tensor | None = None
    present: torch.Tensor | None = None
    version: int = 0
    address: int = 0
    requires_grad: bool = False
    """As it was before the model was streamed."""

    def put(self, tensor: torch.Tensor | None) -> None:
        for place in self.places:
            place.among[place.name] = tensor

    def changed(self) -> bool:
        """Whether the model has put another in one of its places, or changed it where it is."""
        present = self.present
        return (
            present is None
            or any(place.among.get(place.name) is not present for place in self.places)
            or present._version != self.version
            or present.data_ptr() != self.address  # as after model.to(...)
        )


    def replaced(self) -> bool:
        """Whether somebody has put another in one of its places since it was removed."""
        return not all(
            found is self.absent or (found is not None and found is self.present)
            for found in (place.among.get(place.name) for place in self.places)
        )


class ModuleWeights:
    """The weights of a model by the extents of a store, which has the same (see :meth:`WeightStore.check`).

    ``extents``: the store's, as they lie in memory.

    Wherever one weight has several places, in one module or in several, there is one parameter.
    """

    def __init__(
        self, model: nn.Module, store: WeightStore, extents: Mapping[str, Extent], device: torch.device
    ) -> None:
        self._extents = {name: [_Weight(weight) for weight in extent.weights] for name, extent in extents.items()}
        by_name = {weight.facts.name: weight for weights in self._extents.values() for weight in weights}
        found = weights_of(model)
        ties = ties_of(found)
        names: dict[str, list[str]] = {}
        for name in found:
            names.setdefault(ties.get(name, name), []).append(name)
        modules = dict(model.named_modules(remove_duplicate=False))
        for tied in names.values():
            stored = next(store.ties.get(name, name) for name in tied if name in by_name or name in store.ties)
            for name in tied:
                path, _, key = name.rpartition(".")
                module = modules[path]
                among = module._parameters if key in module._parameters else module._buffers
                if all(place.among is not among or place.name != key for place in by_name[stored].places):
                    by_name[stored].places.append(_Place(among, key, found[name]))
                    by_name[stored].requires_grad |= found[name].requires_grad
        users: dict[str, str] = {}
        for block, needed in store.blocks.items():
            for extent in needed:
                users.setdefault(extent, block)
        for extent, weights in self._extents.items():
            for weight in weights:
                name, info = weight.facts.name, weight.facts.info
                weight.absent = Placeholder(name, users.get(extent, ""), info.shape, info.dtype, device)

    def undo(self) -> None:
        """Give the model back what it had, before :meth:`forget_own`."""
        for weight in self._all():
            for place in weight.places:
                place.among[place.name] = place.own

    def forget_own(self) -> None:
        """Let go of what the model had."""
        for weight in self._all():
            for place in weight.places:
                place.own = None

    def remove(self, extent: str) -> None:
        """Put placeholders in place of its weights."""
        for weight in self._extents[extent]:
            weight.put(weight.absent)
            weight.present = None

    def put(self, extent: str, memory: torch.Tensor) -> None:
        """Put its weights in their places, as they lie in memory."""
        with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode do not tell of changes
            for weight in self._extents[extent]:
                tensor = weight.facts.view(memory).data  # with a count of changes of its own
                parameter = isinstance(weight.places[0].among.get(weight.places[0].name), nn.Parameter)
                weight.present = nn.Parameter(tensor, requires_grad=False) if parameter else tensor
                weight.version, weight.address = weight.present._version, weight.present.data_ptr()
                weight.put(weight.present)

    def _all(self) -> Iterator[_Weight]:
        return itertools.chain.from_iterable(self._extents.values())

    def restore(self, extent: str, memory: torch.Tensor | None, names: Collection[str] | None) -> None:
        """Put its weights in their places to stay, as they were before the model was streamed: they require grad if they did.

        ``memory``: what :meth:`put` takes; None where the weights are in their places already. ``names``: of the weights to be
        put, None for all. The others become placeholders.
        """
        if memory is not None:
            self.put(extent, memory)
        for weight in self._extents[extent]:
            if names is not None and weight.facts.name not in names:
                weight.put(weight.absent)
                weight.present = None
            elif weight.requires_grad and weight.present is not None:
                weight.present.requires_grad_()

    def changed(self, extent: str) -> list[str]:
        """The names of those that are not as they were put there."""
        return [weight.facts.name for weight in self._extents[extent] if weight.changed()]

    def replaced(self, extent: str) -> list[str]:
        """The names of those in whose places somebody has put others since they were removed."""
        return [weight.facts.name for weight in self._extents[extent] if weight.replaced()]
