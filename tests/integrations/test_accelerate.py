"""accelerate offloads to the disk, and the weights are streamed."""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.checkpoint import CorruptCheckpoint
from deepnvme.integrations import accelerate as integration
from deepnvme.streaming import WeightStore, streaming_of
from deepnvme.swap import TensorStore

from . import models

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import accelerate
    import transformers


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    integration.enable()
    yield
    integration.disable()


def offloaded(kind: str, drive: Path, device_map: Any = None, **options: Any) -> transformers.PreTrainedModel:
    model_class = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    return model_class.from_pretrained(
        drive / "checkpoint", device_map=device_map or {"": "disk"}, offload_folder=drive / "folder", **options
    )


@pytest.mark.parametrize("kind", models.SOME_KINDS)
def test_a_device_map_that_names_the_disk_streams(kind: str, drive: Path) -> None:
    known = models.checkpoint(kind, drive / "checkpoint")
    for _ in range(2):  # with a new store, and with the one that is there
        model = offloaded(kind, drive)
        assert torch.equal(models.tokens(model), models.tokens(known))
        assert model.streaming.report().bytes_read > 0
        assert model.hf_device_map == {"": "disk"}
        model.streaming.close()


def test_what_a_model_keeps_in_float32_is_in_float32(drive: Path) -> None:
    """accelerate itself casts that, and the model then says something else."""
    models.checkpoint("t5", drive / "checkpoint")
    known = transformers.AutoModelForSeq2SeqLM.from_pretrained(drive / "checkpoint", dtype=torch.float16)
    for _ in range(2):  # with a new store, and with the one that is there
        model = offloaded("t5", drive, dtype=torch.float16)
        dtypes = {name: weight.dtype for name, weight in model.named_parameters()}
        assert dtypes == {name: weight.dtype for name, weight in known.named_parameters()}
        assert {dtype for name, dtype in dtypes.items() if name.endswith("wo.weight")} == {torch.float32}
        assert torch.equal(models.tokens(model), models.tokens(known))
        model.streaming.close()


def test_what_the_map_leaves_on_the_cpu_is_memory(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "disk", "lm_head": "disk"}
    device_map |= {f"model.layers.{layer}": "cpu" if layer < 4 else "disk" for layer in range(8)}
    model = offloaded("llama", drive, device_map)
    models.tokens(model)
    model.streaming.reset()
    assert torch.equal(models.tokens(model), models.tokens(known))
    layer = sum(each.nbytes for each in known.model.layers[0].parameters())
    report = model.streaming.report()
    assert 4 * layer <= report.resident_bytes < 5 * layer
    assert 0 < report.bytes_read < report.passes * 5 * layer


def test_a_model_in_memory_is_offloaded(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    model = transformers.AutoModelForCausalLM.from_pretrained(drive / "checkpoint")
    assert accelerate.disk_offload(model, drive / "folder") is model
    assert torch.equal(models.tokens(model), models.tokens(known))
    model.streaming.close()
    TensorStore(drive / "folder" / integration.STORE, persist=True).close()  # nobody has it open any more
    again = transformers.AutoModelForCausalLM.from_pretrained(drive / "checkpoint")
    assert torch.equal(models.tokens(accelerate.disk_offload(again, drive / "folder")), models.tokens(known))


def test_other_weights_in_the_same_folder_are_refused(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    first, second = (transformers.AutoModelForCausalLM.from_pretrained(drive / "checkpoint") for _ in range(2))
    accelerate.disk_offload(first, drive / "folder")
    first.streaming.close()
    with torch.no_grad():
        second.model.layers[1].mlp.up_proj.weight[3, 4] += 1
    with pytest.raises(ValueError, match=r"another checkpoint.*model\.layers\.1\.mlp\.up_proj\.weight"):
        accelerate.disk_offload(second, drive / "folder")


def test_what_accelerate_has_offloaded_before_is_used(drive: Path) -> None:
    known = models.checkpoint("gpt2", drive / "checkpoint")
    integration.disable()
    first = transformers.AutoModelForCausalLM.from_pretrained(drive / "checkpoint")
    accelerate.disk_offload(first, drive / "folder")
    integration.enable()
    second = transformers.AutoModelForCausalLM.from_pretrained(drive / "checkpoint")
    with torch.no_grad():
        second.transformer.h[0].attn.c_attn.weight.zero_()  # it is the folder's that count, as with accelerate
    accelerate.disk_offload(second, drive / "folder")
    assert torch.equal(models.tokens(second), models.tokens(known))


def test_a_model_that_accelerate_has_offloaded_is_streamed_without_its_hooks(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    integration.disable()
    model = transformers.AutoModelForCausalLM.from_pretrained(drive / "checkpoint")
    accelerate.disk_offload(model, drive / "folder")
    integration.enable()
    accelerate.disk_offload(model, drive / "folder")
    assert torch.equal(models.tokens(model), models.tokens(known))
    assert not any(isinstance(getattr(module, "_hf_hook", None), accelerate.hooks.ModelHook) for module in model.modules())


def test_what_is_streamed_already_is_refused_and_goes_on(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    model = offloaded("llama", drive)
    for folder in ("folder", "another"):
        with pytest.raises(RuntimeError, match="streamed already"):
            accelerate.disk_offload(model, drive / folder)
    assert torch.equal(models.tokens(model), models.tokens(known))


class Block(torch.nn.Module):
    """Weights that require grad and such that do not, a tie, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.last.bias.requires_grad_(False)
        self.register_buffer("scale", torch.rand(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))) * self.scale


def blocks() -> torch.nn.Module:
    torch.manual_seed(4)
    return torch.nn.Sequential(Block(), Block(), Block()).eval()


def weights(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, bool, str]]:
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {name: (weight.detach().clone(), weight.requires_grad, weight.device.type) for name, weight in named.items()}


def assert_same(found: dict[str, tuple[torch.Tensor, bool, str]], wanted: dict[str, tuple[torch.Tensor, bool, str]]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name][1:] == wanted[name][1:], name
        if wanted[name][2] != "meta":
            assert torch.equal(found[name][0], wanted[name][0]), name


def on_disk(model: torch.nn.Module, folder: Path) -> None:
    accelerate.disk_offload(model, folder)


def dispatched(model: torch.nn.Module, folder: Path) -> None:
    accelerate.dispatch_model(model, {"0": "cpu", "1": "disk", "2": "disk"}, offload_dir=folder)


def on_cpu(model: torch.nn.Module, folder: Path) -> None:
    accelerate.cpu_offload(model)


@pytest.mark.parametrize("second", [on_disk, dispatched, on_cpu])
@pytest.mark.parametrize("first", [on_disk, dispatched, on_cpu])
def test_who_undoes_an_offload_offloads_again(first: Any, second: Any, drive: Path) -> None:
    model, x = blocks(), torch.randn(3, 8)
    with torch.no_grad():
        wanted = model(x)
    own, threads = weights(model), threading.active_count()
    for number, offload in enumerate([first, second, first]):
        offload(model, drive / str(number))
        with torch.no_grad():
            assert torch.equal(model(x), wanted)
        accelerate.hooks.remove_hook_from_submodules(model)
        assert streaming_of(model) is None
        assert not hasattr(model, "streaming")
        assert not hasattr(model, "_hf_hook")
        assert_same(weights(model), own)
        assert torch.equal(model(x), wanted)
        model(x).sum().backward()
        store = drive / str(number) / integration.STORE
        if store.exists():
            TensorStore(store, persist=True).close()  # nobody has it open any more
        assert threading.active_count() <= threads
    # accelerate itself parts what is tied when it is undone.
    assert on_cpu in (first, second) or model[0].first.weight is model[0].last.weight


def test_weights_of_a_checkpoint_are_gone_when_the_offload_is_undone(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    model = offloaded("llama", drive)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert streaming_of(model) is None
    TensorStore(drive / "folder" / integration.STORE, persist=True).close()  # nobody has it open any more
    with pytest.raises(RuntimeError, match="is streamed, and in memory only during the forward"):
        models.tokens(model)


def test_an_undo_that_cannot_read_leaves_the_model_streamed_and_may_be_repeated(
    drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = blocks(), torch.randn(3, 8)
    own, wanted = weights(model), model(x)
    on_disk(model, drive / "folder")
    model(x)

    def failing(store: WeightStore, extent: str, out: torch.Tensor) -> Any:
        raise OSError(errno.EIO, "Input/output error", str(drive))

    with monkeypatch.context() as patched:
        patched.setattr(WeightStore, "read", failing)
        with pytest.raises(OSError, match="Input/output error") as raised:
            accelerate.hooks.remove_hook_from_submodules(model)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(drive))
    assert torch.equal(model(x), wanted)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert_same(weights(model), own)


def test_a_hook_that_is_put_beside_is_refused(drive: Path) -> None:
    model = blocks()
    own = weights(model)
    on_disk(model, drive / "folder")
    with pytest.raises(RuntimeError, match="takes no other hook"):
        accelerate.hooks.add_hook_to_module(model, accelerate.hooks.AlignDevicesHook(io_same_device=True), append=True)
    assert_same(weights(model), own)


def test_a_checkpoint_is_loaded_and_dispatched(drive: Path) -> None:
    known = models.checkpoint("opt", drive / "checkpoint")
    with accelerate.init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(known.config)
    model.tie_weights()
    model = accelerate.load_checkpoint_and_dispatch(
        model,
        drive / "checkpoint",
        device_map={"model": "disk", "lm_head": "cpu"},  # accelerate 1.15 cannot load safetensors where all is "disk"
        offload_folder=str(drive / "folder"),
    )
    assert torch.equal(models.tokens(model.eval()), models.tokens(known))


def test_the_options_are_those_of_the_last_call(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    integration.enable(memory_budget="25%")
    model = offloaded("llama", drive)
    models.tokens(model)
    model.streaming.reset()
    models.tokens(model)
    assert model.streaming.report().bytes_read == 0


def test_without_a_folder_accelerate_does_it_and_a_warning_says_so(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    with pytest.warns(RuntimeWarning, match="no offload_folder"):
        model = transformers.AutoModelForCausalLM.from_pretrained(drive / "checkpoint", device_map={"": "disk"})
    assert not hasattr(model, "streaming")
    assert torch.equal(models.tokens(model), models.tokens(known))


def test_weights_that_are_nowhere_are_named(drive: Path) -> None:
    with accelerate.init_empty_weights():
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"0\.weight"):
        accelerate.dispatch_model(model, {"": "disk"}, offload_dir=drive / "folder")


@pytest.mark.parametrize("index", [b"{", b'{"a": 1}', b'{"a": {"shape": [[]]}}'])
def test_an_index_that_is_damaged_is_named(drive: Path, index: bytes) -> None:
    (drive / "index.json").write_bytes(index)
    with pytest.raises(CorruptCheckpoint, match="no index of offloaded weights") as refused:
        accelerate.disk_offload(torch.nn.Sequential(torch.nn.Linear(4, 4)), drive)
    assert refused.value.filename == str(drive / "index.json")


def test_disabled_it_is_accelerates_own(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    integration.disable()
    integration.disable()
    assert accelerate.dispatch_model.__module__ == "accelerate.big_modeling"
    assert accelerate.disk_offload.__module__ == "accelerate.big_modeling"
    assert transformers.integrations.accelerate.dispatch_model is accelerate.dispatch_model
    assert not hasattr(offloaded("llama", drive), "streaming")


def test_a_reference_that_was_kept_while_enabled_is_accelerates_own_afterwards(drive: Path) -> None:
    kept = accelerate.disk_offload
    integration.disable()
    model = kept(torch.nn.Sequential(torch.nn.Linear(4, 4)), drive / "folder")
    assert not hasattr(model, "streaming")
    assert (drive / "folder" / "index.json").exists()
