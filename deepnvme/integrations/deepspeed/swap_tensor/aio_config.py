"""The ``aio`` block as the dict that DeepSpeed passes to its swappers, and the sizes that follow from it.

Contract: DeepSpeed 0.19, ``runtime/swap_tensor/constants.py``, ``aio_config.py`` and ``utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepnvme.config import AioConfig
from deepnvme.engine import Engine
from deepnvme.memory.alignment import padded

AIO = "aio"
AIO_BLOCK_SIZE = "block_size"
AIO_QUEUE_DEPTH = "queue_depth"
AIO_INTRA_OP_PARALLELISM = "intra_op_parallelism"
AIO_SINGLE_SUBMIT = "single_submit"
AIO_OVERLAP_EVENTS = "overlap_events"
AIO_USE_GDS = "use_gds"
AIO_KEYS = (AIO_BLOCK_SIZE, AIO_QUEUE_DEPTH, AIO_INTRA_OP_PARALLELISM, AIO_SINGLE_SUBMIT, AIO_OVERLAP_EVENTS, AIO_USE_GDS)

AIO_DEFAULT_DICT: dict[str, Any] = AioConfig().model_dump(include=set(AIO_KEYS))

MIN_AIO_BYTES = 1 << 20
"""Tensors of fewer bytes stay in memory: see :class:`SwapSizes`."""
AIO_ALIGNED_BYTES = 1024
"""The size of a swap file is a multiple of this many bytes times ``intra_op_parallelism``."""


def get_aio_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``aio`` block of a DeepSpeed configuration, with defaults for missing keys.

    Args:
        param_dict: A whole DeepSpeed configuration.

    Raises:
        pydantic.ValidationError: A ValueError that names an unknown key, or an invalid value.
    """
    return AioConfig.from_deepspeed(param_dict).model_dump(include=set(AIO_KEYS))


def engine_of(aio_config: Mapping[str, Any]) -> Engine:
    """Return an engine with these settings."""
    return Engine(**AioConfig(**{key: aio_config[key] for key in AIO_KEYS}).engine_arguments())


class SwapSizes:
    """Base of the swappers: what is large enough to be swapped, and how it is padded, in attributes that DeepSpeed's have too.

    Args:
        aio_config: The ``aio`` block, with all keys.
        dtype: Of what is swapped.
    """

    def __init__(self, aio_config: Mapping[str, Any], dtype: torch.dtype) -> None:
        self.aio_config = aio_config
        self.dtype = dtype
        self.swap_element_size = dtype.itemsize
        self.min_aio_bytes = max(MIN_AIO_BYTES, int(aio_config[AIO_BLOCK_SIZE]))
        self.aligned_bytes = AIO_ALIGNED_BYTES * int(aio_config[AIO_INTRA_OP_PARALLELISM])
        self.numel_alignment = max(self.aligned_bytes // self.swap_element_size, 1)

    def _large_enough(self, numel: int) -> bool:
        """Return whether a tensor of ``numel`` elements is swapped: it has 1 MiB or one block at least."""
        return self.min_aio_bytes <= numel * self.swap_element_size

    def _aligned(self, numel: int) -> int:
        """Return the number of elements that a tensor of ``numel`` elements takes in a buffer and in its file."""
        return padded(numel, self.numel_alignment)
