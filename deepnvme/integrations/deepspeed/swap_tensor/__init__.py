"""The swapper classes of DeepSpeed's ZeRO stage 3, with DeepSpeed's names and arguments, on this package's engine and buffers."""

from .aio_config import AIO_DEFAULT_DICT
from .optimizer_swapper import OptimizerSwapper, PartitionedOptimizerSwapper, PipelinedOptimizerSwapper
from .partitioned_param_swapper import AsyncPartitionedParameterSwapper, PartitionedParamStatus

__all__ = [
    "AIO_DEFAULT_DICT",
    "AsyncPartitionedParameterSwapper",
    "OptimizerSwapper",
    "PartitionedOptimizerSwapper",
    "PartitionedParamStatus",
    "PipelinedOptimizerSwapper",
]
