"""The utils op: tensors as bytes, and lists of tensors flattened into one. Contract: DeepSpeed's csrc/utils and torch._utils."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import overload

import torch

__all__ = ["cast_to_byte_tensor", "flatten", "unflatten"]


@overload
def cast_to_byte_tensor(tensor: torch.Tensor) -> torch.Tensor: ...
@overload
def cast_to_byte_tensor(tensor: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...
def cast_to_byte_tensor(tensor: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Return a flat uint8 view of ``tensor``'s memory, without a copy; for a sequence, a list of such views.

    A tensor of one byte or none is returned as it is, as DeepSpeed does. Any device and any dtype. Raises ValueError for a tensor
    that is not contiguous, TypeError for a value that is not a strided tensor.
    """
    if isinstance(tensor, torch.Tensor):
        return _bytes_of(tensor)
    return [_bytes_of(each) for each in tensor]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a 1-D tensor with the elements of ``tensors``, one tensor after the other.

    The tensors must share a dtype and a device. A single contiguous tensor is not copied: the result is a view of it. Raises
    ValueError for an empty sequence.
    """
    if len(tensors) == 0:
        raise ValueError("flatten needs at least one tensor, got none")
    if len(tensors) == 1:
        return tensors[0].contiguous().view(-1)
    kinds = {(each.dtype, each.device) for each in tensors}
    if len(kinds) > 1:
        listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(f"flatten needs tensors of one dtype on one device, got {listed}")
    return torch.cat([each.contiguous().view(-1) for each in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of ``flat`` with the shapes of ``tensors``, in order: the inverse of ``flatten``.

    Raises ValueError if ``flat`` is not 1-D or has another number of elements than all ``tensors`` together.
    """
    wanted = sum(each.numel() for each in tensors)
    if flat.dim() != 1 or flat.numel() != wanted:
        raise ValueError(f"unflatten needs a 1-D tensor of {wanted} elements, got shape {tuple(flat.shape)}")
    starts = accumulate((each.numel() for each in tensors), initial=0)
    return [flat.narrow(0, start, each.numel()).view(each.shape) for start, each in zip(starts, tensors, strict=False)]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return one tensor as :func:`cast_to_byte_tensor` does."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        kind = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"cast_to_byte_tensor needs strided tensors, got {kind}")
    if tensor.nbytes <= 1:
        return tensor
    if not tensor.is_contiguous():
        raise ValueError(
            f"cast_to_byte_tensor needs a contiguous tensor, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}; call .contiguous() first"
        )
    return tensor.detach().view(-1).view(torch.uint8)
