"""The tensor that a measurement moves, and the host buffer it goes through if it is on a GPU."""

from __future__ import annotations

from typing import Any

import torch


class TransferBuffer:
    """A tensor of random bytes to be written or read, in host memory or on a GPU.

    A tensor on a GPU is copied through a locked buffer in host memory, except with ``gds`` or ``hand_over``.

    Args:
        nbytes: Size of the tensor.
        handle: The handle that will move the tensor; allocates locked memory.
        device: The GPU; None for host memory.
        gds: Register the GPU tensor with the handle, for GPUDirect Storage.
        hand_over: Give the GPU tensor to the handle as it is.
        by_accelerator: Let PyTorch pin the host memory, instead of locking it by the handle.

    Raises:
        MemoryError: If there is not enough host memory (torch.OutOfMemoryError for a GPU's).
    """

    def __init__(
        self,
        nbytes: int,
        handle: Any,
        device: torch.device | None,
        *,
        gds: bool = False,
        hand_over: bool = False,
        by_accelerator: bool = False,
    ) -> None:
        self._bounce: torch.Tensor | None = None
        if device is None:
            self.tensor, self.kind = _host(nbytes, handle, by_accelerator)
            return
        self.tensor, self.kind = random_bytes(torch.empty(nbytes, dtype=torch.uint8, device=device)), str(device)
        if gds:
            handle.pin_device_tensor(self.tensor)
        elif not hand_over:
            self._bounce, kind = _host(nbytes, handle, by_accelerator)
            self.kind += f" by way of {kind}"

    def to_write(self, nbytes: int | None = None) -> torch.Tensor:
        """Return the memory that a handle is to write: the first ``nbytes`` bytes of the tensor, or all."""
        if self._bounce is None:
            return self.tensor[:nbytes]
        return self._bounce[:nbytes].copy_(self.tensor[:nbytes])

    def to_read(self, nbytes: int | None = None) -> torch.Tensor:
        """Return the memory that a handle is to read into, ``nbytes`` or all. Call :meth:`arrived` when it has."""
        return (self.tensor if self._bounce is None else self._bounce)[:nbytes]

    def renew(self) -> None:
        """Refill tensor and bounce buffer with new random bytes."""
        random_bytes(self.tensor)
        if self._bounce is not None:
            random_bytes(self._bounce)

    def arrived(self, nbytes: int | None = None) -> None:
        """Copy what was read from the bounce buffer, if there is one, to the tensor."""
        if self._bounce is not None:
            self.tensor[:nbytes].copy_(self._bounce[:nbytes])


def page_locked(handle: Any, nbytes: int) -> torch.Tensor:
    """Return a uint8 tensor of ``nbytes`` random bytes in page-locked memory of a handle."""
    tensor: torch.Tensor = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8, device="cpu"))
    return random_bytes(tensor)


def random_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a uint8 tensor with random bytes, which no drive can compress, and return it."""
    # Words of 8 bytes are faster to fill than bytes.
    words = tensor.numel() // 8 * 8
    tensor[:words].view(torch.int64).random_()
    tensor[words:].random_()
    return tensor


def _host(nbytes: int, handle: Any, by_accelerator: bool) -> tuple[torch.Tensor, str]:
    """Return random bytes in host memory, and what kind of memory it is."""
    if not by_accelerator:
        return page_locked(handle, nbytes), "locked memory"
    tensor = random_bytes(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
    if torch.cuda.is_available():
        return tensor.pin_memory(), "memory pinned by PyTorch"
    # As with DeepSpeed's CPU accelerator: nothing is pinned if there is no device to pin for.
    return tensor, "ordinary memory, as no accelerator pins it"
