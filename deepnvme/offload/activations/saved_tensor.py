"""Tensors that autograd saves, each represented by the bytes of a storage and a view of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeGuard

import torch

from deepnvme.memory.tensor_bytes import span_nbytes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_ALIGNMENT = 64
"""Alignment in bytes of torch's memory on the CPU.

Saved bytes are read back to an address that is the same modulo this number. Otherwise kernels might sum in another order.
"""


class View(NamedTuple):
    """Dtype, shape, strides and offset that turn saved bytes into a tensor again."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Bytes from the beginning of the saved bytes to the tensor's first element."""
    conjugated: bool
    negated: bool

    def on(self, storage: torch.UntypedStorage, start: int) -> torch.Tensor:
        """Return a new tensor, with its own version counter, over saved bytes that begin at byte ``start`` of a storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, (start + self.offset) // self.dtype.itemsize, self.shape, self.stride)
        if self.conjugated:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self.negated else tensor

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} tensor of shape {self.shape}"


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of bytes in host or CUDA memory: dense, not quantised, and not of a subclass."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_nested)
    )


def may_share_memory(tensor: torch.Tensor) -> bool:
    """Return whether other tensors may share the tensor's memory. False means that none does."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None or tensor.layout is not torch.strided:
        return True
    storage = tensor.untyped_storage()
    return bool(count(storage._cdata) > 2)  # the tensor, and the object in Python


def is_distributed(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # without it there is none
    return module is not None and isinstance(tensor, module.DTensor)


def is_kept_by_user(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter, a leaf that requires gradients, or a view of one: its user keeps the memory."""
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad)


def span_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[int, int]:
    """Return which bytes of its storage to save for a tensor, as (first byte, end).

    If the tensor spans at least half of its storage, all bytes are saved, since other views of it are often saved as well.
    """
    itemsize = tensor.element_size()
    begin = int(tensor.storage_offset()) * itemsize
    end = begin + span_nbytes(tensor.shape, tensor.stride(), itemsize)
    begin -= begin % _ALIGNMENT
    whole = storage.nbytes()
    return (0, whole) if 2 * (end - begin) >= whole else (begin, end)


def view_of(tensor: torch.Tensor, start: int) -> View:
    """Return the tensor's layout relative to saved bytes that begin at byte ``start`` of its storage."""
    offset = int(tensor.storage_offset()) * tensor.element_size() - start
    return View(tensor.dtype, tuple(tensor.shape), tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())


def check_version(now: int, saved: int, description: Callable[[], str]) -> None:
    """Check that a tensor was not changed in place since it was saved, as torch does without hooks for saved tensors.

    Args:
        now: The tensor's version now.
        saved: The tensor's version when it was saved.
        description: Returns a description of the tensor, for the message.

    Raises:
        RuntimeError: If the versions differ.
    """
    if now != saved:
        raise RuntimeError(
            f"a variable needed for gradient computation was modified by an inplace operation: the {description()} is at version"
            f" {now}, and was saved at version {saved}. torch.autograd.set_detect_anomaly(True) shows the operation that saved it"
        )


class KeptTensor:
    """A saved tensor that stays in memory.

    Args:
        tensor: The tensor.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Without the graph, which this is a part of. A leaf as it is: FSDP and ZeRO replace the memory of parameters.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version

    def unpack(self) -> torch.Tensor:
        """Return the tensor. Raises RuntimeError if it was changed in place since it was saved."""
        check_version(self._tensor._version, self._version, lambda: f"{self._tensor.dtype} tensor")
        return self._tensor


class Packed(Protocol):
    """Protocol of the objects that a pack hook returns, and that autograd keeps in place of saved tensors."""

    def unpack(self) -> torch.Tensor:
        """Return the tensor as autograd has saved it."""


def unpack_saved(packed: Packed) -> torch.Tensor:
    """Return the tensor that was packed. The unpack hook for autograd."""
    return packed.unpack()
