"""What of SGLang 0.5.23 an offloader meets: the interface in sglang/srt/utils/offloader.py, and who calls it, in which order."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn


class BaseOffloader:
    def wrap_modules(
        self, all_modules_generator: Any, submodule_accessor: Any = None, whitelist_param_names_creator: Any = None
    ) -> list[nn.Module]:
        return list(all_modules_generator)

    def post_init(self) -> None:
        pass

    @property
    def forbid_copy_engine_usage(self) -> bool:
        return False


def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Have ``sglang.srt.utils.offloader`` be importable, and return it."""
    names = ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.utils.offloader")
    modules = [ModuleType(name) for name in names]
    for name, module in zip(names, modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    for parent, module in itertools.pairwise(modules):
        setattr(parent, module.__name__.rpartition(".")[2], module)
    offloader: Any = modules[-1]
    offloader.BaseOffloader = BaseOffloader
    offloader.instance = BaseOffloader()
    offloader.create_offloader = BaseOffloader
    offloader.get_offloader = lambda: offloader.instance
    offloader.set_offloader = lambda instance: setattr(offloader, "instance", instance)
    return modules[-1]


def forget_integration() -> None:
    """Have the next import of the integration look for SGLang again."""
    for name in ("", ".offloader", ".hicache"):
        sys.modules.pop(f"deepnvme.integrations.sglang{name}", None)


def run_model(
    offloader: Any, make: Callable[[Callable[..., nn.ModuleList]], nn.Module], weights: dict[str, torch.Tensor]
) -> nn.Module:
    """As a ModelRunner does it: choose an offloader, make the model, load the weights one by one, and tell the offloader."""
    offloader.set_offloader(offloader.create_offloader())

    def make_layers(layers: Iterator[nn.Module], **kwargs: Any) -> nn.ModuleList:
        return nn.ModuleList(offloader.get_offloader().wrap_modules(layers, **kwargs))

    model = make(make_layers)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights[name])
    offloader.get_offloader().post_init()
    return model
