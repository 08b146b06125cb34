"""The swapper classes of DeepSpeed's ZeRO stage 3, with DeepSpeed's names and arguments, on this package's engine and buffers."""

from deepnvme._lazy import public_names

from .aio_config import (
    AIO,
    AIO_ALIGNED_BYTES,
    AIO_BLOCK_SIZE,
    AIO_DEFAULT_DICT,
    AIO_INTRA_OP_PARALLELISM,
    AIO_OVERLAP_EVENTS,
    AIO_QUEUE_DEPTH,
    AIO_SINGLE_SUBMIT,
    AIO_USE_GDS,
    MIN_AIO_BYTES,
    get_aio_config,
)
from .optimizer_swapper import OptimizerSwapper, PartitionedOptimizerSwapper, PipelinedOptimizerSwapper
from .partitioned_param_swapper import AsyncPartitionedParameterSwapper, PartitionedParamStatus
from .swap_buffers import (
    AsyncTensorSwapper,
    SwapBuffer,
    SwapBufferManager,
    SwapBufferPool,
    get_sized_buffer,
    get_sized_buffers,
    swap_in_tensors,
    swap_out_tensors,
)
from .swap_info import OptimizerStateSwapInfo

__all__ = [
    "AIO",
    "AIO_ALIGNED_BYTES",
    "AIO_BLOCK_SIZE",
    "AIO_DEFAULT_DICT",
    "AIO_INTRA_OP_PARALLELISM",
    "AIO_OVERLAP_EVENTS",
    "AIO_QUEUE_DEPTH",
    "AIO_SINGLE_SUBMIT",
    "AIO_USE_GDS",
    "MIN_AIO_BYTES",
    "AsyncPartitionedParameterSwapper",
    "AsyncTensorSwapper",
    "OptimizerStateSwapInfo",
    "OptimizerSwapper",
    "PartitionedOptimizerSwapper",
    "PartitionedParamStatus",
    "PipelinedOptimizerSwapper",
    "SwapBuffer",
    "SwapBufferManager",
    "SwapBufferPool",
    "get_aio_config",
    "get_sized_buffer",
    "get_sized_buffers",
    "swap_in_tensors",
    "swap_out_tensors",
]

__dir__ = public_names(__name__)
