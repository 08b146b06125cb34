"""The tensor that is moved, and the memory it goes through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class TransferBuffer:
    """``nbytes`` random bytes, in locked memory of ``handle`` or on ``device``.

    A tensor on a device goes by way of a locked buffer on the host, unless ``gds`` registers it with the handle, or ``hand_over``
    leaves it to the handle as it is. ``by_accelerator``: host memory is pinned by PyTorch instead of locked by the handle. Raises
    MemoryError (torch.OutOfMemoryError on a device).
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
        import torch

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
        """What a handle is to write: the first ``nbytes`` bytes, or all."""
        if self._bounce is None:
            return self.tensor[:nbytes]
        return self._bounce[:nbytes].copy_(self.tensor[:nbytes])

    def to_read(self, nbytes: int | None = None) -> torch.Tensor:
        """What a handle is to read into; call :meth:`arrived` when it has."""
        return (self.tensor if self._bounce is None else self._bounce)[:nbytes]

    def renew(self) -> None:
        """Refill tensor and bounce buffer with new random bytes."""
        random_bytes(self.tensor)
        if self._bounce is not None:
            random_bytes(self._bounce)

    def arrived(self, nbytes: int | None = None) -> None:
        """What was read is in the tensor when this returns."""
        if self._bounce is not None:
            self.tensor[:nbytes].copy_(self._bounce[:nbytes])


def locked(handle: Any, nbytes: int) -> torch.Tensor:
    """``nbytes`` random bytes in the handle's page-locked memory."""
    import torch

    tensor: torch.Tensor = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8, device="cpu"))
    return random_bytes(tensor)


def random_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with bytes that no drive can compress, in words because that is faster."""
    import torch

    words = tensor.numel() // 8 * 8
    tensor[:words].view(torch.int64).random_()
    tensor[words:].random_()
    return tensor


def _host(nbytes: int, handle: Any, by_accelerator: bool) -> tuple[torch.Tensor, str]:
    import torch

    if not by_accelerator:
        return locked(handle, nbytes), "locked memory"
    tensor = random_bytes(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
    if torch.cuda.is_available():
        return tensor.pin_memory(), "memory pinned by PyTorch"
    # As DeepSpeed's CPU accelerator has it: nothing is pinned where there is no device to pin for.
    return tensor, "ordinary memory, as no accelerator pins it"
