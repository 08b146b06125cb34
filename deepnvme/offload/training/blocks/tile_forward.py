"""The forward of a tile under torch.utils.checkpoint, which is not to hold the memory of the tile's parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepnvme.offload.activations.saved_tensor import Packed

_top_hooks: Callable[[bool], tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)
"""Returns the hooks for saved tensors that are in force. Older versions of torch do not have it."""


def can_take_over() -> bool:
    """Return whether this torch can do what :class:`TileForward` does."""
    return _top_hooks is not None


class TileForward:
    """The ``forward`` of a module that takes tensors over parameters away from the hooks for saved tensors that are in force.

    All others are left to these hooks. A checkpoint counts what a forward saves, and what it saves when it is computed again, so
    both have to run in this.

    Args:
        module: The module, which gets this as its ``forward``. Not kept alive.
        saved: Returns what autograd keeps in place of a tensor over a parameter; None for other tensors.
    """

    def __init__(self, module: nn.Module, saved: Callable[[torch.Tensor], Packed | None]) -> None:
        self._own: Callable[..., Any] | None = vars(module).get("forward")
        self._module, self._saved = weakref.ref(module), saved
        module.forward = self

    def remove(self) -> None:
        """Give the module back the forward that it had."""
        module = self._module()
        if module is not None:
            vars(module).pop("forward")
            if self._own is not None:
                module.forward = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        module, forward = self._module(), self._own
        if forward is None:
            forward = type(module).forward.__get__(module)  # type: ignore[union-attr]
        assert _top_hooks is not None
        hooks = _top_hooks(False) if torch.is_grad_enabled() else None
        if hooks is None:
            return forward(*args, **kwargs)
        pack, unpack = hooks
        saved = self._saved
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved(tensor) or _SavedByOthers(pack(tensor), unpack), lambda packed: packed.unpack()
        ):
            return forward(*args, **kwargs)


class _SavedByOthers:
    """What the hooks in force have made of a tensor.

    Args:
        packed: What they have made.
        unpack: Makes a tensor of it.
    """

    __slots__ = ("_packed", "_unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self._packed, self._unpack = packed, unpack

    def unpack(self) -> torch.Tensor:
        """Return the tensor."""
        return self._unpack(self._packed)
