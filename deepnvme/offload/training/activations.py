"""Activations of a training on the drive, which keep parameters only where they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deepnvme.offload.activations.saved_tensor import Packed
from deepnvme.offload.activations.saving import save_on_disk

from .blocks.parameter_uses import ParameterUses

if TYPE_CHECKING:
    from deepnvme.drives.aio_config import AioConfig
    from deepnvme.offload.activations.store import ActivationStore


class TrainingActivations(save_on_disk):
    """Keeps activations on the drive, and of parameters only where they are.

    Args:
        uses: Has the parameters in memory.
        paths: Directories.
        budget: Bytes of memory.
        config: Settings of the engine.
    """

    def __init__(self, uses: ParameterUses, paths: Sequence[Path], budget: int, config: AioConfig | None) -> None:
        super().__init__(paths, memory_budget=budget, config=config)
        self._uses = uses

    def _pack(self, store: ActivationStore, tensor: torch.Tensor) -> Packed:
        return self._uses.saved(tensor) or super()._pack(store, tensor)


def unpack(packed: Packed) -> torch.Tensor:
    """Return the tensor that the pack hook was given: the unpack hook for autograd."""
    return packed.unpack()
