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


class TileForward:
    """The ``forward`` of a module that takes tensors over parameters away from the hooks for saved tensors that are in force.

    All others are left to these hooks. A checkpoint counts what a forward saves, and what it saves when it is computed again, so
    both have to run in this.

    Args:
        module: The module, which gets this as its ``forward``. Not kept alive.
        pack_param: Returns what autograd keeps in place of a tensor over a parameter; None for other tensors.
    """

    def __init__(self, module: nn.Module, pack_param: Callable[[torch.Tensor], Packed | None]) -> None:
        self._own_forward: Callable[..., Any] | None = vars(module).get("forward")
        self._module, self._pack_param = weakref.ref(module), pack_param
        module.forward = self

    @staticmethod
    def is_supported() -> bool:
        """Return whether this version of torch tells which hooks for saved tensors are in force."""
        return _top_hooks is not None

    def remove(self) -> None:
        """Give the module back the forward that it had."""
        module = self._module()
        if module is not None:
            vars(module).pop("forward")
            if self._own_forward is not None:
                module.forward = self._own_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        module, forward = self._module(), self._own_forward
        if forward is None:
            forward = type(module).forward.__get__(module)  # type: ignore[union-attr]
        assert _top_hooks is not None
        hooks = _top_hooks(False) if torch.is_grad_enabled() else None
        if hooks is None:
            return forward(*args, **kwargs)
        pack, unpack = hooks
        pack_param = self._pack_param
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: pack_param(tensor) or _PackedByOtherHooks(pack(tensor), unpack), lambda packed: packed.unpack()
        ):
            return forward(*args, **kwargs)


class _PackedByOtherHooks:
    """A tensor that the hooks in force have packed.

    Args:
        packed: What their ``pack_hook`` has returned.
        unpack: Their ``unpack_hook``, which makes a tensor of it.
    """

    __slots__ = ("_packed", "_unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self._packed, self._unpack = packed, unpack

    def unpack(self) -> torch.Tensor:
        """Return the tensor."""
        return self._unpack(self._packed)
