"""The ``aio`` block as the dict that DeepSpeed passes to its swappers, and the sizes of swapped tensors that it determines.

Contract: DeepSpeed 0.19, ``runtime/swap_tensor/constants.py`` and ``utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepnvme.drives.aio_config import AioConfig
from deepnvme.engine import Engine
from deepnvme.memory.alignment import padded

AIO_KEYS = ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds")
"""Keys of the ``aio`` block."""

AIO_DEFAULT_DICT: dict[str, Any] = AioConfig().model_dump(include=set(AIO_KEYS))
"""The ``aio`` block with its defaults."""

_MIN_AIO_BYTES = 1 << 20
"""Tensors of fewer bytes stay in memory: see :class:`SwapSizes`."""
_AIO_ALIGNED_BYTES = 1024
"""The size of a swap file is a multiple of this many bytes times ``intra_op_parallelism``."""


def engine_of(aio_config: Mapping[str, Any]) -> Engine:
    """Return an engine with the settings of an ``aio`` block."""
    return Engine(**AioConfig(**{key: aio_config[key] for key in AIO_KEYS}).engine_arguments())


class SwapSizes:
    """Base class of the swappers: smallest size of a swapped tensor, and padding, as attributes that DeepSpeed's swappers have.

    Args:
        aio_config: The ``aio`` block, with all keys.
        dtype: Dtype of the swapped tensors.
    """

    def __init__(self, aio_config: Mapping[str, Any], dtype: torch.dtype) -> None:
        self.aio_config = aio_config
        self.dtype = dtype
        self.swap_element_size = dtype.itemsize
        self.min_aio_bytes = max(_MIN_AIO_BYTES, int(aio_config["block_size"]))
        self.aligned_bytes = _AIO_ALIGNED_BYTES * int(aio_config["intra_op_parallelism"])
        self.numel_alignment = max(self.aligned_bytes // self.swap_element_size, 1)

    def _large_enough(self, numel: int) -> bool:
        """Return whether a tensor of ``numel`` elements is swapped: it needs 1 MiB, and one I/O block, at least."""
        return self.min_aio_bytes <= numel * self.swap_element_size

    def _aligned(self, numel: int) -> int:
        """Return the number of elements, padding included, that a tensor of ``numel`` elements takes in a buffer and its file."""
        return padded(numel, self.numel_alignment)
