"""How DeepSpeed's buffers divide a budget of memory: those of the optimizer's states, and those of parameters."""

from __future__ import annotations

from dataclasses import dataclass

from harness.training_models import TrainingShape

OPTIMIZER_BUFFERS = 16  # pipelined; each has the float32 values of a sub-group
_OPTIMIZER_SHARE = 0.75  # of the budget; what they leave is for parameters
_LEAST_PARAMETER_BUFFERS = 5  # DeepSpeed's default
_GRAIN = 1 << 12  # elements


@dataclass(frozen=True)
class Buffers:
    """What DeepSpeed is to be told."""

    sub_group_size: int
    parameter_buffers: int
    nbytes: int
    """Of all buffers: more than the budget if DeepSpeed cannot do with less."""


def divide(shape: TrainingShape, budget: int) -> Buffers:
    """Return the buffers that use a budget in bytes, as far as the sizes of parameters allow it."""
    item = shape.torch_dtype.itemsize
    size = _sub_group_size(shape.numels, int(budget * _OPTIMIZER_SHARE) // (4 * OPTIMIZER_BUFFERS))
    # Before new parameters are written, those of a sub-group are copied into a buffer of their own.
    for_sub_groups = (4 * OPTIMIZER_BUFFERS + item) * _largest_sub_group(shape.numels, size)
    count = max(_LEAST_PARAMETER_BUFFERS, (budget - for_sub_groups) // (item * shape.largest_parameter))
    return Buffers(size, count, for_sub_groups + count * item * shape.largest_parameter)


def _sub_group_size(numels: list[int], most: int) -> int:
    """Return the largest for which no sub-group has more elements than ``most``; 1, for one in each, if there is none."""
    return next((size for size in range(most, 0, -_GRAIN) if _largest_sub_group(numels, size) <= most), 1)


def _largest_sub_group(numels: list[int], size: int) -> int:
    """Return the elements of DeepSpeed's largest sub-group. Each ends with the parameter that reaches the size."""
    largest = current = 0
    for numel in numels:
        current += numel
        largest = max(largest, current)
        if current >= size:
            current = 0
    return largest
