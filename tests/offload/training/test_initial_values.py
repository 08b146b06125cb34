"""OffloadedTraining of a model on the meta device, or of a checkpoint: its first values, and never all of it in memory."""

from __future__ import annotations

import copy
import gc
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme.checkpoint import CorruptCheckpoint
from deepnvme.offload.training import OffloadedTraining
from deepnvme.safetensors import save_file

from ...support.engines import failing
from ...support.interpreters import Interpreters
from ...support.offloaded_training import InMemory, assert_same_model, train_both
from ...support.pinned_memory import pinned_bytes
from ...support.shards import save_sharded

WIDTH, WORDS = 32, 50


class Layer(nn.Module):
    """With parameters of its own, attention that resets a layer in it, and buffers that are saved and are not."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.narrow = nn.Linear(3 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("steps", torch.empty(2, dtype=torch.int32))
        self.register_buffer("angles", torch.empty(5), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        self.steps.zero_()
        self.angles.copy_(torch.arange(5) / 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x = x + self.attention(x, x, x, need_weights=False)[0] * self.scale + self.angles.sum()
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x.transpose(1, 2)).transpose(1, 2))))


class Model(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.mixing = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.mixing(x)[0]).flatten(0, 1), ids.roll(-1, 1).flatten())


def on_meta(make: Callable[[], nn.Module] = Model) -> Any:
    with torch.device("meta"):
        return make()


def batch(step: int) -> torch.Tensor:
    return torch.randint(1, WORDS, (4, 9), generator=torch.Generator().manual_seed(step))


def training_of(model: nn.Module, drive: Path, **options: Any) -> OffloadedTraining:
    given = {"memory_budget": 0, "lr": 1e-2, "blocks": ["layers.*"], **options}
    return OffloadedTraining(model, torch.optim.AdamW, path=drive / "training", **given)


def assert_has(training: OffloadedTraining, expected: nn.Module) -> None:
    assert_same_model(training, expected)
    buffers = dict(expected.named_buffers())
    for name, buffer in training.model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def assert_trains_as(training: OffloadedTraining, expected: nn.Module) -> None:
    assert_has(training, expected)
    train_both(training, InMemory(expected), map(batch, range(2)))


# Reset by its modules


@pytest.mark.parametrize("blocks", [["layers.*"], ["layers.*.norm", "mixing", "embedding"]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_on_meta_gets_the_values_that_it_would_have_had_in_memory(
    drive: Path, dtype: torch.dtype, blocks: list[str]
) -> None:
    def make() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return Model(tied=False)
        finally:
            torch.set_default_dtype(before)

    model = on_meta(make)
    torch.manual_seed(3)
    expected = make()
    torch.manual_seed(3)
    with training_of(model, drive, blocks=blocks) as training:
        assert model.head.weight.device.type == "cpu"
        assert_trains_as(training, expected)


def test_a_tied_parameter_has_the_value_of_the_first_module(drive: Path) -> None:
    model = on_meta()
    model.embedding.weight.requires_grad_(False)
    model.embedding.weight.note = "kept"
    with training_of(model, drive) as training:
        weight = training.state_dict()["model"]["head.weight"]
        assert model.head.weight is model.embedding.weight
        assert not model.head.weight.requires_grad
        assert model.head.weight.note == "kept"
        assert not weight[0].any()  # padding_idx: a Linear has none
        assert 0.9 < weight[1:].std() < 1.1


def test_what_is_in_memory_keeps_its_values(drive: Path) -> None:
    model, given = on_meta(), Model()
    model.layers[1] = given.layers[1]
    model.layers[0].wide.bias = nn.Parameter(torch.full_like(given.layers[0].wide.bias, 7))
    model.layers[2].angles = torch.full((5,), 3.0)
    before = copy.deepcopy(given.layers[1].state_dict())
    with training_of(model, drive) as training:
        found = training.state_dict()["model"]
        for name, value in before.items():
            assert torch.equal(found[f"layers.1.{name}"], value), name
        assert (found["layers.0.wide.bias"] == 7).all()
        assert 0 < found["layers.0.wide.weight"].abs().max() < 1
        assert (model.layers[2].angles == 3).all()
        training.step(batch(0))


class Forgetful(nn.Linear):
    """Forgets its bias, or its buffer."""

    def __init__(self, forgotten: str) -> None:
        self.forgotten = forgotten
        super().__init__(4, 4)
        self.register_buffer("codes", torch.zeros(4, dtype=torch.uint8))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.fill_(1)
        if self.forgotten != "bias":
            self.bias.zero_()
        if self.forgotten != "codes" and hasattr(self, "codes"):
            self.codes.fill_(1)


@pytest.mark.parametrize("blocks", [[], ["1"]], ids=["rest", "block"])
@pytest.mark.parametrize("forgotten", ["bias", "codes"])
def test_what_gets_no_value_is_named_and_the_model_has_none_then(drive: Path, forgotten: str, blocks: list[str]) -> None:
    gc.collect()
    before = pinned_bytes()
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Forgetful(forgotten)))
    given = [model[int(index)] for index in blocks]
    with pytest.raises(ValueError, match=rf"neither reset_parameters\(\) .* gives them to '1\.{forgotten}'$"):
        training_of(model, drive, blocks=given)
    assert not (drive / "training").exists()
    gc.collect()
    assert pinned_bytes() <= before
    assert all(param.is_meta for param in model[1].parameters())
    assert model[1].codes.is_meta == (forgotten == "codes")
    with pytest.raises(ValueError, match=r"no values any more .*make the model anew"):
        training_of(model, drive, blocks=given)


def test_a_model_whose_training_was_closed_has_no_values(drive: Path) -> None:
    model = Model()
    expected = copy.deepcopy(model)
    torch.save(expected.state_dict(), drive / "w.pt")
    training_of(model, drive).close()
    with pytest.raises(ValueError, match=r"no values any more \('layers\.0\.scale', .*, and \d+ more\), of a training"):
        training_of(model, drive)
    with training_of(model, drive, checkpoint=drive / "w.pt") as training:
        assert_trains_as(training, expected)


# Of a checkpoint

KINDS = ["safetensors", "sharded", "pt"]


def saved(state: Mapping[str, torch.Tensor], directory: Path, kind: str) -> Any:
    """A checkpoint of a state of each kind: what to give for it."""
    if kind == "sharded":
        save_sharded(state, directory / "sharded", most=30_000)
        return directory / "sharded"
    if kind == "safetensors":
        save_file(state, directory / "w.safetensors")
        return str(directory / "w.safetensors")
    torch.save(state, directory / "w.pt")
    return directory / "w.pt"


def untied(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a safetensors file can hold of a model: each weight once."""
    return {name: value for name, value in model.state_dict().items() if name != "head.weight"}


@pytest.mark.parametrize(("kind", "device"), [*((kind, "meta") for kind in KINDS), ("safetensors", "cpu")])
def test_a_training_begins_with_the_values_of_a_checkpoint(drive: Path, kind: str, device: str) -> None:
    torch.manual_seed(1)
    expected = Model()
    state = expected.state_dict() if kind == "pt" else untied(expected)
    model = on_meta() if device == "meta" else Model()
    with training_of(model, drive, checkpoint=saved(state, drive, kind)) as training:
        assert_trains_as(training, expected)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_values_are_converted_to_the_model_s_dtype(drive: Path, kind: str) -> None:
    before = Model(tied=False)
    expected = Model(tied=False).to(torch.bfloat16)
    expected.load_state_dict(before.state_dict())
    model = on_meta(lambda: Model(tied=False)).to(torch.bfloat16)
    for layer, other in zip(model.layers, expected.layers, strict=True):
        layer.angles = other.angles.clone()
    with training_of(model, drive, checkpoint=saved(before.state_dict(), drive, kind)) as training:
        assert_has(training, expected)


class Adapted(nn.Module):
    """A layer with an adapter, that no checkpoint of the model has."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.adapter = layer.requires_grad_(False), nn.Linear(WIDTH, WIDTH, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.adapter(x)


def adapted(model: Model) -> Model:
    model.layers[1].wide.weight.requires_grad_(False)
    model.layers[2] = Adapted(model.layers[2])
    return model


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_adapters_that_are_not_in_the_checkpoint_keep_their_values_beside_a_model_on_meta(drive: Path, kind: str) -> None:
    expected = adapted(Model(tied=False))
    state = {name: value for name, value in expected.state_dict().items() if "adapter" not in name}
    model = adapted(on_meta(lambda: Model(tied=False)))
    with training_of(model, drive, checkpoint=saved(state, drive, kind)) as training:
        assert_trains_as(training, expected)


def test_a_model_in_memory_has_all_of_its_weights_in_the_checkpoint(drive: Path) -> None:
    model = adapted(Model(tied=False))
    state = {name: value for name, value in model.state_dict().items() if "adapter" not in name}
    with pytest.raises(ValueError, match=r"2 differences\n  missing: 'layers.2.adapter.weight'"):
        training_of(model, drive, checkpoint=saved(state, drive, "pt"))


def test_views_in_a_checkpoint(drive: Path) -> None:
    """torch.save keeps strides, and storages that several tensors have parts of."""
    expected = Model(tied=False)
    state = dict(expected.state_dict())
    state["head.weight"] = state["head.weight"].t().contiguous().t()
    both = torch.cat([state["layers.0.wide.bias"], state["layers.1.wide.bias"]])
    state["layers.0.wide.bias"], state["layers.1.wide.bias"] = both.chunk(2)
    model = on_meta(lambda: Model(tied=False))
    with training_of(model, drive, checkpoint=saved(state, drive, "pt")) as training:
        assert_has(training, expected)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_checkpoint_of_another_model_is_refused_before_anything_is_changed(drive: Path, kind: str) -> None:
    state = untied(Model())
    del state["layers.1.wide.bias"]
    state["layers.2.wide.weight"] = torch.zeros(3)
    state["more"] = torch.zeros(1)
    model = on_meta()
    with pytest.raises(ValueError, match=r"is not of this Model: 3 differences") as error:
        training_of(model, drive, checkpoint=saved(state, drive, kind))
    for said in (
        "missing: 'layers.1.wide.bias', float32 [96]",
        "shape: 'layers.2.wide.weight' should be float32 [96, 32], found float32 [3]",
        "unexpected: 'more', float32 [1]",
    ):
        assert said in str(error.value)
    assert not (drive / "training").exists()
    assert all(param.is_meta for param in model.parameters())
    with training_of(model, drive, checkpoint=saved(untied(Model()), drive, "pt")) as training:
        training.step(batch(0))


def test_buffers_that_no_checkpoint_has_are_reset_and_parameters_are_not(drive: Path) -> None:
    expected = Model()
    for layer in expected.layers:
        layer.angles.copy_(torch.arange(5) / 7)
    with training_of(on_meta(), drive, checkpoint=saved(untied(expected), drive, "safetensors")) as training:
        assert_has(training, expected)


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_error_of_the_drive_leaves_nothing_behind(drive: Path, operation: str, device: str) -> None:
    path = saved(untied(Model()), drive, "safetensors")
    training_of(Model(), drive, checkpoint=path).close()  # the engine that reads checkpoints keeps its memory
    failed = 0
    gc.collect()
    before = pinned_bytes()
    for first in range(0, 60, 4):
        try:
            with failing(operation, first, count=1000):
                training = training_of(on_meta() if device == "meta" else Model(), drive, checkpoint=path)
        except OSError:
            failed += 1
        else:
            training.close()
            break
        assert not (drive / "training").exists()
        gc.collect()
        assert pinned_bytes() <= before
    else:
        pytest.fail("everything failed")
    assert failed


def test_a_checkpoint_that_is_written_to_meanwhile(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = drive / "w.safetensors"
    save_file(untied(Model()), path)
    model, original = on_meta(), Layer.reset_parameters

    def reset(module: Layer) -> None:
        original(module)
        os.utime(path, ns=(1, 1))

    monkeypatch.setattr(Layer, "reset_parameters", reset)
    with pytest.raises(CorruptCheckpoint, match="changed while its weights were read"):
        training_of(model, drive, checkpoint=path)


# Models of transformers


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tied"), [("Llama", True), ("GPT2", False)])
def test_models_of_transformers(drive: Path, name: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "Llama": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3},
        "GPT2": {"n_embd": 32, "n_layer": 3, "n_head": 4},
    }[name]
    config = getattr(transformers, f"{name}Config")(vocab_size=90, tie_word_embeddings=tied, **sizes)
    model_class = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")

    def make() -> Any:
        return getattr(transformers, model_class)(config)

    ids = torch.randint(0, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    expected = make().train()
    with training_of(on_meta(make), drive, blocks=None, master_weights=False) as training:
        found = training.state_dict()["model"]
        for key, value in expected.state_dict().items():
            tolerance = 6 * float(value.float().std()) / math.sqrt(value.numel()) + 1e-9
            assert abs(float(found[key].float().std()) - float(value.float().std())) <= tolerance, key
            assert abs(float(found[key].float().mean()) - float(value.float().mean())) <= 2 * tolerance, key
        buffers = dict(expected.named_buffers())
        for key, buffer in training.model.named_buffers():
            assert torch.equal(buffer, buffers[key]), key
        assert abs(float(training.step(input_ids=ids, labels=ids)) - math.log(90)) < 0.5

    path = saved(expected.state_dict(), drive, "pt")
    with training_of(on_meta(make).train(), drive, blocks=None, checkpoint=path) as training:
        assert_has(training, expected)
        torch.manual_seed(1)
        loss = expected(input_ids=ids, labels=ids).loss
        torch.manual_seed(1)
        assert torch.equal(training.step(input_ids=ids, labels=ids), loss)


# Memory


@pytest.mark.slow
def test_a_model_larger_than_memory(drive: Path, interpreters: Interpreters) -> None:
    """24 blocks of 8 MiB, 192 MiB in all, in a process that may grow by 48, of which a training pins 16."""
    interpreters.run(
        f"""
        import threading, time
        import torch
        from torch import nn
        from deepnvme.offload.training import OffloadedTraining
        torch.set_num_threads(1)

        class Block(nn.Linear):
            pass

        class Model(nn.Sequential):
            def __init__(self, blocks):
                super().__init__(*(Block(1024, 2048, bias=False) for _ in range(blocks)))

        def training_of(blocks):
            with torch.device("meta"):
                model = Model(blocks)
            return OffloadedTraining(model, torch.optim.SGD, lr=0.1, path={str(drive)!r}, memory_budget=40 << 20)

        def own_memory():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

        training_of(2).close()  # imports what is needed
        peak, going, before = 0, True, own_memory()

        def watch():
            global peak
            while going:
                peak = max(peak, own_memory())
                time.sleep(0.001)

        watcher = threading.Thread(target=watch)
        watcher.start()
        training = training_of(24)
        going = False
        watcher.join()
        assert sum(param.nbytes for param in training.model.parameters()) == 192 << 20
        grown = peak - before
        assert 0 < grown < 48 << 20, grown
        assert all(0.01 < weight.std() < 0.03 for weight in training.state_dict()["model"].values())
        training.close()
        """,
    ).check()
