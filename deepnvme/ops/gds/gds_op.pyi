"""What the compiled ``gds`` op offers; the implementation is ``csrc/bindings/gds.cpp`` and ``csrc/gds``."""

import torch

from deepnvme.ops.aio.async_io_op import aio_handle

source_hash: str
"""As in :mod:`deepnvme.ops.aio.async_io_op`."""

class gds_handle(aio_handle):
    """DeepSpeed's handle for CUDA tensors (DeepSpeed 0.19, ``py_ds_gds.cpp``): the methods of ``aio_handle``, and those below.

    Whole pages of a CUDA tensor go between the drive and GPU memory by cuFile, a block at a time on up to 16 threads for each
    worker; what is left at the ends, and CPU tensors, go as with ``aio_handle``. Where cuFile, its driver, or the file's
    filesystem or drive cannot, everything does, and ``stats()["fallbacks"]`` has the reason; ``stats()["bytes_gds"]`` is what
    went by cuFile.

    ``strict``: raise instead: RuntimeError here, where there is no cuFile, and OSError from the transfer of a file that it
    cannot take.
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
        """A new tensor with the device and dtype of ``example_tensor``, registered as by :meth:`pin_device_tensor`."""
    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Unregister a tensor's memory: another name of :meth:`unpin_device_tensor`."""
    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Register a tensor's memory with cuFile, which then needs no buffer of its own for it.

        Its storage is kept, and must not be resized, until it is unregistered.
        False where transfers do not go by cuFile anyway, and for a tensor of less than 4096 bytes, which never does. Raises
        ValueError for a tensor on the CPU or one that is not contiguous, OSError for what cuFile refuses (EEXIST for memory
        registered already).
        """
    def unpin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """False for what is not registered. Not while a transfer of it is under way. Raises OSError where the device's context
        cannot be had; the tensor is registered still."""

def adopt_pinned_ranges(shared: object) -> None:
    """Have this op and ``async_io`` know the same pinned memory; ``GDSBuilder.load`` does it."""

def version() -> str:
    """cuFile's, such as "1.14". Raises RuntimeError where there is none."""
