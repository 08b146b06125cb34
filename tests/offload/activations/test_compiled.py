"""What compiled functions save for their backward goes to a drive, and comes back the same bits: with inductor on the CPU."""

from __future__ import annotations

import contextlib
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepnvme.offload import save_on_disk

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # torch's own
]

KIB = 1 << 10
WIDTH = 64


@pytest.fixture(scope="module", autouse=True)
def inductor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiles in this process, and keeps what it has compiled for the tests of this file."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"needs a C++ compiler for inductor: {compiler}")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("needs the headers of Python for inductor")
    import torch._inductor.config

    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(compile_threads=1):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


class CountingBackend:
    """A backend of torch.compile that counts the graphs it compiles, and those of them that are given sizes."""

    def __init__(self, name: str) -> None:
        from torch._dynamo import lookup_backend

        self._compile = lookup_backend(name)
        self.graphs = self.with_sizes = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        self.with_sizes += any(isinstance(each, torch.SymInt) for each in inputs)
        return self._compile(graph, inputs)


@pytest.fixture
def backend() -> Iterator[CountingBackend]:
    torch._dynamo.reset()
    yield CountingBackend("inductor")
    torch._dynamo.reset()


@pytest.fixture
def activations(drive: Path) -> Iterator[save_on_disk]:
    """With memory for a fifth of what the model saves."""
    with contextlib.closing(save_on_disk(drive / "activations", memory_budget=256 * KIB, min_bytes=KIB)) as made:
        yield made


class Block(nn.Module):
    """Attention and a feed-forward network, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> Any:
        heads = [part.unflatten(-1, (4, -1)).transpose(-2, -3) for part in self.qkv(self.norm(x)).chunk(3, -1)]
        x = x + nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(-2, -3).flatten(-2)
        return x + self.feed(x)


def blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(3))


Function = Callable[[torch.Tensor], torch.Tensor]


def in_turn(functions: Any) -> Function:
    """A function that calls one after the other."""

    def call(x: torch.Tensor) -> torch.Tensor:
        for function in functions:
            x = function(x)
        return x

    return call


def trained(
    layers: nn.Module, forward: Function, context: Any = None, lengths: tuple[int, ...] = (64, 64, 64)
) -> list[torch.Tensor]:
    """The losses, and the gradients and weights after each step."""
    optimizer = torch.optim.AdamW(layers.parameters(), 1e-3)
    torch.manual_seed(2)
    found = []
    for step, length in enumerate(lengths):
        x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(step))
        with context or contextlib.nullcontext():
            loss = forward(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        found += [loss.detach(), *(weight.grad.clone() for weight in layers.parameters() if weight.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
        found += [weight.detach().clone() for weight in layers.parameters()]
    return found


def assert_same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    different = [index for index, (one, other) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(one, other)]
    assert not different, f"{different} of {len(ours)} differ"


def assert_was_on_disk(activations: save_on_disk) -> None:
    report = activations.report()
    assert report.bytes_written > 0
    assert report.bytes_read > 0


def test_blocks_compiled_by_inductor_are_the_same_bits(backend: CountingBackend, activations: save_on_disk) -> None:
    def compiled(context: Any) -> list[torch.Tensor]:
        layers = blocks()
        return trained(layers, in_turn([torch.compile(layer, backend=backend) for layer in layers]), context)

    ours = compiled(activations)
    assert backend.graphs > 0
    assert_was_on_disk(activations)
    assert_same_bits(ours, compiled(None))


def test_graphs_for_any_length_are_the_same_bits(activations: save_on_disk) -> None:
    """They save sizes along with tensors."""
    torch._dynamo.reset()
    backend = CountingBackend("aot_eager")

    def compiled(context: Any) -> list[torch.Tensor]:
        layers = blocks()
        functions = [torch.compile(layer, backend=backend, dynamic=True) for layer in layers]
        return trained(layers, in_turn(functions), context, lengths=(64, 48, 80))

    ours = compiled(activations)
    assert backend.with_sizes > 0
    assert_was_on_disk(activations)
    assert_same_bits(ours, compiled(None))


def test_checkpointed_blocks_that_were_compiled_before_are_the_same_bits(backend: CountingBackend, drive: Path) -> None:
    def compiled(activations: save_on_disk | None) -> list[torch.Tensor]:
        layers = blocks()
        for layer in layers:
            layer.forward = torch.compile(layer.forward, backend=backend)  # type: ignore[method-assign]
        checkpointed = [lambda x, layer=layer: checkpoint(layer, x, use_reentrant=False) for layer in layers]
        return trained(layers, in_turn(layers if activations is None else checkpointed), activations)

    with contextlib.closing(save_on_disk(drive / "activations", memory_budget=0, min_bytes=KIB)) as activations:
        ours = compiled(activations)
        assert backend.graphs > 0
        assert_was_on_disk(activations)
    assert_same_bits(ours, compiled(None))
