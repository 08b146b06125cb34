"""A streamed model computes what the model in memory does, whatever its build, and whatever goes wrong meanwhile."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import deepnvme
from deepnvme.model.quantization import dequantize, quantize
from deepnvme.store.data_file import DATA_NAME
from deepnvme.streaming import CorruptExtent, Streaming, WeightMismatch, WeightStore, stream
from deepnvme.swap import OutOfBuffers

from ..support.engines import transfers_through
from ..support.examples import examples
from ..support.files import flip
from ..support.interpreters import Interpreters
from ..support.models import WIDTH, Calls, blocks_of, entangled, stack
from ..support.patience import PATIENCE

TORCH = (str(Path(torch.__file__).parent),)
INPUT = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)


class World:
    """A model in memory, and one of the same weights that is streamed."""

    def __init__(self, model: nn.Module, directory: Path) -> None:
        self.directory = directory
        self.memory = model
        self.streamed = copy.deepcopy(model)
        self.store = WeightStore.build(model, directory, blocks=blocks_of(model))

    def stream(self, **options: Any) -> Streaming:
        return stream(self.streamed, self.store, **options)

    def check(self, *args: Any) -> None:
        with torch.no_grad():
            assert torch.equal(self.streamed(INPUT, *args), self.memory(INPUT, *args))


Build = Callable[[nn.Module], World]


@pytest.fixture
def build(drive: Path) -> Iterator[Build]:
    with contextlib.ExitStack() as undo:

        def build(model: nn.Module) -> World:
            world = World(model, drive / str(id(model)))
            undo.callback(world.store.close)
            return world

        yield build


@pytest.fixture
def world(build: Build) -> World:
    return build(stack())


@pytest.fixture(scope="module")
def tangle(io_dir: Path) -> Iterator[World]:
    world = World(entangled(), io_dir / "entangled")
    yield world
    world.store.close()


ORDER = [0, 1, 2, 3, 4, 5]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


class Broken:
    """Has the reads of a store fail for as long as it is entered."""

    def __init__(self, store: WeightStore, only: str = "") -> None:
        self._store, self._only = store, only
        self._read = store.read

    def __enter__(self) -> None:
        def read(extent: str, out: torch.Tensor) -> Any:
            if self._only in extent:
                raise OSError(errno.EIO, "Input/output error", f"data of {extent}")
            return self._read(extent, out)

        self._store.read = read  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        self._store.read = self._read  # type: ignore[method-assign]


def test_a_drive_that_fails_is_told_of_and_the_next_call_works_when_it_is_mended(world: World) -> None:
    with world.stream():
        world.check(ORDER)
        with Broken(world.store, "parts.4"):
            for _ in range(5):
                with pytest.raises(OSError, match=r"data of parts\.4") as raised:
                    world.check(ORDER)
                assert raised.value.errno == errno.EIO
        world.check(ORDER)


def test_a_drive_that_fails_in_the_midst_of_a_read(world: World, faulty: Any, backends: list[str]) -> None:
    with world.stream(memory_budget=4096):
        world.check(ORDER)
        with transfers_through(faulty(backends[0], error=errno.EIO, error_every=1)):
            with pytest.raises(OSError, match=re.escape(str(world.directory))) as raised:
                world.check(ORDER)
            assert raised.value.errno == errno.EIO
        world.check(ORDER)


def test_what_is_corrupt_is_named_and_nothing_is_computed_with_it(world: World) -> None:
    values = bytes(world.memory.parts[3].weight.detach().numpy().view("uint8"))
    path = world.directory / DATA_NAME
    flip(path, path.read_bytes().index(values) + 5)
    with world.stream():
        for _ in range(2):
            with pytest.raises(CorruptExtent, match=r"'parts\.3' .* expected CRC-32"):
                world.check(ORDER)
        world.check([0, 1, 2, 4, 5])


@pytest.mark.parametrize(("error", "prefetch"), [(ValueError, 0), (KeyboardInterrupt, 2)])
def test_an_exception_in_a_forward_gives_buffers_back(world: World, error: type[BaseException], prefetch: int) -> None:
    kept = []
    with world.stream(prefetch=prefetch):
        for index in range(6):
            hook = world.streamed.parts[index].register_forward_hook(lambda *_: (_ for _ in ()).throw(error("in the midst")))
            try:
                world.check(ORDER)
            except error as raised:
                kept.append(raised)  # with its traceback
            hook.remove()
            world.check(ORDER)
    assert len(kept) == 6


def test_an_interrupt_while_the_drive_is_awaited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepnvme.store.futures import StoreFuture

    sound = StoreFuture.exception
    with world.stream(prefetch=1):
        world.check(ORDER)
        for index in range(6):
            calls = iter(range(100))

            def interrupted(self: Any, timeout: float | None = None, stop: int = index, calls: Any = calls) -> Any:
                if threading.current_thread() is threading.main_thread() and next(calls) == stop:
                    raise KeyboardInterrupt
                return sound(self, timeout)

            with monkeypatch.context() as patch:
                patch.setattr(StoreFuture, "exception", interrupted)
                with contextlib.suppress(KeyboardInterrupt):
                    world.check(ORDER)
            world.check(ORDER)


def test_a_module_that_changes_its_weights_is_refused_and_the_drive_has_them_as_they_were(build: Build) -> None:
    class Changing(nn.Module):
        how = ""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))
            self.other = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = x * self.weight + self.other
            if Changing.how == "in place":
                self.other.mul_(2)
            elif Changing.how == "replaced":
                self.other = nn.Parameter(self.other * 2)
            elif Changing.how == "deleted":
                del self.other
            return result

    world = build(Calls(*(Changing() for _ in range(4))))
    for budget in (0, 8192):
        with world.stream(memory_budget=budget):
            for how in ("in place", "replaced", "deleted"):
                for context in (torch.no_grad, torch.inference_mode):
                    Changing.how = how
                    told = r"'parts\.2' changed 'parts\.2\.other': streamed weights cannot"
                    with pytest.raises(RuntimeError, match=told), context():
                        world.streamed(INPUT, [2])
                    Changing.how = ""
                    world.check([0, 1, 2, 3, 2])


def test_views_that_are_kept_are_never_overwritten(build: Build) -> None:
    class Own(nn.Module):
        def __init__(self, value: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((WIDTH,), float(value)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight

    class Collects(Calls):
        def forward(self, x: torch.Tensor, order: Any) -> Any:
            return [self.parts[index](x) for index in order]

    world = build(Collects(*(Own(value) for value in range(6))))
    with world.stream(), torch.no_grad():
        kept = [output for index in (0, 1) for output in world.streamed(INPUT, [index])]
        for _ in range(3):
            for index in (2, 3, 4, 5):
                assert torch.equal(world.streamed(INPUT, [index])[0], torch.full((WIDTH,), float(index)))
        assert [output[0].item() for output in kept] == [0, 1]
        with pytest.raises(RuntimeError, match=r"no memory for the weights of 'parts\.\d': somebody keeps tensors"):
            world.streamed(INPUT, ORDER)
        del kept
        assert world.streamed(INPUT, [3])[0][0] == 3
    assert torch.equal(world.memory(INPUT, [3])[0], torch.full((WIDTH,), 3.0))


def test_too_little_memory_for_reading_ahead_is_told_and_passes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("deepnvme.memory.pool._CHECKED_FROM", 0)
        patch.setattr("deepnvme.memory.pool.available_memory", lambda: 1000)
        streaming = world.stream()
        told = r"weights of 'parts\.\d': .* 1000 bytes are available .*; a smaller prefetch needs less"
        with torch.no_grad(), pytest.raises(OutOfBuffers, match=told):
            world.streamed(INPUT, ORDER)
    with streaming, torch.no_grad():
        world.check(ORDER)


def test_autograd_that_keeps_all_weights_is_told_what_to_do(world: World) -> None:
    x = INPUT.clone().requires_grad_()
    with world.stream(prefetch=1):
        with pytest.raises(RuntimeError, match=r"call the model in torch\.no_grad\(\)"):
            world.streamed(x, ORDER)
        result = world.streamed(x, [0, 1])  # few enough
        result.sum().backward()
        expected = torch.autograd.grad(world.memory(INPUT.requires_grad_(), [0, 1]).sum(), INPUT)[0]
        INPUT.requires_grad_(False)
        assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
        del result
        world.check(ORDER)


def test_weights_are_refused_by_name_where_they_are_not_in_memory(world: World) -> None:
    with world.stream(memory_budget=4096):
        world.check(ORDER)
        weight = world.streamed.parts[0].weight
        assert isinstance(weight, nn.Parameter)
        assert (weight.shape, weight.dtype, weight.device.type) == ((WIDTH, WIDTH), torch.float32, "cpu")
        named = r"'parts\.0\.weight' is streamed, and in memory only during the forward of 'parts\.0'"
        model: Any = world.streamed
        for use in (
            lambda: model.to(torch.float64),
            lambda: model.half(),
            lambda: torch.save(model.state_dict(), io.BytesIO()),
            lambda: save_file(model.state_dict(), world.directory / "model.safetensors"),
            lambda: deepnvme.save(model.state_dict(), world.directory / "model.pt"),
            lambda: copy.deepcopy(model),
            lambda: model.share_memory(),
            lambda: model.requires_grad_(True),
            lambda: weight + 1,
        ):
            with pytest.raises(RuntimeError, match=named):
                use()
        assert sum(parameter.numel() for parameter in model.parameters()) == 6 * (WIDTH * WIDTH + WIDTH)
        assert model.eval().train().requires_grad_(False) is model
        world.check(ORDER)


def test_weights_in_memory_that_are_changed_between_calls_are_told_of_and_read_again(world: World) -> None:
    with world.stream(memory_budget=1 << 20):
        world.check(ORDER)
        with pytest.raises(RuntimeError, match="cannot be copied or pickled"):
            copy.deepcopy(world.streamed)
        world.streamed.to(torch.float64)
        for index in range(6):
            with pytest.raises(RuntimeError, match=rf"'parts\.{index}\.weight'.* had been changed, moved or cast"):
                world.check([index])
        world.check(ORDER)


def test_weights_that_somebody_puts_in_place_of_those_of_the_store_are_told_of(world: World) -> None:
    other = {"parts.1.weight": torch.zeros(WIDTH, WIDTH)}
    named = r"'parts\.1\.weight' of 'parts\.1' had been changed, moved or cast"
    with world.stream():
        with pytest.raises(RuntimeError, match=named), torch.no_grad():
            torch.func.functional_call(world.streamed, dict(other), (INPUT, ORDER))
        world.check(ORDER)
        world.streamed.load_state_dict(other, strict=False, assign=True)
        with pytest.raises(RuntimeError, match=named):
            world.check(ORDER)
        world.check(ORDER)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "record",
    [
        lambda model: torch.jit.trace(model, INPUT),
        lambda model: torch.jit.script(model),
        lambda model: torch.export.export(model, (INPUT,)),
        lambda model: fake(model),
        lambda model: torch.compile(model, backend="eager")(INPUT),
        lambda model: torch.compile(lambda x: model(x) + 1, backend="eager", fullgraph=True)(INPUT),
    ],
    ids=["jit.trace", "jit.script", "export", "fake tensors", "compile", "compile a function"],
)
def test_what_records_a_model_is_told_that_it_is_streamed(build: Build, record: Callable[[nn.Module], Any]) -> None:
    world = build(chain())
    told = r"streamed .*: close\(restore=True\) its stream first"
    with world.stream(memory_budget=1 << 20):
        for _ in range(3):
            with pytest.raises((RuntimeError, AttributeError), match=told) as error:
                record(world.streamed)
            assert type(error.value).__name__ != "InternalTorchDynamoError"  # which calls it a bug of torch's own
        world.check()


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def fake(model: nn.Module) -> torch.Tensor:
    with FakeTensorMode() as mode:
        result: torch.Tensor = model(mode.from_tensor(INPUT))
        return result


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own use of it
@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_transforms_of_functions_give_what_they_give_in_memory(build: Build, budget: int) -> None:
    world = build(chain())
    with world.stream(memory_budget=budget, prefetch=5), torch.no_grad():
        for _ in range(2):
            for transformed in (
                lambda model: torch.func.jacrev(model)(INPUT),
                lambda model: torch.func.jvp(model, (INPUT,), (INPUT,)),
                lambda model: torch.func.vmap(model)(INPUT),
            ):
                torch.testing.assert_close(transformed(world.streamed), transformed(world.memory), rtol=0, atol=0)
        world.check()


def test_a_store_of_another_model_is_refused_and_the_model_left_as_it_is(world: World) -> None:
    other = stack(5)
    with pytest.raises(WeightMismatch, match=r"parts\.5\.weight"):
        stream(other, world.store)
    assert torch.equal(other(INPUT, [1]), world.memory(INPUT, [1]))


def test_arguments(world: World) -> None:
    for options, error in (
        ({"prefetch": -1}, "prefetch must not be negative, got -1"),
        ({"memory_budget": -1}, "memory_budget must not be negative"),
        ({"memory_budget": 100}, "memory_budget must hold an extent, the smallest of which has 4096 bytes .* got 100"),
        ({"device": "meta"}, "device must be a CPU or a CUDA device, got meta"),
    ):
        with pytest.raises(ValueError, match=error):
            world.stream(**options)  # type: ignore[arg-type]
    with world.stream():
        with pytest.raises(RuntimeError, match="streamed already"):
            world.stream()
        world.check(ORDER)
    with world.stream():  # again
        world.check(ORDER)


def test_a_buffer_that_nobody_has_is_named(world: World) -> None:
    world.streamed.parts[1].register_buffer("angles", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=r"'parts\.1\.angles' is on the meta device"):
        world.stream()


def test_a_closed_stream_says_so_and_a_restored_model_is_its_own(world: World) -> None:
    with world.stream():
        world.check(ORDER)
    with pytest.raises(RuntimeError, match=r"'parts\.0\..*' is streamed"):
        world.check(ORDER)
    streaming = world.stream()
    streaming.close()
    with pytest.raises(RuntimeError, match=r"closed without restore.*load the model again"):
        streaming.close(restore=True)
    streaming = world.stream(memory_budget=8192)
    world.check(ORDER)
    with Broken(world.store), pytest.raises(OSError, match="data of"):
        streaming.close(restore=True)
    world.check([1, 1])
    streaming.close(restore=True)
    streaming.close()
    world.store.close()
    world.check(ORDER)
    assert "forward" not in vars(world.streamed)
    copied = copy.deepcopy(world.streamed).double()
    assert copied(INPUT.double(), [0]).dtype == torch.float64


def test_a_restored_model_requires_grad_as_before(world: World) -> None:
    world.streamed.parts[1].requires_grad_(False)
    with world.stream() as streaming:
        assert not any(weight.requires_grad for weight in world.streamed.parameters())
        streaming.close(restore=True)
    assert [weight.requires_grad for weight in world.streamed.parameters()] == [True, True, False, False, *[True] * 8]


def test_closing_waits_for_a_call_and_is_refused_within_one(world: World) -> None:
    streaming = world.stream()
    entered, go_on = threading.Event(), threading.Event()

    def hook(*_: object) -> None:
        with pytest.raises(RuntimeError, match="within a forward"):
            streaming.close()
        entered.set()
        go_on.wait(PATIENCE)

    world.streamed.parts[2].register_forward_hook(hook)
    with ThreadPoolExecutor(2) as threads:
        call = threads.submit(world.check, ORDER)
        assert entered.wait(PATIENCE)
        closing = threads.submit(streaming.close)
        assert not closing.done()
        go_on.set()
        call.result()
        closing.result()


# -- whatever the model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 12288])
@pytest.mark.parametrize("prefetch", [0, 1, 7])
def test_the_same_bits(world: World, prefetch: int, budget: int) -> None:
    with world.stream(prefetch=prefetch, memory_budget=budget):
        for context in (torch.no_grad, torch.inference_mode, torch.no_grad):
            with context():
                assert torch.equal(world.streamed(INPUT, ORDER), world.memory(INPUT, ORDER))


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    orders=st.lists(st.lists(st.integers(0, 6), max_size=12), min_size=1, max_size=6),
    prefetch=st.integers(0, 3),
    budget=st.sampled_from([0, 4096, 8192, 1 << 20]),
)
def test_any_sequence_of_calls_of_shared_tied_and_nested_blocks(
    tangle: World, orders: list[list[int]], prefetch: int, budget: int
) -> None:
    with tangle.stream(prefetch=prefetch, memory_budget=budget):
        for order in orders:
            tangle.check(order)


def test_one_block_that_is_the_whole_model(drive: Path) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    with WeightStore.build(model, drive / "store", blocks=[""]) as store:
        streamed = copy.deepcopy(model)
        with stream(streamed, store), torch.no_grad():
            assert torch.equal(streamed(INPUT), model(INPUT))


class Batch(nn.Module):
    """Has weights and buffers in no block, of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("angles", torch.rand(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = self.norm(part(x)) * self.scale + self.angles
        return x


def test_what_is_in_no_block_is_there_always_and_the_model_may_begin_on_the_meta_device(drive: Path) -> None:
    model = Batch()
    with torch.device("meta"):
        streamed = Batch()
    streamed.angles = model.angles.clone()
    with WeightStore.build(model, drive / "store") as store, stream(streamed, store), torch.no_grad():
        for _ in range(2):  # in train mode, in which the buffers change
            assert torch.equal(streamed(INPUT), model(INPUT))
        assert torch.equal(streamed.norm.running_mean, model.norm.running_mean)  # type: ignore[arg-type]


def test_threads_take_turns(world: World) -> None:
    with world.stream(prefetch=1), ThreadPoolExecutor(6) as threads:
        for call in [threads.submit(world.check, ORDER[index % 3 :]) for index in range(24)]:
            call.result()


def test_two_models_of_one_store(world: World) -> None:
    other = copy.deepcopy(world.memory)
    with world.stream(), stream(other, world.store, prefetch=0), ThreadPoolExecutor(2) as threads, torch.no_grad():
        expected = world.memory(INPUT, ORDER)
        for _ in range(5):
            first, second = threads.submit(world.check, ORDER), threads.submit(other, INPUT, ORDER)
            first.result()
            assert torch.equal(second.result(), expected)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("budget", [0, 120_000])
def test_quantised_weights_are_those_that_were_quantised(drive: Path, scheme: Any, budget: int) -> None:
    torch.manual_seed(0)
    model = Calls(*(nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 96), nn.Linear(96, 128, bias=False)) for _ in range(4)))
    streamed = copy.deepcopy(model)
    x = torch.randn(3, 128)
    with WeightStore.build(model, drive / "store", quantize=scheme) as store:
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 2:
                    dequantize(scheme, quantize(weight, scheme), weight)
        with stream(streamed, store, memory_budget=budget) as streaming, torch.no_grad():
            for _ in range(3):
                assert torch.equal(streamed(x, [0, 1, 2, 3, 1]), model(x, [0, 1, 2, 3, 1]))
            if not budget:
                sizes = [extent.nbytes for extent in store.extents.values()]
                streaming.reset()
                for _ in range(3):
                    streamed(x, [0, 1, 2, 3])
                assert streaming.report().bytes_read < 6 * sum(sizes)  # as they are on the drive: four times that in memory
            streaming.close(restore=True)
            assert torch.equal(streamed(x, [0, 1, 2, 3]), model(x, [0, 1, 2, 3]))


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1 << 20, "1MiB", "50%", "auto"])
def test_nothing_is_read_once_all_is_resident(world: World, budget: int | str) -> None:
    with stream(world.streamed, world.store, memory_budget=budget) as streaming:
        world.check(ORDER)
        streaming.reset()
        for _ in range(3):
            world.check(ORDER)
        assert streaming.report().bytes_read == 0


def test_no_weight_is_resident_where_half_of_the_memory_holds_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepnvme.streaming.streamed_model.available_memory", lambda: 2 * 4095)
    with stream(world.streamed, world.store, memory_budget="auto") as streaming:
        world.check(ORDER)
        assert streaming.report().resident_bytes == 0
    with pytest.raises(ValueError, match="memory_budget must hold an extent"):
        stream(world.streamed, world.store, memory_budget="50%")


def test_a_pass_reads_what_is_not_resident_once(world: World) -> None:
    with world.stream(memory_budget=2 * 4096) as streaming:
        for _ in range(2):
            world.check(ORDER)
        streaming.reset()
        for _ in range(4):
            world.check(ORDER)
        assert streaming.report().bytes_read == 4 * 4 * 4096
        assert streaming.report().resident_bytes == 2 * 4096


def test_skipped_blocks_cost_what_was_read_ahead_of_them(world: World) -> None:
    with world.stream() as streaming:
        for experts in ([0, 1, 5], [0, 2, 5], [0, 3, 5], [0, 4, 5]):
            world.check(experts)
        assert streaming.report().bytes_read <= 4 * (3 + 2 * 2) * 4096  # mispredicted twice a pass


def test_the_report(world: World) -> None:
    with world.stream() as streaming:
        world.check(ORDER)
        streaming.reset()
        for _ in range(2):
            world.check(ORDER)
        report = streaming.report()
        assert report.passes == 2
        assert report.bytes_read == pytest.approx(12 * 4096, abs=2 * 4096)
        assert 0 <= report.stalled <= report.seconds
        assert "2 passes in" in str(report)


_PROGRAM = """
from pathlib import Path
import torch
from torch import nn
from deepnvme.streaming import WeightStore, stream

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 4096, bias=False) for _ in range(16))

    def forward(self, x):
        return sum(layer(x).sum() for layer in self.layers)

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith({field!r}))

with torch.device("meta"):
    model = Model()
weights = {{name: torch.full(weight.shape, 1 / 1024) for name, weight in model.named_parameters()}}
WeightStore.build(weights, {directory!r}, model=model).close()
del weights
x = torch.ones(1, 1024)
with WeightStore.open({directory!r}) as store, torch.no_grad():
    nn.functional.linear(x, torch.ones(4096, 1024))
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    with stream(model, store, prefetch={prefetch}, memory_budget={budget}):
        for _ in range(3):
            assert model(x) == 16 * 4096
    print(resident() - before)
"""


def test_a_stream_that_is_dropped_gives_its_memory_back(drive: Path, interpreters: Interpreters) -> None:
    interpreters.run(f"""
        import gc, re, time
        from pathlib import Path
        import torch
        from torch import nn
        from deepnvme.streaming import WeightStore, stream
        def memory():
            return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
        model = nn.Sequential(*(nn.Linear(1024, 2048, bias=False) for _ in range(3)))  # 8 MiB each
        blocks = list(model)
        x = torch.ones(1, 1024)
        with WeightStore.build(model, {str(drive / "store")!r}) as store, torch.no_grad():
            stream(model, store).close()  # the model's own weights go
            before = memory()
            streaming = stream(model, store, prefetch=1)
            for block in blocks:
                block(x)
            assert memory() - before > 12 << 20, (memory() - before) >> 20
            del model, blocks, block, streaming
            deadline = time.monotonic() + 200
            while memory() - before > 4 << 20:  # what was read ahead may still be on its way
                assert time.monotonic() < deadline, (memory() - before) >> 20
                gc.collect()
                time.sleep(0.01)
    """).check()


@pytest.mark.slow
@pytest.mark.parametrize(("prefetch", "budget"), [(0, 0), (2, 0), (2, 4 * 16 << 20)])
def test_memory_beyond_the_budget(drive: Path, interpreters: Interpreters, prefetch: int, budget: int) -> None:
    """The ring, and little more, of 16 blocks of 16 MiB."""
    directory = str(drive / "store")
    ended = interpreters.run(_PROGRAM.format(field="VmHWM", directory=directory, prefetch=prefetch, budget=budget))
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) <= budget + ((prefetch + 1) * 16 << 20) + (64 << 20)


def test_the_memory_of_the_model_s_own_weights_goes_back_to_the_system(drive: Path, interpreters: Interpreters) -> None:
    """Also where the C library has them in one piece with what stays."""
    interpreters.run(f"""
        import ctypes, re
        import torch
        from torch import nn
        from deepnvme.streaming import WeightStore, stream
        def memory():
            return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
        if not hasattr(ctypes.CDLL(None), "malloc_trim"):
            raise SystemExit  # not glibc
        M_MMAP_THRESHOLD = -3
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 25)
        layers, staying = [], []
        for _ in range(16):
            layers.append(nn.Linear(1024, 1024, bias=False))  # 4 MiB
            staying.append(torch.zeros(300))
        model = nn.Sequential(*layers)
        store = WeightStore.build(model, {str(drive / "store")!r})
        before = memory()
        with store, stream(model, store, prefetch=0):
            assert before - memory() > 48 << 20, (before - memory()) >> 20
    """).check()
