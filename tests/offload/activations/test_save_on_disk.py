"""Tensors that autograd saves go to a drive and come back: the same bits, within a budget of memory, and nothing stays behind."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepnvme.offload import save_on_disk

from ...support.activations import held_by
from ...support.patience import until

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture
def activations(drive: Path) -> Iterator[save_on_disk]:
    """With memory for a quarter of what the models here save."""
    with contextlib.closing(save_on_disk(drive / "activations", memory_budget=256 * KIB, min_bytes=1 * KIB)) as made:
        yield made


class Layer(nn.Module):
    """Attention and a feed-forward network, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part.unflatten(-1, (4, -1)).transpose(-2, -3) for part in self.qkv(self.norm(x)).chunk(3, -1)]
        x = x + self.out(nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(-2, -3).flatten(-2))
        return x + self.feed(x)


class Checkpointed(nn.Module):
    """A layer that saves its input only."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False)


def model(layers: int = 3, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width) for _ in range(layers)))


def batch(length: int = 64, width: int = 64) -> torch.Tensor:
    return torch.randn(2, length, width, generator=torch.Generator().manual_seed(1))


def train(
    net: nn.Module, context: Callable[[], Any], steps: int = 3, autocast: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[list[float], list[torch.Tensor]]:
    """The losses, and the weights after the last step."""
    net = copy.deepcopy(net).to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    torch.manual_seed(2)
    losses = []
    for _ in range(steps):
        with context(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = net(batch().to(dtype)).float().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [weight.detach() for weight in net.parameters()]


def assert_same(ours: tuple[list[float], list[torch.Tensor]], theirs: tuple[list[float], list[torch.Tensor]]) -> None:
    assert ours[0] == theirs[0]
    assert all(map(torch.equal, ours[1], theirs[1]))


def files_in(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def assert_freed(activations: save_on_disk) -> None:
    """Nothing of earlier steps is in memory or on the drive. What was dropped in the midst of its transfer takes a moment."""
    gc.collect()
    until(lambda: not held_by(activations))


# The same bits


@pytest.mark.parametrize("recompute", [False, True], ids=["all saved", "checkpointing"])
@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
@pytest.mark.parametrize("budget", [0, 256 * KIB])
def test_losses_and_weights_are_the_same_bits(
    drive: Path, dtype: torch.dtype, autocast: bool, recompute: bool, budget: int
) -> None:
    net = nn.Sequential(*map(Checkpointed, model())) if recompute else model()
    options: Any = {"dtype": dtype, "autocast": autocast}
    with contextlib.closing(save_on_disk(drive / "activations", memory_budget=budget, min_bytes=KIB)) as activations:
        ours = train(net, lambda: activations, **options)
        report = activations.report()
        assert_freed(activations)
    assert_same(ours, train(net, contextlib.nullcontext, **options))
    assert report.saved_bytes > 40 * KIB
    assert report.bytes_written > 0  # a quarter of the budget is kept, the other is to read into and to write ahead
    assert not list(drive.rglob("*.data"))


# What is saved, and what not


def passed_on(activations: save_on_disk, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A tensor as it comes back after autograd has saved it, nothing else has kept it, and it was freed.

    It is made here, and not an argument: once torch.compile has run in this process, a caller holds arguments during its call.
    """

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(kept)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            found.append(ctx.saved_tensors[0])
            return gradient, None

    found: list[torch.Tensor] = []
    start = torch.ones(1, requires_grad=True)
    tensor = make()
    with activations:
        y = Keep.apply(start, tensor)
        z = Keep.apply(y, torch.empty(256 * KIB, dtype=torch.uint8))  # has the first written
    del tensor
    z.backward()
    return found[1]


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.arange(10000.0).view(100, 100).t(),
    "a part": lambda: torch.arange(10000.0)[1111:3333],
    "every third": lambda: torch.arange(10000.0)[1::3],
    "most": lambda: torch.arange(10000.0)[1:9000],
    "complex": lambda: torch.complex(torch.arange(5000.0), -torch.arange(5000.0)),
    "negated": lambda: torch.complex(torch.arange(5000.0), -torch.arange(5000.0)).conj().imag,
    "booleans": lambda: torch.arange(10000) % 3 == 0,
    "one byte more than pages": lambda: (torch.arange(4097) % 251).to(torch.uint8),
    "a scalar's worth": lambda: torch.ones(()),
    "nothing": lambda: torch.empty(0, 5),
    "sparse": lambda: torch.eye(64).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(300), torch.zeros(700)], layout=torch.jagged),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_any_kind_keeps_its_meaning(activations: save_on_disk, name: str) -> None:
    wanted = TENSORS[name]()
    found = passed_on(activations, TENSORS[name])
    assert type(found) is type(wanted)
    assert (found.dtype, found.layout) == (wanted.dtype, wanted.layout)
    if wanted.layout is torch.strided and not wanted.is_nested:
        assert found.shape == wanted.shape
        assert found.stride() == wanted.stride()
        assert (found.is_conj(), found.is_neg()) == (wanted.is_conj(), wanted.is_neg())
        assert torch.equal(found, wanted)
    else:
        dense = [each.to_padded_tensor(0.0) if each.is_nested else each.to_dense() for each in (found, wanted)]
        assert torch.equal(*dense)
    assert_freed(activations)


def test_parameters_and_their_views_are_not_saved(activations: save_on_disk) -> None:
    weight = nn.Parameter(torch.randn(100, 100))
    frozen = nn.Parameter(torch.randn(100, 100), requires_grad=False)
    leaf = torch.randn(100, 100, requires_grad=True)
    with activations:
        y = (weight.t() @ frozen) @ leaf[:, ::2]
    assert activations.report().saved_bytes == 100 * 100 * 4  # of the product
    y.sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("size", [1000, 2 << 20])
def test_a_tensor_comes_back_at_its_offset(activations: save_on_disk, size: int) -> None:
    """Compiled code looks at storages by absolute offsets."""
    for begin in (0, 16, 17):
        found = passed_on(activations, functools.partial(lambda first: torch.arange(float(size))[first:], begin))
        assert found.storage_offset() == begin
        assert torch.equal(found.as_strided((3,), (1,), begin), torch.arange(begin, begin + 3.0))


def test_a_parameter_whose_memory_is_replaced_is_not_kept(activations: save_on_disk) -> None:
    """As ZeRO-3 does with what it has gathered."""
    weight = nn.Parameter(torch.randn(10000))
    storage = weight.untyped_storage()._weak_ref()
    with activations:
        y = weight * weight
    weight.data = torch.empty(0)
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)
    del y


def test_a_storage_that_is_saved_often_is_written_once(activations: save_on_disk) -> None:
    x = torch.randn(1000, requires_grad=True)
    with activations:
        y = x * 2
        z = sum((y.view(10, 100) ** power).sum() + (y[:900] ** power).sum() for power in range(2, 9))
        del y
    assert activations.report().saved_bytes == 4000
    z.backward()
    assert_freed(activations)


def test_a_small_part_of_a_large_storage_is_saved_alone(activations: save_on_disk) -> None:
    large = torch.randn(1 << 20)
    x = torch.randn(1000, requires_grad=True)
    with activations:
        y = x * large[5000:6000]
    del large
    assert 4000 <= activations.report().saved_bytes < 8192
    y.sum().backward()


def test_what_is_alive_elsewhere_is_not_read(activations: save_on_disk) -> None:
    data = [torch.randn(64 * KIB) for _ in range(8)]
    x = torch.randn(64 * KIB, requires_grad=True)

    def step() -> Any:
        y = x
        with activations:
            for each in data:
                y = y * each
            y = y.exp()
        y.sum().backward()  # type: ignore[no-untyped-call]
        return activations.report()

    first, second = step(), step()
    assert first.bytes_written > 0
    assert first.bytes_read == 0
    assert second.saved_bytes == x.nbytes  # by then it is known that the others stay


def test_tensors_below_min_bytes_stay_in_memory(drive: Path) -> None:
    with contextlib.closing(save_on_disk(drive, memory_budget=0, min_bytes=4001)) as activations:
        x = torch.randn(1000, requires_grad=True)
        with activations:
            y = (x * 2).exp().exp()
        assert activations.report().saved_bytes == 0
        y.sum().backward()
        assert activations.report().bytes_read == 0


# Changes in place


def test_a_change_in_place_is_an_error_as_without_hooks(activations: save_on_disk) -> None:
    for size in (100, 10000):  # one that stays in memory, and one that does not
        x = torch.randn(size, requires_grad=True)
        with activations:
            y = x.exp()
            z = y.exp()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_both_versions_of_a_storage_can_be_saved(activations: save_on_disk) -> None:
    """The first is never asked for: relu_ saves what it has made."""
    x = torch.randn(10000, requires_grad=True)
    y = x * 1
    with activations:
        z = y.sum() * 0 + nn.functional.relu_(y).square().sum()
    del y
    z.backward()
    assert torch.equal(x.grad, 2 * x.detach().relu())


# Graphs


def test_a_graph_that_is_retained_is_read_again(activations: save_on_disk) -> None:
    net = model().eval()
    x = batch()
    with activations:
        loss = net(x).square().mean()
    loss.backward(retain_graph=True)
    first = [weight.grad.clone() for weight in net.parameters()]
    net.zero_grad()
    loss.backward()
    assert all(torch.equal(weight.grad, each) for weight, each in zip(net.parameters(), first, strict=True))
    del loss
    assert_freed(activations)


def test_double_backward_gives_the_same_bits(activations: save_on_disk) -> None:
    def penalty(context: Any) -> torch.Tensor:
        torch.manual_seed(3)
        first, second = nn.Linear(50, 500).double(), nn.Linear(500, 1).double()
        x = torch.randn(40, 50, dtype=torch.double, requires_grad=True)
        with context:
            y = second(first(x).tanh().exp())
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            norm = gradient.square().sum()
        norm.backward()
        assert first.weight.grad is not None
        return first.weight.grad

    assert torch.equal(penalty(activations), penalty(contextlib.nullcontext()))
    assert_freed(activations)


def test_the_graph_is_not_kept_by_what_it_saves(activations: save_on_disk) -> None:
    """Neither small tensors, which stay as they are, nor large ones."""
    for size in (10, 10000):
        x = torch.randn(size, requires_grad=True)
        with activations:
            y = x.exp()
        storage = y.untyped_storage()._weak_ref()
        del y
        held_by(activations)  # a call frees what was dropped
        until(functools.partial(torch.UntypedStorage._expired, storage))
        torch.UntypedStorage._free_weak_ref(storage)


# Contexts


def test_contexts_may_be_nested_and_new_ones_share_the_files(drive: Path) -> None:
    path = drive / "activations"
    options: Any = {"memory_budget": 0, "min_bytes": KIB}
    x = torch.randn(10000, requires_grad=True)
    with save_on_disk(path, **options) as outer, save_on_disk([path], **options), outer:
        y = x.exp().exp().exp()
    assert len(files_in(path)) == 2  # the data and the lock
    y.sum().backward()
    assert outer.report().saved_bytes == 3 * x.nbytes
    outer.close()
    assert not path.exists()


def test_it_works_over_several_directories(drive: Path) -> None:
    paths = [drive / "a", drive / "b"]
    with contextlib.closing(save_on_disk(paths, memory_budget=0)) as activations:
        x = torch.randn(4 * MIB, requires_grad=True)
        with activations:
            y = x.exp().exp()
        assert {file.parent.parent for file in files_in(drive)} == set(paths)
        y.sum().backward()
        assert torch.equal(x.grad, x.exp() * x.exp().exp())
    assert not list(drive.iterdir())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"path": []}, "needs a directory"),
        ({"path": ""}, "needs a directory"),
        ({"memory_budget": -1}, "memory_budget must not"),
        ({"min_bytes": -1}, "min_bytes must not"),
    ],
)
def test_wrong_arguments_are_refused(drive: Path, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        save_on_disk(**{"path": drive, **arguments})


# Memory and order


class Counted(torch.autograd.Function):
    """Saves a tensor of its own, and notes how many of those are in memory when it computes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, nbytes: int, note: Callable[[], None]) -> torch.Tensor:
        ctx.save_for_backward(torch.full((nbytes,), 7, dtype=torch.uint8))
        ctx.note = note
        note()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (saved,) = ctx.saved_tensors
        assert saved.min() == saved.max() == 7
        ctx.note()
        return gradient, None, None


def test_memory_stays_within_the_budget(drive: Path) -> None:
    budget = 8 * MIB
    with contextlib.closing(save_on_disk(drive, memory_budget=budget, min_bytes=KIB)) as activations:
        used = []
        x = torch.ones(1, requires_grad=True)
        for _ in range(3):
            with activations:
                y = x
                for _ in range(32):
                    y = Counted.apply(y, MIB, lambda: used.append(activations._shared_store()._cache.used))
            y.backward()
        report = activations.report()
    assert max(used) <= report.peak_bytes <= budget
    assert report.saved_bytes == 32 * MIB
    # What stays is not written: the budget without the half that is for reading, and half of the rest to write ahead.
    assert 32 * MIB - budget <= report.bytes_written <= 32 * MIB - budget // 4
    assert report.bytes_read <= report.bytes_written


def test_with_memory_for_all_nothing_is_written(drive: Path) -> None:
    with contextlib.closing(save_on_disk(drive, memory_budget=1 << 30, min_bytes=KIB)) as activations:
        report = step_of(activations, 8)
        assert report.saved_bytes == report.peak_bytes == 8 * MIB
        assert report.bytes_written == report.bytes_read == 0


def step_of(activations: save_on_disk, tensors: int, nbytes: int = MIB) -> Any:
    """The report of a forward that saves so many tensors, and its backward."""
    y = torch.ones(1, requires_grad=True)
    with activations:
        for _ in range(tensors):
            y = Counted.apply(y, nbytes, lambda: None)
    y.backward()  # type: ignore[no-untyped-call]
    return activations.report()


def test_steps_go_on_in_a_context_that_stays_open(drive: Path) -> None:
    with contextlib.closing(save_on_disk(drive, memory_budget=8 * MIB, min_bytes=KIB)) as activations, activations:
        reports = [step_of(activations, 32) for _ in range(3)]
    assert [report.saved_bytes for report in reports] == 3 * [32 * MIB]
    assert reports[-1].bytes_written == 30 * MIB


def test_to_leave_a_context_in_another_thread_is_an_error(activations: save_on_disk) -> None:
    errors: list[BaseException] = []

    def leave() -> None:
        try:
            activations.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(error)

    with activations:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
    assert "another thread" in str(*errors)
    leave()  # left already
    assert len(errors) == 2


def test_a_signal_handler_may_ask_for_the_report(activations: save_on_disk) -> None:
    store = activations._shared_store()
    with store._lock:  # as while a forward waits for a write
        assert activations.report().saved_bytes == 0


def test_a_step_begins_although_something_of_the_last_one_is_left(drive: Path) -> None:
    x, left = torch.ones(MIB, requires_grad=True), []
    with contextlib.closing(save_on_disk(drive, memory_budget=8 * MIB, min_bytes=KIB)) as activations:
        for _ in range(3):
            with activations:
                y = x.exp()
                left.append(x.exp().sin())  # has no backward yet, and keeps what it has saved
            y.sum().backward()  # type: ignore[no-untyped-call]
            assert activations.report().saved_bytes == 2 * y.nbytes
        for each in left:
            x.grad = None
            each.sum().backward()
            assert torch.equal(x.grad, (x.exp().cos() * x.exp()).detach())
