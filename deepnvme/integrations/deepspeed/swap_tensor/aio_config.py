"""The ``aio`` block as the dict that DeepSpeed passes to its swappers, and the sizes and alignment of their transfers.

Contract: DeepSpeed 0.19, ``runtime/swap_tensor/constants.py``, ``aio_config.py`` and ``utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepnvme.config import AioConfig
from deepnvme.engine import Engine

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
"""Tensors of fewer bytes stay in memory: see :func:`min_swappable_bytes`."""
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


def handle_arguments(aio_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for ``aio_handle`` and ``gds_handle``."""
    return {key: aio_config[key] for key in AIO_KEYS if key != AIO_USE_GDS}


def engine_of(aio_config: Mapping[str, Any]) -> Engine:
    """Return an engine with these settings."""
    return Engine(**AioConfig(**{key: aio_config[key] for key in AIO_KEYS}).engine_arguments())


def numel_alignment(aio_config: Mapping[str, Any], element_size: int) -> int:
    """Return the number of elements of which the length of a swapped tensor has to be a multiple.

    ``element_size`` is in bytes.
    """
    return max(AIO_ALIGNED_BYTES * int(aio_config[AIO_INTRA_OP_PARALLELISM]) // element_size, 1)


def min_swappable_bytes(aio_config: Mapping[str, Any]) -> int:
    """Return the least bytes of a tensor that is swapped: 1 MiB or one block. Smaller tensors stay in memory."""
    return max(MIN_AIO_BYTES, int(aio_config[AIO_BLOCK_SIZE]))


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``count``."""
    return -(-count // multiple) * multiple
