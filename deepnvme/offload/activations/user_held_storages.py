"""Which storages their user keeps in memory, whatever autograd does."""

from __future__ import annotations

import torch

from .saved_tensor import StorageReference


class UserHeldStorages:
    """Storages that have outlived the tensors that autograd saved over them, as those of weights do: to write them is in vain."""

    def __init__(self) -> None:
        self._references: dict[int, StorageReference] = {}
        self._most = 1000

    def add(self, reference: StorageReference) -> None:
        """Add a storage. References to those that have gone are dropped every now and then."""
        self._references[reference.address] = reference
        if len(self._references) > self._most:
            self._references = {key: each for key, each in self._references.items() if not each.expired()}
            self._most = max(1000, 2 * len(self._references))

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        reference = self._references.get(storage._cdata)
        if reference is not None and reference.expired():  # only then can another storage have its address
            del self._references[storage._cdata]
            return False
        return reference is not None
