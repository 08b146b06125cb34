"""Whose swapper classes ZeRO stage 3 takes, and in which folder of ``nvme_path`` each swapper has its files.

DeepSpeed names the files by rank and parameter alone: two jobs on one ``nvme_path`` would train with each other's states, and the
one that starts later removes the other's parameters.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import logging
import os
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from deepnvme.store.directory_lock import lock

from . import swap_tensor as zero
from .places import Replacement, attribute, module
from .swap_tensor.environment import rank

_logger = logging.getLogger(__name__)

_MOST_JOBS = 1000
_OPTIMIZER = ("swap_config", "aio_config", "base_folder", "optimizer", "largest_numel", "device", "dtype", "timers")
_PARAMETERS = ("ds_config", "model_dtype")
_SWAPPING = ("offload_optimizer_config", "aio_config")


def replacements(*, ours: bool) -> Iterator[Replacement]:
    """Of the swapper classes, where stage 3 looks for them: by ``ours``, or by DeepSpeed's own, kept apart from other jobs'."""
    stage3 = module("deepspeed.runtime.zero.stage3")
    for name in ("PartitionedOptimizerSwapper", "PipelinedOptimizerSwapper"):
        theirs = attribute(stage3, name, _OPTIMIZER)
        yield Replacement(stage3, name, _optimizer_swapper(getattr(zero, name) if ours else theirs))
    stage3_optimizer = attribute(stage3, "DeepSpeedZeroOptimizer_Stage3")
    configure = attribute(stage3_optimizer, "_configure_tensor_swapping", _SWAPPING)
    partition_grads = attribute(stage3_optimizer, "partition_grads")
    if ours:
        yield Replacement(stage3_optimizer, "_configure_tensor_swapping", _with_last_gradients(configure, partition_grads))
    partition_parameters = module("deepspeed.runtime.zero.partition_parameters")
    theirs = attribute(partition_parameters, "AsyncPartitionedParameterSwapper", _PARAMETERS)
    kind = _parameter_swapper(zero.AsyncPartitionedParameterSwapper if ours else theirs)
    yield Replacement(partition_parameters, "AsyncPartitionedParameterSwapper", kind)


def _optimizer_swapper(base: Any) -> type:
    def __init__(self: Any, swap_config: Any, aio_config: Any, base_folder: str, *arguments: Any, **named: Any) -> None:
        nvme_path, zero_stage_3 = os.path.split(base_folder)
        own = _own(self, nvme_path, "optimizer")
        base.__init__(self, swap_config, aio_config, os.path.join(own, zero_stage_3), *arguments, **named)

    return _derived(base, __init__)


def _parameter_swapper(base: Any) -> type:
    def __init__(self: Any, ds_config: Any, model_dtype: Any) -> None:
        offload = ds_config.zero_config.offload_param
        own = offload.model_copy(update={"nvme_path": _own(self, offload.nvme_path, "parameters")})
        zero_config = types.SimpleNamespace(offload_param=own)
        base.__init__(self, types.SimpleNamespace(zero_config=zero_config, aio_config=ds_config.aio_config), model_dtype)

    return _derived(base, __init__)


def _with_last_gradients(theirs: Any, partition_grads: Any) -> Any:
    """Gives our swapper stage 3's own gradient buffers, which hold each parameter's gradient until the next one comes.

    DeepSpeed's swappers keep it in their files. Either way a parameter that a backward does not reach is stepped with its last
    gradient.
    """

    @functools.wraps(theirs)
    def _configure_tensor_swapping(self: Any, offload_optimizer_config: Any, aio_config: Any) -> None:
        theirs(self, offload_optimizer_config, aio_config)
        stage3 = weakref.ref(self)
        self.optimizer_swapper.last_gradients = functools.partial(_last_gradients, stage3)
        self.partition_grads = functools.partial(_partition_grads, stage3, partition_grads)

    return _configure_tensor_swapping


def _partition_grads(
    stage3_optimizer: weakref.ref[Any], theirs: Any, params_to_release: list[Any], grad_partitions: list[torch.Tensor]
) -> Any:
    """Before stage 3 adds the gradients of a micro-batch that is not a step's last to its buffers, has our swapper copy these.

    Stage 3 gives the swapper only gradients of parameters that the last micro-batch reaches. What only an earlier one reaches is
    stepped with the gradient that was given before.
    """
    stage3: Any = stage3_optimizer()  # which is calling
    if not stage3.is_gradient_accumulation_boundary():
        for sub_group in dict.fromkeys(stage3.grad_position[stage3.get_param_id(param)][0] for param in params_to_release):
            stage3.optimizer_swapper.keep_last_gradients(stage3.fp32_partitioned_groups_flat[sub_group])
    return theirs(stage3, params_to_release, grad_partitions)


def _last_gradients(stage3_optimizer: weakref.ref[Any], parameter: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """For each parameter of a sub-group's flat tensor: its offset in it (elements), and this rank's part of its gradient."""
    stage3 = stage3_optimizer()
    if stage3 is None:
        return
    partitions = getattr(stage3, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", {})  # none yet when it is made
    offset = 0
    for group, flat in zip(stage3.fp16_groups, stage3.fp32_partitioned_groups_flat, strict=True):
        for param in group if flat is parameter and partitions else ():
            yield offset, partitions[param.ds_id]
            offset += partitions[param.ds_id].numel()


def _derived(base: type, __init__: Any) -> type:
    own = {"__init__": __init__, "__doc__": base.__doc__, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), own)


class _Held:
    """A file that is closed when this is dropped, also where an interrupt ends that: then the file closes itself."""

    def __init__(self, path: str) -> None:
        with contextlib.suppress(FileExistsError):
            io.FileIO(path, "x").close()
        self.file = io.FileIO(path)  # another user's, it may be, who lets nobody else write

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()


def _own(swapper: Any, nvme_path: Any, kind: str) -> str:
    """``nvme_path``, or where another swapper of this kind and rank is using that, the first folder job-N in it that none uses.

    It is the swapper's until that is dropped, or its process ends. Raises OSError naming the path where files cannot be made or
    locked.
    """
    for number in range(_MOST_JOBS):
        folder = os.path.join(nvme_path, f"job-{number + 1}") if number else os.fspath(nvme_path)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"deepnvme-{kind}-rank{rank()}.lock")
        held = _Held(path)
        try:
            lock(held.file.fileno(), fcntl.LOCK_EX, Path(path))
        except BlockingIOError:
            continue
        swapper._held = held
        if number:
            _logger.warning("'%s' is in use by another job: this one has its %s in '%s'", nvme_path, kind, folder)
        return folder
    raise OSError(errno.EBUSY, f"{_MOST_JOBS} jobs are using it: choose another nvme_path", os.fspath(nvme_path))
