"""Puts weights that were read, or placeholders, into the modules of a model."""

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
    """One entry in a module's ``_parameters`` or ``_buffers``.

    Written to directly: ``Module.__setattr__`` would search all of the module's dictionaries first.
    """

    among: dict[str, torch.Tensor | None]
    name: str
    own: torch.Tensor | None
    """The tensor that the model had there before it was streamed."""


@dataclass
class _Weight:
    """A stored weight, the entries of modules that it belongs to, and the tensors that are put there."""

    facts: Weight
    places: list[_Place] = field(default_factory=list)
    absent: torch.Tensor | None = None
    """The placeholder."""
    present: torch.Tensor | None = None
    """The tensor over the memory that was read; None while the placeholder is in the modules."""
    version: int = 0
    """``_version`` of ``present`` when it was put there: torch counts changes in place."""
    address: int = 0
    """Address of the data of ``present`` when it was put there."""
    requires_grad: bool = False
    """Whether the weight required grad before the model was streamed."""

    def put(self, tensor: torch.Tensor | None) -> None:
        """Put a tensor into all entries of the weight."""
        for place in self.places:
            place.among[place.name] = tensor

    def changed(self) -> bool:
        """Return whether somebody has put another tensor into one of the entries, or changed ``present`` in place."""
        present = self.present
        return (
            present is None
            or any(place.among.get(place.name) is not present for place in self.places)
            or present._version != self.version
            or present.data_ptr() != self.address  # for example after model.to(...)
        )

    def replaced(self) -> bool:
        """Return whether somebody has put another tensor into one of the entries since the weight was removed."""
        return not all(
            found is self.absent or (found is not None and found is self.present)
            for found in (place.among.get(place.name) for place in self.places)
        )


class ModuleWeights:
    """Puts the weights of an extent into the modules of a model, and placeholders in their place.

    A weight that is used in several places, in one module or in several, is one parameter in all of them. Not thread-safe.

    Args:
        model: The model, whose weights are those of the store (see :meth:`WeightStore.check`).
        store: The store of its weights.
        extents: The store's extents, laid out as they are in memory, that is, dequantised.
        device: Where the weights will be when they are in memory.
    """

    def __init__(self, model: nn.Module, store: WeightStore, extents: Mapping[str, Extent], device: torch.device) -> None:
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
        """Put the model's own tensors back. Only before :meth:`forget_own`."""
        for weight in self._all():
            for place in weight.places:
                place.among[place.name] = place.own

    def forget_own(self) -> None:
        """Drop the references to the model's own tensors, so that their memory is freed."""
        for weight in self._all():
            for place in weight.places:
                place.own = None

    def remove(self, extent: str) -> None:
        """Replace an extent's weights by placeholders."""
        for weight in self._extents[extent]:
            weight.put(weight.absent)
            weight.present = None

    def put(self, extent: str, memory: torch.Tensor) -> None:
        """Put an extent's weights into the modules, as views of ``memory``, in which the extent lies ready for use."""
        with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode do not count changes
            for weight in self._extents[extent]:
                tensor = weight.facts.view(memory).data  # .data: a tensor that counts changes for itself
                parameter = isinstance(weight.places[0].among.get(weight.places[0].name), nn.Parameter)
                weight.present = nn.Parameter(tensor, requires_grad=False) if parameter else tensor
                weight.version, weight.address = weight.present._version, weight.present.data_ptr()
                weight.put(weight.present)

    def _all(self) -> Iterator[_Weight]:
        return itertools.chain.from_iterable(self._extents.values())

    def restore(self, extent: str, memory: torch.Tensor | None, names: Collection[str] | None) -> None:
        """Put an extent's weights into the modules for good; they require grad if they did before the model was streamed.

        Args:
            extent: Name of the extent.
            memory: As for :meth:`put`; None if the weights are in the modules already.
            names: Names of the weights to be put there; the others become placeholders. None for all.
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
        """Return the names of an extent's weights that were replaced or changed in place since :meth:`put`."""
        return [weight.facts.name for weight in self._extents[extent] if weight.changed()]

    def replaced(self, extent: str) -> list[str]:
        """Return the names of an extent's weights whose placeholders somebody has replaced since :meth:`remove`."""
        return [weight.facts.name for weight in self._extents[extent] if weight.replaced()]
