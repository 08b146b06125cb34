"""The ``aio`` block as DeepSpeed hands it to its swappers: a dict with these keys, and how large and how aligned transfers are.

Contract: DeepSpeed 0.19, ``runtime/swap_tensor/constants.py``, ``aio_config.py`` and ``utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepnvme.config import AioConfig

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
"""What is smaller stays in memory."""
AIO_ALIGNED_BYTES = 1024
"""Files are multiples of this many bytes for each worker (``intra_op_parallelism``)."""


def get_aio_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The ``aio`` block of a whole DeepSpeed configuration, with the defaults for what it leaves out.

    Raises pydantic.ValidationError (a ValueError) naming a key that does not exist, or the value that it cannot have.
    """
    return AioConfig.from_deepspeed(param_dict).model_dump(include=set(AIO_KEYS))


def handle_arguments(aio_config: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for ``aio_handle`` and ``gds_handle``."""
    return {key: aio_config[key] for key in AIO_KEYS if key != AIO_USE_GDS}


def numel_alignment(aio_config: Mapping[str, Any], element_size: int) -> int:
    """Elements that the length of a swapped tensor is rounded up to a multiple of."""
    return max(AIO_ALIGNED_BYTES * int(aio_config[AIO_INTRA_OP_PARALLELISM]) // element_size, 1)


def min_swappable_bytes(aio_config: Mapping[str, Any]) -> int:
    """Tensors smaller than this many bytes stay in memory."""
    return max(MIN_AIO_BYTES, int(aio_config[AIO_BLOCK_SIZE]))


def round_up(count: int, multiple: int) -> int:
    """The least multiple that is not below ``count``."""
    return -(-count // multiple) * multiple
