"""What programs do with an engine's weights, states and gradients between backward and step, and between steps.

Each takes the engine and the batch's number, and returns digests of what it has seen, or nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from deepspeed import utils


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest()


def nothing(engine: Any, number: int) -> list[str]:
    return []


def set_whole(engine: Any, number: int) -> list[str]:
    """Weights and, once there are some, states, each parameter by itself; what is there before and after is seen."""
    seen = []
    for parameter, value in _values(engine, number):
        seen += [digest(utils.safe_get_full_fp32_param(parameter)), digest(utils.safe_get_full_grad(parameter))]
        utils.safe_set_full_fp32_param(parameter, value)
        if engine.global_steps:
            seen.append(digest(utils.safe_get_full_optimizer_state(parameter, "exp_avg")))
            utils.safe_set_full_optimizer_state(parameter, value.abs(), "exp_avg_sq")
        seen += [digest(utils.safe_get_full_fp32_param(parameter)), digest(utils.safe_get_full_grad(parameter))]
    return seen


def set_local(engine: Any, number: int) -> list[str]:
    """This rank's part of them."""
    seen = []
    for parameter, value in _values(engine, number):
        part = value.flatten()[: parameter.ds_tensor.ds_numel].clone()
        utils.safe_set_local_fp32_param(parameter, part)
        if engine.global_steps:
            utils.safe_set_local_optimizer_state(parameter, part, "exp_avg")
            seen.append(digest(utils.safe_get_local_optimizer_state(parameter, "exp_avg_sq")))
        seen += [digest(utils.safe_get_local_fp32_param(parameter)), digest(utils.safe_get_local_grad(parameter))]
    return seen


def set_gradients(engine: Any, number: int) -> list[str]:
    """In each of the three ways, after weights were set."""
    set_whole(engine, number)
    for index, (parameter, value) in enumerate(_values(engine, number)):
        if index % 3 == 0:
            utils.safe_set_full_grad(parameter, value)
        elif index % 3 == 1:
            utils.safe_set_local_grad(parameter, value.flatten()[: parameter.ds_tensor.ds_numel].clone())
        else:
            utils.safe_update_full_grad_vectorized([parameter], lambda gradient, _: gradient * 2)
    return [digest(utils.safe_get_full_grad(parameter)) for parameter in engine.module.parameters()]


def set_weights(engine: Any, number: int) -> list[str]:
    """And states, where there are no gradients."""
    for parameter, value in _values(engine, number):
        utils.safe_set_full_fp32_param(parameter, value)
        utils.safe_set_full_optimizer_state(parameter, value.abs(), "exp_avg_sq")
    return [digest(utils.safe_get_full_fp32_param(parameter)) for parameter in engine.module.parameters()]


def see_gradients(engine: Any, number: int) -> list[str]:
    """All of them, in both ways."""
    parameters = list(engine.module.parameters())
    whole = [digest(utils.safe_get_full_grad(parameter)) for parameter in parameters]
    return whole + [digest(utils.safe_get_local_grad(parameter)) for parameter in parameters]


def evaluate(engine: Any, number: int) -> list[str]:
    """The model's own output, without gradients."""
    engine.eval()
    with torch.no_grad():
        width = next(engine.module.parameters()).ds_shape[-1]
        output = engine(torch.ones(1, width, dtype=torch.bfloat16 if engine.bfloat16_enabled() else torch.float32))
    engine.train()
    return [digest(output)]


def gather_and_change(engine: Any, number: int) -> list[str]:
    """Weights as the model computes with them; the masters are not told, which is DeepSpeed's to do."""
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        for parameter in parameters:
            parameter.data.mul_(1.5)
    with deepspeed.zero.GatheredParameters(parameters):
        return [digest(parameter.data) for parameter in parameters]


def consolidate(engine: Any, number: int) -> list[str]:
    """The model's whole state dict, as it is exported."""
    state = engine._zero3_consolidated_16bit_state_dict()
    return [digest(value) for value in state.values()] if state else []


def save(engine: Any, number: int) -> list[str]:
    """A checkpoint, which changes nothing."""
    engine.save_checkpoint(os.path.join(engine._config.zero_config.offload_optimizer.nvme_path, "saved"), tag=str(number))
    return []


def forget_gathered(engine: Any, number: int) -> list[str]:
    engine.empty_partition_cache()
    return []


ACCESSES: dict[str, Callable[[Any, int], list[str]]] = {
    function.__name__: function
    for function in (
        nothing,
        set_whole,
        set_local,
        set_gradients,
        set_weights,
        see_gradients,
        evaluate,
        gather_and_change,
        consolidate,
        save,
        forget_gathered,
    )
}


def _values(engine: Any, number: int) -> Iterator[tuple[Any, torch.Tensor]]:
    """Of each parameter another one, the same on all ranks."""
    generator = torch.Generator().manual_seed(number)
    for parameter in engine.module.parameters():
        yield parameter, torch.randn(parameter.ds_shape, generator=generator) * 1e-2
