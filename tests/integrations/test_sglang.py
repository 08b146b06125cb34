"""The offloader for SGLang, against the shape of its interface: SGLang itself is not installed where these tests run."""

from __future__ import annotations

import errno
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ..support.disks import Disk
from .sglang_stand_in import forget_integration, install, run_model

MODULE = "deepnvme.integrations.sglang"


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, make_layers: Callable[..., nn.ModuleList], width: int = 64, **kwargs: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = make_layers((Layer(width) for _ in range(4)), **kwargs)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def offloader(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    forget_integration()
    yield install(monkeypatch)
    forget_integration()


def weights(seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    model = Model(nn.ModuleList)
    return model, {name: weight.detach().clone() for name, weight in model.named_parameters()}


IDS = torch.arange(12).view(2, 6)


def test_without_sglang_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ImportError, match="pip install sglang"):
        __import__(MODULE)


def test_layers_are_streamed_once_the_weights_are_loaded(offloader: ModuleType, drive: Path) -> None:
    from deepnvme.integrations.sglang import StreamingOffloader, enable

    enable(drive)
    reference, loaded = weights()
    model = run_model(offloader, Model, loaded)
    ours = offloader.get_offloader()
    assert isinstance(ours, StreamingOffloader)
    assert isinstance(ours, offloader.BaseOffloader)
    assert ours.forbid_copy_engine_usage is False
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(IDS), reference(IDS))
    assert ours.report().bytes_read > 3 * sum(weight.nbytes for name, weight in loaded.items() if "layers" in name) / 2
    with pytest.raises(RuntimeError, match=r"0\.up\.weight"):
        model.layers[0].up.weight.sum()
    ours.close()
    ours.close()
    assert [path.name for path in (drive / "rank-0").iterdir()] == ["weights"]


def test_a_second_run_may_use_the_store_of_the_first(offloader: ModuleType, drive: Path) -> None:
    from deepnvme.integrations.sglang import enable

    reference, loaded = weights()
    enable(drive)
    run_model(offloader, Model, loaded)
    offloader.get_offloader().close()
    with pytest.raises(FileExistsError):
        run_model(offloader, Model, loaded)
    enable(drive, reuse=True)
    dummy = {name: torch.zeros_like(weight) if "layers" in name else weight for name, weight in loaded.items()}
    model = run_model(offloader, Model, dummy)
    with torch.no_grad():
        assert torch.equal(model(IDS), reference(IDS))
    offloader.get_offloader().close()


def test_weights_that_are_not_contiguous_are_refused_by_name(offloader: ModuleType, drive: Path) -> None:
    from deepnvme.integrations.sglang import StreamingOffloader

    ours = StreamingOffloader(drive)
    (layer,) = ours.wrap_modules(iter([Layer(64)]))
    layer.down.weight = nn.Parameter(layer.down.weight.data.t())  # as loading leaves some quantised ones
    with pytest.raises(ValueError, match=r"0\.down\.weight"):
        ours.post_init()


def test_one_offloader_serves_one_model(offloader: ModuleType, drive: Path) -> None:
    from deepnvme.integrations.sglang import StreamingOffloader

    ours = StreamingOffloader(drive)
    with pytest.raises(RuntimeError, match="post_init"):
        ours.report()
    ours.wrap_modules(iter([Layer(64)]))
    with pytest.raises(RuntimeError, match="own"):
        ours.wrap_modules(iter([Layer(64)]))


def test_layers_that_have_no_room_are_refused_while_they_are_made(offloader: ModuleType, small_disk: Disk) -> None:
    from deepnvme.integrations.sglang import StreamingOffloader

    made = []

    def layers() -> Iterator[nn.Module]:
        for _ in range(100):
            made.append(Layer(1024))
            yield made[-1]

    with pytest.raises(OSError, match="make room") as full:
        StreamingOffloader(small_disk.path / "swap").wrap_modules(layers())
    assert full.value.errno == errno.ENOSPC
    assert len(made) < 8
    made.clear()
    del full  # whose traceback has the layers, which are mapped
    gc.collect()
