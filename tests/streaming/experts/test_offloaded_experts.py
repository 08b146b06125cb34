"""Experts that are read on demand compute what they do in memory, whatever their files look like and whatever goes wrong."""

from __future__ import annotations

import copy
import errno
import io
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from deepnvme.checkpoint.formats.pt_records import CorruptCheckpoint
from deepnvme.checkpoint.weight_locations import Location
from deepnvme.drives.profiles import engine_for
from deepnvme.memory.pool import OutOfBuffers
from deepnvme.model.weight_differences import WeightInfo, WeightMismatch
from deepnvme.offload import OffloadedTraining
from deepnvme.streaming import OffloadedExperts, WeightStore, offload_experts, stream
from deepnvme.streaming.experts import offloaded_experts
from deepnvme.streaming.experts.expert_files import places_in
from deepnvme.streaming.experts.expert_layers import ExpertLayer, expert_layers

from ...support.engines import transfers_are, transfers_through
from ...support.interrupts import ctrl_c_every, ctrl_c_in_a_wait_for

EXPERTS, WIDTH, LAYERS = 8, 32, 3
PART = 2 * 4096
"""Bytes of memory for an expert's part of a weight, whose 4096 bytes lie across a boundary of pages in the file."""


class Packed(nn.Module):
    """Experts that are stacked, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(hidden)
        for expert in chosen.unique():
            rows = (chosen == expert).any(dim=-1)
            result[rows] = result[rows] + (hidden[rows] @ self.up[expert] + self.bias[expert]).relu() @ self.down[expert]
        return result


class Separate(nn.Module):
    """Experts that are modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(EXPERTS))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(hidden)
        for expert in chosen.unique():
            rows = (chosen == expert).any(dim=-1)
            result[rows] = result[rows] + self.experts[expert](hidden[rows])
        return result


class Mixture(nn.Module):
    """Layers with a router each."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.routers = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(LAYERS))
        self.mixtures = nn.ModuleList(kind() for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for router, mixture in zip(self.routers, self.mixtures, strict=True):
            hidden = hidden + mixture(hidden, router(hidden).topk(2).indices)
            hidden = hidden / hidden.norm(dim=-1, keepdim=True)
        return hidden


class World:
    """A mixture in memory, its checkpoint, and another of the same weights whose experts are offloaded."""

    def __init__(self, kind: type[nn.Module], directory: Path) -> None:
        self.memory = Mixture(kind).eval()
        self.path = directory / "model.safetensors"
        save_file(self.memory.state_dict(), self.path)
        self.offloaded = copy.deepcopy(self.memory)

    def offload(self, memory_budget: int = 4 * PART, **options: Any) -> OffloadedExperts:
        patterns = ["mixtures.*"] if isinstance(self.memory.mixtures[0], Packed) else None
        return offload_experts(self.offloaded, self.path.parent, memory_budget=memory_budget, modules=patterns, **options)

    def check(self, seed: int = 0, rows: int = 5) -> None:
        torch.manual_seed(seed)
        hidden = torch.randn(rows, WIDTH)
        with torch.inference_mode():
            assert torch.equal(self.offloaded(hidden), self.memory(hidden))


@pytest.fixture
def packed(drive: Path) -> World:
    return World(Packed, drive)


@pytest.fixture(params=[Packed, Separate])
def world(request: pytest.FixtureRequest, drive: Path) -> World:
    return World(request.param, drive)


@pytest.mark.parametrize("budget", [0, 2 * PART, 5 * PART, 1 << 30])
def test_results_are_those_of_the_model_in_memory(world: World, budget: int) -> None:
    with world.offload(budget):
        for seed in range(8):
            world.check(seed, rows=1 + 4 * (seed % 2))


def test_each_chosen_expert_is_read_once_for_all_tokens_and_the_others_not_at_all(packed: World) -> None:
    with packed.offload(2 * PART) as experts:
        packed.check(rows=40)
        report = experts.report()
        chosen = sum(layer.chosen for layer in report.layers.values())
        assert report.bytes_missed == chosen * 2 * WIDTH * WIDTH * 4
        assert report.tokens == 40
        assert report.bytes_missed <= report.bytes_read <= chosen * 2 * PART
        experts.reset()
        packed.check(rows=1)
        assert sum(layer.chosen for layer in experts.report().layers.values()) == 2 * LAYERS


def test_experts_that_are_in_memory_are_not_read_again(packed: World) -> None:
    with packed.offload(1 << 30) as experts:
        packed.check()
        experts.reset()
        packed.check()
        report = experts.report()
        assert report.bytes_read == 0
        assert report.hit_rate == 1
        assert all(layer.read == 0 and layer.chosen for layer in report.layers.values())


def test_experts_that_tokens_choose_often_stay_in_memory(packed: World) -> None:
    """Also while others are chosen once each, which would drop the experts used longest ago."""
    layer = packed.offloaded.mixtures[0]
    often, seldom = torch.tensor([[0, 1]]), [torch.tensor([[expert, expert + 1]]) for expert in (2, 4, 6)]
    with packed.offload(10 * PART) as experts, torch.inference_mode():
        for _ in range(5):
            layer(torch.randn(1, WIDTH), often)
        for chosen in seldom:
            layer(torch.randn(1, WIDTH), chosen)
        experts.reset()
        layer(torch.randn(1, WIDTH), often)
        assert experts.report().layers["mixtures.0"].hits == 2


def test_the_report_says_what_memory_would_do_and_how_busy_the_drive_is(packed: World) -> None:
    layer = packed.offloaded.mixtures[0]
    with packed.offload(4 * PART) as experts, torch.inference_mode():
        assert (experts.report().drive_share, experts.report().budget_for_90_percent) == (0, 0)
        for chosen, calls in (([0, 1], 9), ([6, 7], 1)):
            for _ in range(calls):
                layer(torch.randn(1, WIDTH), torch.tensor([chosen]))
        report = experts.report()
        assert report.budget_for_90_percent == 2 * 2 * PART  # of experts 0 and 1, with two weights each
        assert 0 <= report.seconds_waited <= report.seconds  # 0 if each read had ended when it was asked for
        assert 0 < report.drive_share <= 1
        assert "instead of" not in str(report)  # the budget is as large already
        experts.close(restore=True)
    with packed.offload(1 << 30) as experts, torch.inference_mode():
        layer(torch.randn(1, WIDTH), torch.tensor([[6, 7]]))
        experts.reset()
        layer(torch.randn(1, WIDTH), torch.tensor([[6, 7]]))
        assert (experts.report().bytes_read, experts.report().drive_share) == (0, 0)
        assert experts.report().seconds > 0


def test_the_report_says_which_budget_would_do_and_what_each_layer_read(packed: World) -> None:
    layer = packed.offloaded.mixtures[0]
    with packed.offload(2 * PART) as experts, torch.inference_mode():
        for expert in range(3):
            layer(torch.randn(1, WIDTH), torch.tensor([[expert]]))
        report = experts.report()
        assert f"once read, 90 % would have been in memory with {6 * PART / 1e6:.1f} MB of experts instead" in str(report)
        figures = report.as_dict("experts_")
        assert [figures[f"experts_layers_mixtures.0_{name}"] for name in ("chosen", "hits", "read")] == [3, 0, 3]
        assert report.bytes_per_second == report.bytes_read / report.seconds_reading > 0


def test_time_between_calls_is_not_in_the_report(packed: World) -> None:
    layer = packed.offloaded.mixtures[0]
    with packed.offload() as experts, torch.inference_mode():
        began = time.perf_counter()
        layer(torch.randn(1, WIDTH), torch.tensor([[0]]))
        time.sleep(0.2)
        layer(torch.randn(1, WIDTH), torch.tensor([[1]]))
        assert 0 < experts.report().seconds < time.perf_counter() - began - 0.2


def test_experts_that_are_modules_are_forgotten_when_the_topic_changes(drive: Path) -> None:
    """Although they had more uses, and nobody says how many tokens there were."""
    world = World(Separate, drive)
    layer, hidden = world.offloaded.mixtures[0].experts, torch.randn(1, WIDTH)
    with world.offload(4 * 3 * 4096) as experts, torch.inference_mode():  # of 4 experts, with weight and bias
        for call in range(600):
            layer[call % 2](hidden)
        experts.reset()
        for call in range(1200):
            layer[2 + call % 3](hidden)
        report = experts.report()
        assert report.hit_rate > 0.8
        assert "token" not in str(report)
        assert {name: layer.chosen for name, layer in report.layers.items()} == {
            "mixtures.0.experts": 1200, "mixtures.1.experts": 0, "mixtures.2.experts": 0
        }  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "known"), [([[-1, 1]], {1: 1, 7: 1}), ([[10**13, 1]], {1: 1}), ([[-9, 8], [2, 2]], {2: 2}), (3, {})]
)
def test_numbers_that_choose_no_expert_are_not_counted(packed: World, ids: Any, known: dict[int, int]) -> None:
    layer = expert_layers(packed.memory, ["mixtures.*"])[0]
    assert layer.chosen((torch.randn(1, WIDTH), torch.tensor(ids)), {})[0] == known


def test_negative_numbers_count_from_the_last_expert(packed: World) -> None:
    hidden, chosen = torch.randn(1, WIDTH), torch.tensor([[-1, 1]])
    with packed.offload(), torch.inference_mode():
        assert torch.equal(packed.offloaded.mixtures[0](hidden, chosen), packed.memory.mixtures[0](hidden, chosen))


def test_other_weights_may_be_streamed(world: World, tmp_path: Path) -> None:
    with world.offload() as experts, WeightStore.build(world.offloaded, tmp_path / "store") as store:
        assert not any("down" in name or ".experts." in name for name in store.weights)
        for source in (store, world.path):
            experts.reset()
            with stream(world.offloaded, source) as streaming:
                world.check()
                streaming.close(restore=True)
            assert experts.report().bytes_missed > 0


def test_gradients_reach_the_inputs(world: World) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(4, WIDTH)
    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    world.memory.requires_grad_(False)
    with world.offload(1 << 30):
        for model, each in zip((world.memory, world.offloaded), inputs, strict=True):
            model(each).square().sum().backward()
    assert torch.equal(*[each.grad for each in inputs])


def test_weights_in_another_dtype_than_the_model_are_converted(world: World) -> None:
    world.memory.bfloat16()
    world.offloaded.bfloat16()
    with world.offload(), torch.inference_mode():
        hidden = torch.randn(5, WIDTH, dtype=torch.bfloat16)
        assert torch.equal(world.offloaded(hidden), world.memory(hidden))


def test_closing_may_restore_the_weights(world: World) -> None:
    with world.offload() as experts:
        world.check()
        experts.close(restore=True)
    world.check()
    assert all(map(torch.equal, world.offloaded.state_dict().values(), world.memory.state_dict().values()))
    assert all(weight.requires_grad for weight in world.offloaded.parameters())
    with world.offload():
        world.check()


def test_threads_take_turns(world: World) -> None:
    with world.offload(3 * PART), ThreadPoolExecutor(3) as pool:
        torch.manual_seed(0)
        inputs = [torch.randn(3, WIDTH) for _ in range(12)]

        def run(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
            return torch.inference_mode()(model.__call__)

        results = list(pool.map(run(world.offloaded), inputs))
        assert all(map(torch.equal, results, map(run(world.memory), inputs)))


def test_two_models_read_one_checkpoint(world: World) -> None:
    with world.offload():
        first, world.offloaded = world.offloaded, copy.deepcopy(world.memory)
        with world.offload():
            world.check()
            world.offloaded = first
            world.check()


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_read_that_fails_names_layer_expert_file_and_offset_and_the_next_call_works(
    world: World, faulty: Any, backends: list[str]
) -> None:
    with world.offload():
        world.check()
        with transfers_through(faulty(backends[0], error=errno.EIO, error_every=1)):
            with pytest.raises(OSError, match=r"expert \d of 'mixtures\.\d.* at offset \d+") as raised:
                world.check(1)
            assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(world.path))
        world.check()


def test_ctrl_c_in_a_wait_leaves_a_model_that_works(world: World) -> None:
    with world.offload():
        with ctrl_c_in_a_wait_for("read"), pytest.raises(KeyboardInterrupt):
            world.check()
        world.check()


def test_ctrl_c_anywhere_leaves_a_model_that_works(packed: World) -> None:
    with packed.offload():
        heard = 0
        for seed in range(40):
            with ctrl_c_every(0.003) as presses:
                try:
                    packed.check(seed)
                except KeyboardInterrupt:
                    heard += 1
            del presses
            packed.check(seed)
        assert heard


def test_a_file_that_was_replaced_or_cut_off_is_named(packed: World) -> None:
    with packed.offload():
        packed.check()
        data = packed.path.read_bytes()
        os.truncate(packed.path, len(data) - 4096)
        with pytest.raises(CorruptCheckpoint, match=r"changed.*expert") as raised:
            packed.check(1)
        assert raised.value.filename == str(packed.path)


def test_an_expert_that_is_overwritten_while_it_is_read_is_neither_used_nor_kept(packed: World) -> None:
    reads = 0

    def overwritten(name: str, sound: Callable[..., Any]) -> Callable[..., Any]:
        def transfer(*arguments: Any) -> Any:
            nonlocal reads
            reads += 1
            if reads == 2:
                data = packed.path.read_bytes()
                with packed.path.open("r+b") as file:
                    file.seek(len(data) // 4)
                    file.write(bytes(len(data) - len(data) // 4))
            return sound(*arguments)

        return transfer

    hidden, chosen = torch.randn(1, WIDTH), torch.tensor([[7]])
    with packed.offload(1 << 30) as experts, torch.inference_mode():
        with transfers_are(overwritten), pytest.raises(CorruptCheckpoint, match=r"changed.*expert 7 of 'mixtures\.2'"):
            packed.offloaded.mixtures[2](hidden, chosen)
        with pytest.raises(CorruptCheckpoint, match="changed") as raised:
            packed.offloaded.mixtures[2](hidden, chosen)
        assert raised.value.filename == str(packed.path)
        assert not experts._blocks["mixtures.2.down"][7].in_memory


def test_a_file_that_is_replaced_after_its_header_was_read_is_refused(packed: World) -> None:
    engines = []

    def replaced(*arguments: Any) -> Any:
        found = places_in(*arguments)
        save_file({name: weight + 1 for name, weight in packed.memory.state_dict().items()}, packed.path)
        return found

    def opened(*arguments: Any) -> Any:
        engines.append(engine_for(*arguments))
        return engines[-1]

    with (
        mock.patch.multiple(offloaded_experts, places_in=replaced, engine_for=opened),
        pytest.raises(CorruptCheckpoint, match="changed") as raised,
    ):
        packed.offload()
    assert raised.value.filename == str(packed.path)
    assert [engine.closed for engine in engines] == [True]
    packed.check()


def test_ctrl_c_while_weights_are_replaced_leaves_the_model_as_it_was(world: World) -> None:
    wrap, weights = ExpertLayer.wrap, world.offloaded.state_dict()

    def interrupted(layer: ExpertLayer, forward: Any) -> None:
        wrap(layer, forward)
        signal.raise_signal(signal.SIGINT)

    with mock.patch.object(ExpertLayer, "wrap", interrupted), pytest.raises(KeyboardInterrupt):
        world.offload()
    found = world.offloaded.state_dict()
    assert all(found[name].data_ptr() == weight.data_ptr() for name, weight in weights.items())
    assert not any("forward" in vars(module) for module in world.offloaded.modules())
    world.check()


def test_a_budget_that_autograd_uses_up_is_told_with_the_remedy(packed: World) -> None:
    with packed.offload(2 * PART):
        with pytest.raises(OutOfBuffers, match=r"no_grad.*larger memory_budget.*grouped_mm"):
            packed.offloaded(torch.randn(5, WIDTH).requires_grad_())
        packed.check()


def test_an_expert_past_the_end_of_the_file_is_named_before_anything_is_read(packed: World) -> None:
    os.truncate(packed.path, 4000)
    places = {
        f"mixtures.{layer}.{key}": Location(str(packed.path), 8, WeightInfo(torch.float32, (EXPERTS, WIDTH, WIDTH)))
        for layer in range(LAYERS)
        for key in ("up", "down")
    }
    with pytest.raises(CorruptCheckpoint, match=r"expert 0 of 'mixtures\.0' \(up\) .* byte 4104, and the file has 4000"):
        OffloadedExperts(packed.offloaded, places, 4 * PART, ["mixtures.*"], None, None)
    packed.check()  # all weights are still there


def test_a_checkpoint_of_another_model_is_refused(packed: World) -> None:
    packed.offloaded.mixtures[1].up = nn.Parameter(torch.randn(EXPERTS + 1, WIDTH, WIDTH))
    packed.offloaded.mixtures[2].down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH + 1))
    with pytest.raises(WeightMismatch, match=r"mixtures\.1\.up' should be .*\[9, (.|\n)*mixtures\.2\.down'"):
        packed.offload()


def test_quantised_experts_are_refused(packed: World, drive: Path) -> None:
    save_file({name: weight.to(torch.float8_e4m3fn) for name, weight in packed.memory.state_dict().items()}, packed.path)
    with pytest.raises(ValueError, match=r"float8_e4m3fn.*quantised"):
        packed.offload()


@pytest.mark.parametrize("patterns", [None, ["mixtures.*", "layers.*"]])
def test_a_model_without_experts_is_refused(packed: World, patterns: list[str] | None) -> None:
    with pytest.raises(ValueError, match=r"no experts|'layers\.\*'"):
        offload_experts(packed.offloaded, packed.path, memory_budget=4 * PART, modules=patterns)


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda model: torch.save(model.state_dict(), io.BytesIO()), "up"),
        (copy.deepcopy, "copy|copied"),
        (lambda model: model.mixtures[0].up * 2, r"mul.*'mixtures\.0\.up'"),
        (lambda model: model.mixtures[0].up[1], r"read in the forward of 'mixtures\.0'"),
        (lambda model: torch.compile(model.mixtures[0], backend="eager")(torch.randn(1, WIDTH), torch.tensor([[0]])), "compiled"),
    ],
)
def test_what_would_need_all_experts_is_refused(packed: World, use: Callable[[nn.Module], object], text: str) -> None:
    with packed.offload():
        with pytest.raises(RuntimeError, match=text):
            use(packed.offloaded)
        packed.check()


def test_a_training_that_reads_weights_itself_is_refused(world: World, tmp_path: Path) -> None:
    with world.offload(), pytest.raises(ValueError, match=r"experts that are read on demand.*train adapters"):
        OffloadedTraining(world.offloaded, torch.optim.AdamW, path=tmp_path)


def test_experts_that_were_closed_without_restore_cannot_be_restored(packed: World) -> None:
    experts = packed.offload()
    experts.close()
    experts.close()
    with pytest.raises(RuntimeError, match="load the model again"):
        experts.close(restore=True)


def test_the_budget_is_set_before_experts_are_read(packed: World) -> None:
    with packed.offload(0) as experts:
        experts.set_memory_budget(1 << 30)
        packed.check()
        experts.reset()
        packed.check()
        assert experts.report().bytes_read == 0
        with pytest.raises(RuntimeError, match="before experts are read"):
            experts.set_memory_budget(0)
        packed.check()


def test_experts_are_offloaded_once_and_not_used_after_the_end(packed: World) -> None:
    with packed.offload(), pytest.raises(RuntimeError, match="offloaded already"):
        packed.offload()
    with pytest.raises(RuntimeError, match=re.escape("'mixtures.0.up'")):
        packed.check()
