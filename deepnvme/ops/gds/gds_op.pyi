"""What the compiled ``gds`` op offers; the implementation is ``csrc/bindings/gds.cpp`` and ``csrc/gds``."""

import torch

from deepnvme.ops.aio.async_io_op import aio_handle

source_hash: str
"""As in :mod:`deepnvme.ops.aio.async_io_op`."""

class gds_handle(aio_handle):
    """Transfers between files and CUDA tensors by GPUDirect Storage: DeepSpeed's handle, with the methods of ``aio_handle``.

    cuFile transfers whole pages of a CUDA tensor between the drive and GPU memory, a block at a time on up to 16 threads for each
    worker. Incomplete pages at the ends, and CPU tensors, are transferred as with ``aio_handle``. So are all bytes if cuFile, its
    driver, or the file's filesystem or drive does not support GPU-direct transfers; ``stats()["fallbacks"]`` has the reason.
    ``stats()["bytes_gds"]`` is the number of bytes that cuFile has transferred.

    Args:
        block_size: Most bytes of one transfer, 512 to 1 GiB. Larger tensors are split.
        queue_depth: Most blocks in progress at a time for each worker, 1 to 4096.
        single_submit: As for ``aio_handle``.
        overlap_events: Has no effect.
        intra_op_parallelism: Number of workers, 1 to 256.
        num_threads: Another name for ``intra_op_parallelism``.
        strict: Raise rather than fall back: RuntimeError from the constructor if there is no cuFile, and OSError from a transfer
            of a file that cuFile does not support.
    """

    def __init__(
        self,
        block_size: int = 1048576,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
        *,
        num_threads: int | None = None,
        strict: bool = False,
    ) -> None: ...
    def new_pinned_device_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return a new tensor with the device and dtype of ``example_tensor``, registered as by :meth:`pin_device_tensor`."""
    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Unregister a tensor's memory: another name of :meth:`unpin_device_tensor`."""
    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Register a tensor's memory with cuFile, which then needs no bounce buffer for it. Return whether it was registered.

        The tensor's storage is kept, and must not be resized, until it is unregistered. Returns False if cuFile is not used, or
        the tensor has less than 4096 bytes. Raises ValueError for a tensor on the CPU or one that is not contiguous, OSError if
        cuFile refuses the memory (EEXIST for memory registered already).
        """
    def unpin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Unregister a tensor's memory. Return False if it is not registered. Not allowed while it is being transferred.

        Raises OSError if the device's context is not available; the tensor then stays registered.
        """

def adopt_pinned_ranges(shared: object) -> None:
    """Share the record of pinned memory of ``async_io`` with this op. Called by ``GDSBuilder.load``."""

def version() -> str:
    """Return the version of cuFile, such as "1.14". Raises RuntimeError if there is no cuFile."""
