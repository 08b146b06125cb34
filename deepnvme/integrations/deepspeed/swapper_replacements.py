"""Replaces the swapper classes that ZeRO stage 3 uses, and gives each swapper a folder of its own in ``nvme_path``.

DeepSpeed names swap files by rank and parameter only. So two jobs with one ``nvme_path`` would train with each other's states,
and the job that starts later would remove the other job's parameters.
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

from deepnvme.files.directory_lock import lock
from deepnvme.telemetry.descriptions import printable

from . import swap_tensor as zero
from .replacement import Replacement, around, attribute, module
from .swap_tensor.environment import rank

_logger = logging.getLogger(__name__)

_MOST_JOBS = 1000
_OPTIMIZER = ("swap_config", "aio_config", "base_folder", "optimizer", "largest_numel", "device", "dtype", "timers")
_PARAMETERS = ("ds_config", "model_dtype")
_SWAPPING = ("offload_optimizer_config", "aio_config")


def replacements(*, ours: bool) -> Iterator[Replacement]:
    """Return replacements of the swapper classes in the modules where stage 3 looks for them.

    With every replacement, a job's files are in another folder than other jobs' files.

    Args:
        ours: True for this package's swapper classes, False for classes derived from DeepSpeed's own.

    Raises:
        UnexpectedDeepSpeed: If a part of DeepSpeed is not where it is expected, or has other parameters.
    """
    stage3 = module("deepspeed.runtime.zero.stage3")
    for name in ("PartitionedOptimizerSwapper", "PipelinedOptimizerSwapper"):
        theirs = attribute(stage3, name, _OPTIMIZER)
        yield Replacement(stage3, name, _optimizer_swapper(getattr(zero, name) if ours else theirs))
    stage3_optimizer = attribute(stage3, "DeepSpeedZeroOptimizer_Stage3")
    partition_grads = attribute(stage3_optimizer, "partition_grads")
    configure = around(
        stage3_optimizer, "_configure_tensor_swapping", functools.partial(_with_last_gradients, partition_grads), _SWAPPING
    )
    if ours:
        yield configure
    partition_parameters = module("deepspeed.runtime.zero.partition_parameters")
    theirs = attribute(partition_parameters, "AsyncPartitionedParameterSwapper", _PARAMETERS)
    kind = _parameter_swapper(zero.AsyncPartitionedParameterSwapper if ours else theirs)
    yield Replacement(partition_parameters, "AsyncPartitionedParameterSwapper", kind)


def _optimizer_swapper(base: Any) -> type:
    """Return a subclass of an optimizer swapper whose files are in a folder of its own: see :func:`_claim_folder`."""

    def __init__(self: Any, swap_config: Any, aio_config: Any, base_folder: str, *arguments: Any, **named: Any) -> None:
        nvme_path, zero_stage_3 = os.path.split(base_folder)
        own = _claim_folder(self, nvme_path, "optimizer")
        base.__init__(self, swap_config, aio_config, os.path.join(own, zero_stage_3), *arguments, **named)

    return _derived(base, __init__)


def _parameter_swapper(base: Any) -> type:
    """Return a subclass of a parameter swapper whose files are in a folder of its own: see :func:`_claim_folder`."""

    def __init__(self: Any, ds_config: Any, model_dtype: Any) -> None:
        offload = ds_config.zero_config.offload_param
        own = offload.model_copy(update={"nvme_path": _claim_folder(self, offload.nvme_path, "parameters")})
        zero_config = types.SimpleNamespace(offload_param=own)
        base.__init__(self, types.SimpleNamespace(zero_config=zero_config, aio_config=ds_config.aio_config), model_dtype)

    return _derived(base, __init__)


def _with_last_gradients(partition_grads: Any, own: Any, stage3_optimizer: Any, *arguments: Any, **named: Any) -> None:
    """Run stage 3's ``_configure_tensor_swapping``, and give this package's swapper access to stage 3's gradient buffers.

    The buffers have each parameter's gradient until the next one arrives. DeepSpeed's swappers keep gradients in files instead.
    With either, a parameter that a backward does not reach is stepped with its last gradient.
    """
    own(stage3_optimizer, *arguments, **named)
    stage3 = weakref.ref(stage3_optimizer)
    stage3_optimizer.optimizer_swapper.last_gradients = functools.partial(_last_gradients, stage3)
    stage3_optimizer.partition_grads = functools.partial(_partition_grads, stage3, partition_grads)


def _partition_grads(
    stage3_optimizer: weakref.ref[Any], theirs: Any, params_to_release: list[Any], grad_partitions: list[torch.Tensor]
) -> Any:
    """Run stage 3's ``partition_grads``. First have the swapper copy gradients from the buffers that it will add to.

    The copy is made in every micro-batch of a step but the last, because stage 3 passes the swapper only gradients of
    parameters that the last micro-batch reaches. A parameter that only an earlier micro-batch reaches is stepped with the
    copied gradient.
    """
    stage3: Any = stage3_optimizer()  # alive: it is calling this function
    if not stage3.is_gradient_accumulation_boundary():
        for sub_group in dict.fromkeys(stage3.grad_position[stage3.get_param_id(param)][0] for param in params_to_release):
            stage3.optimizer_swapper.keep_last_gradients(stage3.fp32_partitioned_groups_flat[sub_group])
    return theirs(stage3, params_to_release, grad_partitions)


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


def _derived(base: type, __init__: Any) -> type:
    """Return a subclass of ``base`` with this constructor, and the name, module and docstring of ``base``."""
    own = {"__init__": __init__, "__doc__": base.__doc__, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), own)


def _claim_folder(swapper: Any, nvme_path: Any, kind: str) -> str:
    """Return a folder that no other swapper of this kind and rank uses: ``nvme_path``, or else the first free ``job-N`` in it.

    The folder is locked until the swapper is dropped or its process ends. Raises OSError naming the path if files cannot be made
    or locked.
    """
    for number in range(_MOST_JOBS):
        folder = os.path.join(nvme_path, f"job-{number + 1}") if number else os.fspath(nvme_path)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"deepnvme-{kind}-rank{rank()}.lock")
        with contextlib.suppress(FileExistsError):
            io.FileIO(path, "x").close()
        file = io.FileIO(path)  # read-only: the file may be another user's, and not writable
        weakref.finalize(swapper, file.close).atexit = False  # until the process has ended, others may still write there
        try:
            lock(file.fileno(), fcntl.LOCK_EX, Path(path))
        except BlockingIOError:
            file.close()
            continue
        if number:
            names = printable(nvme_path), kind, printable(folder)
            _logger.warning("'%s' is in use by another job: this one has its %s in '%s'", *names)
        return folder
    raise OSError(errno.EBUSY, f"{_MOST_JOBS} jobs are using it: choose another nvme_path", os.fspath(nvme_path))
