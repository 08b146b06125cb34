"""What an OffloadedTraining is compared with: the same model trained in memory, and its values."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from deepnvme.offload import OffloadedTraining

from .micro_batches import seeded_micro_batches


def state_of(training: OffloadedTraining) -> dict[str, torch.Tensor]:
    """Return a copy of the model's state."""
    return {name: value.clone() for name, value in training.state_dict()["model"].items()}


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all values are the same. NaN is NaN: a training may diverge, and has to in the same way."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def assert_same_values(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Of the states of two models: the same names in the same order, dtypes and values."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert same_values(found[name], value), name


def assert_same_model(training: OffloadedTraining, expected: nn.Module) -> None:
    """The model on the drive has the values of one in memory."""
    assert_same_values(training.state_dict()["model"], expected.state_dict())


class InMemory:
    """Trains a copy of a model as anybody would. The options are those of :class:`OffloadedTraining`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: Any = torch.optim.AdamW,
        *,
        master_weights: bool = False,
        micro_batches: int = 1,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        self.model, self.parts, self.norm = copy.deepcopy(model), micro_batches, max_norm
        self.params = [param for param in self.model.parameters() if param.requires_grad]
        self.masters = [
            param.detach().float().requires_grad_()
            if master_weights and param.dtype in (torch.bfloat16, torch.float16)
            else param
            for param in self.params
        ]
        self.optimizer = optimizer_class(self.masters, **{"lr": 1e-2, **options})

    def step(self, *tensors: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        rows = len(tensors[0])
        for number in seeded_micro_batches(self.parts):
            begin, end = rows * number // self.parts, rows * (number + 1) // self.parts
            loss = self.model(*(tensor[begin:end] for tensor in tensors))
            loss = loss if self.parts == 1 else loss * ((end - begin) / rows)
            loss.backward()
            losses.append(loss.detach())
        if self.norm is not None:
            nn.utils.clip_grad_norm_(self.params, self.norm)
        for master, param in zip(self.masters, self.params, strict=True):
            master.grad = None if param.grad is None else param.grad.to(master.dtype)
        self.optimizer.step()
        with torch.no_grad():
            for master, param in zip(self.masters, self.params, strict=True):
                param.copy_(master)
        self.model.zero_grad()
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total


def train_both(training: OffloadedTraining, reference: Any, batches: Iterable[Any]) -> None:
    """Make a step of both with each batch, a tensor or several. Losses and values have to be the same bits.

    ``reference``: :class:`InMemory`, or another OffloadedTraining.
    """
    for step, batch in enumerate(batches):
        given = batch if isinstance(batch, tuple) else (batch,)
        losses = []
        for each in (reference, training):
            torch.manual_seed(step)
            losses.append(each.step(*given))
        assert torch.equal(*losses), step
    expected = reference.state_dict()["model"] if isinstance(reference, OffloadedTraining) else reference.model.state_dict()
    assert_same_values(training.state_dict()["model"], expected)
