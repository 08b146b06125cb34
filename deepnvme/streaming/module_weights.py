"""Puts weights that were read, or placeholders for them, into the modules of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from deepnvme.model.structure import weights_by_name

from .placeholder import Placeholder
from .weights.extent_store import ExtentStore
from .weights.manifest import Extent, Weight

Tensors = dict[str, torch.Tensor | None]
"""A module's ``_parameters`` or ``_buffers``. They are written directly, because ``Module.__setattr__`` searches all of them."""


@dataclass
class _ModuleWeight:
    """A stored weight: where it belongs in the modules, its placeholder, and the tensor over its memory."""

    facts: Weight
    absent: Placeholder
    """The placeholder that is in the modules while the weight is not in memory."""
    entries: list[tuple[Tensors, str]] = field(default_factory=list)
    """Where the weight belongs: a module's dictionary and the key in it; several for tied weights."""
    present: torch.Tensor | None = None
    """The tensor over the memory that the weight was read into; None while the placeholder is in the modules."""
    version: int = 0
    """``_version`` of ``present`` when it was put into the modules. torch increases it with each change in place."""
    address: int = 0
    """Address of the data of ``present`` when it was put into the modules."""
    requires_grad: bool = False
    """Whether the weight required grad before the model was streamed."""

    def add_entry(self, among: Tensors, key: str, requires_grad: bool) -> None:
        """Add a module's entry for the weight, unless it was added before. ``requires_grad`` is that of the module's tensor."""
        if not any(there is among and other == key for there, other in self.entries):
            self.entries.append((among, key))
            self.requires_grad |= requires_grad

    def put(self, memory: torch.Tensor) -> None:
        """Put a tensor over ``memory``, the extent's memory, into all entries of the weight."""
        tensor = self.facts.view(memory).data  # .data: a tensor that counts changes for itself
        among, key = self.entries[0]
        self.present = nn.Parameter(tensor, requires_grad=False) if isinstance(among.get(key), nn.Parameter) else tensor
        self.version, self.address = self.present._version, self.present.data_ptr()
        for among, key in self.entries:
            among[key] = self.present

    def remove(self) -> None:
        """Put the placeholder into all entries of the weight."""
        for among, key in self.entries:
            among[key] = self.absent
        self.present = None

    def changed(self) -> bool:
        """Return whether other code has replaced ``present`` in one of the entries, or changed it in place."""
        present = self.present
        return (
            present is None
            or any(among.get(key) is not present for among, key in self.entries)
            or present._version != self.version
            or present.data_ptr() != self.address  # for example after model.to(...)
        )

    def replaced(self) -> bool:
        """Return whether other code has replaced the placeholder in one of the entries."""
        return not all(
            found is self.absent or (found is not None and found is self.present)
            for found in (among.get(key) for among, key in self.entries)
        )


class ModuleWeights:
    """Puts the weights of an extent into the modules of a model while they are in memory, and placeholders otherwise.

    A weight that is used in several places, in one module or in several, is one parameter in all of them. Not thread-safe.

    Args:
        model: The model, whose weights are those of the store (see :meth:`ExtentStore.check`).
        store: The store of the model's weights.
        extents: The store's extents, with their layout in memory, after dequantisation.
        device: Device of the weights while they are in memory.
    """

    def __init__(self, model: nn.Module, store: ExtentStore, extents: Mapping[str, Extent], device: torch.device) -> None:
        users = {extent: block for block, needed in reversed(list(store.blocks.items())) for extent in needed}
        self._extents = {
            name: [_ModuleWeight(each, Placeholder(each.name, users.get(name, ""), each.info, device)) for each in extent.weights]
            for name, extent in extents.items()
        }
        by_name = {weight.facts.name: weight for weights in self._extents.values() for weight in weights}
        own = weights_by_name(model)
        stored_as = {id(own[name]): store.ties.get(name, name) for name in own if name in by_name or name in store.ties}
        modules = dict(model.named_modules(remove_duplicate=False))
        for name, tensor in own.items():
            weight = by_name[stored_as[id(tensor)]]
            path, _, key = name.rpartition(".")
            module = modules[path]
            among: Tensors = module._parameters if key in module._parameters else module._buffers
            weight.add_entry(among, key, tensor.requires_grad)

    def remove(self, extent: str) -> None:
        """Replace an extent's weights by placeholders."""
        for weight in self._extents[extent]:
            weight.remove()

    def put(self, extent: str, memory: torch.Tensor) -> None:
        """Put an extent's weights into the modules, as views of ``memory``, where they lie ready for use."""
        with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode do not count changes
            for weight in self._extents[extent]:
                weight.put(memory)

    def restore(self, extent: str, memory: torch.Tensor | None) -> None:
        """Put an extent's weights into the modules permanently. They require grad if they did before the model was streamed.

        ``memory`` is as for :meth:`put`; None if the weights are in the modules already.
        """
        if memory is not None:
            self.put(extent, memory)
        for weight in self._extents[extent]:
            if weight.requires_grad and weight.present is not None:
                weight.present.requires_grad_()

    def changed(self, extent: str) -> list[str]:
        """Return the names of an extent's weights that other code has replaced, or changed in place, since :meth:`put`."""
        return [weight.facts.name for weight in self._extents[extent] if weight.changed()]

    def replaced(self, extent: str) -> list[str]:
        """Return the names of an extent's weights whose placeholders other code has replaced since :meth:`remove`."""
        return [weight.facts.name for weight in self._extents[extent] if weight.replaced()]
