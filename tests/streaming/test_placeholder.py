"""What stands for a weight that is not in memory has a shape and a dtype, and refuses everything else by name."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme.model.weight_differences import WeightInfo
from deepnvme.streaming.placeholder import Placeholder


def made() -> Any:
    return Placeholder("layer.weight", "layer", WeightInfo(torch.bfloat16, (3, 4)), torch.device("cpu"))


@pytest.mark.parametrize(
    ("named", "use"),
    [
        ("aten.add", lambda weight: weight + 1),
        ("aten.mul_", lambda weight: weight.mul_(2)),
        ("aten.cat", lambda weight: torch.cat([torch.zeros(1, 4), weight])),
        ("aten._foreach_mul", lambda weight: torch._foreach_mul([torch.zeros(1), weight], 2.0)),
        ("aten.t", lambda weight: nn.functional.linear(torch.zeros(1, 4), weight, bias=torch.zeros(3))),
        ("aten.copy_", lambda weight: weight.data.copy_(torch.zeros(3, 4))),
        ("aten._to_copy", lambda weight: weight.float()),
        ("copy.deepcopy", copy.deepcopy),
        ("pickling", pickle.dumps),
        ("pickling", lambda weight: torch.save(weight, io.BytesIO())),
        ("data_ptr", lambda weight: weight.data_ptr()),
        ("numpy", lambda weight: weight.numpy()),
        ("tolist", lambda weight: weight.tolist()),
        ("untyped_storage", lambda weight: weight.untyped_storage()),
        ("share_memory_", lambda weight: weight.share_memory_()),
        ("requires_grad_", lambda weight: weight.requires_grad_()),
    ],
)
def test_what_needs_data_is_refused_by_name(named: str, use: Callable[[Any], Any]) -> None:
    text = r"the weight 'layer\.weight' is streamed.* forward of 'layer'.* use it there, or close\(restore=True\) what streams"
    with pytest.raises(RuntimeError, match=rf"^{named}.*: {text}"):
        use(made())


@pytest.mark.parametrize("weight", [made(), made().detach()], ids=["itself", "detached, as state_dict() does"])
def test_what_it_is_can_be_asked(weight: Any) -> None:
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type) == ((3, 4), torch.bfloat16, "cpu")
    assert (weight.numel(), weight.nbytes, weight.ndim) == (12, 24, 2)
    assert not weight.requires_grad
    assert weight.requires_grad_(False) is weight
    assert repr(weight) == "Placeholder('layer.weight', shape=(3, 4), dtype=torch.bfloat16, device=cpu)"
