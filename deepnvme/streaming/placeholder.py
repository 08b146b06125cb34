"""The tensor that stands for a weight while it is not in memory."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from deepnvme.model.weight_differences import WeightInfo

RESTORE = "close(restore=True) what streams the model (load the model again if that was closed without restore)"
"""What to do where a weight is needed that is not in memory, for messages."""


class Placeholder(torch.Tensor):
    """A parameter with a shape, a dtype and a device, but without data.

    An operation that needs the data raises RuntimeError naming the weight and the block in whose forward it is in memory. (A
    tensor of the right shape over no memory would crash the process when something reads it.)

    Args:
        weight: Name of the weight.
        block: Name of the module in whose forward the weight is in memory.
        info: Shape and dtype of the weight.
        device: Where the weight will be when it is in memory.
    """

    weight: str
    """Name of the weight."""
    block: str
    """Name of the module in whose forward the weight is in memory."""

    @staticmethod
    def __new__(cls, weight: str, block: str, info: WeightInfo, device: torch.device) -> Placeholder:
        self: Placeholder = torch.Tensor._make_wrapper_subclass(cls, info.shape, dtype=info.dtype, device=device)
        self._is_param = True  # makes isinstance(self, nn.Parameter) true
        self.weight, self.block = weight, block
        return self

    def __init__(self, *args: Any) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own subclasses do

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:  # by state_dict(), of which peft saves and loads only an adapter's weights
            return args[0]._alias()
        next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Placeholder))._refuse(str(func))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder({self.weight!r}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def _alias(self) -> Placeholder:
        """Return another placeholder that does the same."""
        made = type(self).__new__(type(self), self.weight, self.block, WeightInfo.of(self), self.device)
        made.__dict__.update(self.__dict__)
        return made

    # Operations that torch does not dispatch: it would carry them out on the missing data, or crash.

    def __deepcopy__(self, memo: object) -> NoReturn:
        self._refuse("copy.deepcopy")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse("pickling")

    def data_ptr(self) -> NoReturn:
        """Raise RuntimeError: there is no memory."""
        self._refuse("data_ptr")

    def share_memory_(self) -> NoReturn:
        """Raise RuntimeError: there is no memory."""
        self._refuse("share_memory_")

    def storage(self) -> NoReturn:
        """Raise RuntimeError: there is no memory."""
        self._refuse("storage")

    def untyped_storage(self) -> NoReturn:
        """Raise RuntimeError: there is no memory."""
        self._refuse("untyped_storage")

    def tolist(self) -> NoReturn:
        """Raise RuntimeError: there are no values."""
        self._refuse("tolist")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise RuntimeError: there are no values."""
        self._refuse("numpy")

    def requires_grad_(self, requires_grad: bool = True) -> Placeholder:
        """Raise RuntimeError if ``requires_grad``: streamed weights have no gradients. Otherwise return the placeholder."""
        if requires_grad:
            self._refuse("requires_grad_")
        return self

    def _refuse(self, what: str) -> NoReturn:
        """Raise RuntimeError about an operation that needs the weight's data."""
        raise RuntimeError(
            f"{what}: the weight {self.weight!r} is streamed, and in memory only during the forward of {self.block!r} of an open"
            f" stream; use it there, or {RESTORE}"
        )
