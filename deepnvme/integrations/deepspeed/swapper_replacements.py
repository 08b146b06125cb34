"""Replaces the swapper classes that ZeRO stage 3 uses."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from . import swap_tensor as zero
from .replacement import Replacement, around, attribute, module

_OPTIMIZER = ("swap_config", "aio_config", "base_folder", "optimizer", "largest_numel", "device", "dtype", "timers")
_PARAMETERS = ("ds_config", "model_dtype")
_SWAPPING = ("offload_optimizer_config", "aio_config")


def replacements() -> Iterator[Replacement]:
    """Return replacements of the swapper classes in the modules where stage 3 looks for them.

    Raises:
        UnexpectedDeepSpeed: If a part of DeepSpeed is not where it is expected, or has other parameters.
    """
    stage3 = module("deepspeed.runtime.zero.stage3")
    for name in ("PartitionedOptimizerSwapper", "PipelinedOptimizerSwapper"):
        attribute(stage3, name, _OPTIMIZER)
        yield Replacement(stage3, name, getattr(zero, name))
    stage3_optimizer = attribute(stage3, "DeepSpeedZeroOptimizer_Stage3")
    partition_grads = attribute(stage3_optimizer, "partition_grads")
    configure = functools.partial(_with_last_gradients, partition_grads)
    yield around(stage3_optimizer, "_configure_tensor_swapping", configure, _SWAPPING)
    partition_parameters = module("deepspeed.runtime.zero.partition_parameters")
    attribute(partition_parameters, "AsyncPartitionedParameterSwapper", _PARAMETERS)
    yield Replacement(partition_parameters, "AsyncPartitionedParameterSwapper", zero.AsyncPartitionedParameterSwapper)


def _with_last_gradients(partition_grads: Any, original: Any, stage3_optimizer: Any, *arguments: Any, **named: Any) -> None:
    """Run stage 3's ``_configure_tensor_swapping``, and give this package's swapper access to stage 3's gradient buffers.

    The buffers have each parameter's gradient until the next one replaces it. DeepSpeed's swappers keep gradients in files
    instead. With either, a parameter that a backward does not reach is stepped with its last gradient.
    """
    original(stage3_optimizer, *arguments, **named)
    stage3 = weakref.ref(stage3_optimizer)
    stage3_optimizer.optimizer_swapper.last_gradients = functools.partial(_last_gradients, stage3)
    stage3_optimizer.partition_grads = functools.partial(_partition_grads, stage3, partition_grads)


def _partition_grads(
    stage3_optimizer: weakref.ref[Any], original: Any, params_to_release: list[Any], grad_partitions: list[torch.Tensor]
) -> Any:
    """Run stage 3's ``partition_grads``. Before that, let the swapper copy the gradient buffers that this call will add to.

    They are copied in every micro-batch of a step but the last, because stage 3 passes the swapper only the gradients of
    parameters that the last micro-batch reaches. A parameter that only an earlier micro-batch reaches is stepped with the
    copied gradient.
    """
    stage3: Any = stage3_optimizer()  # alive: it is calling this function
    if not stage3.is_gradient_accumulation_boundary():
        for sub_group in dict.fromkeys(stage3.grad_position[stage3.get_param_id(param)][0] for param in params_to_release):
            stage3.optimizer_swapper.keep_last_gradients(stage3.fp32_partitioned_groups_flat[sub_group])
    return original(stage3, params_to_release, grad_partitions)


def _last_gradients(stage3_optimizer: weakref.ref[Any], parameter: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield, for each parameter in a sub-group's flat tensor, its offset (elements) and this rank's part of its gradient."""
    stage3 = stage3_optimizer()
    if stage3 is None:
        return
    # stage 3 makes the buffers in its constructor, after the swapper
    partitions = getattr(stage3, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", {})
    offset = 0
    for group, flat in zip(stage3.fp16_groups, stage3.fp32_partitioned_groups_flat, strict=True):
        for param in group if flat is parameter and partitions else ():
            yield offset, partitions[param.ds_id]
            offset += partitions[param.ds_id].numel()
