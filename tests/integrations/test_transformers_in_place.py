"""transformers' models that are streamed from the checkpoint's own files say what they say in memory."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
import transformers

from deepnvme.checkpoint import CorruptCheckpoint
from deepnvme.integrations import accelerate as integration
from deepnvme.streaming import WeightMismatch, from_pretrained

from ..support.engines import failing
from . import models
from .models import logits

KINDS = list(models.KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_tokens_are_those_of_the_store_and_of_the_model_in_memory(kind: str, drive: Path) -> None:
    known = models.checkpoint(kind, drive / "checkpoint")
    before = {path: path.stat().st_mtime_ns for path in drive.rglob("*")}
    model = from_pretrained(drive / "checkpoint")
    assert {path: path.stat().st_mtime_ns for path in drive.rglob("*")} == before  # nothing is written
    assert type(model) is type(known)
    assert not model.training
    stored = from_pretrained(drive / "checkpoint", path=drive / "store")
    for _ in range(2):
        assert torch.equal(logits(model, kind), logits(known, kind))
        assert torch.equal(logits(model, kind), logits(stored, kind))
    assert torch.equal(models.tokens(model), models.tokens(known))
    assert torch.equal(models.tokens(model, num_beams=3), models.tokens(known, num_beams=3))
    assert model.streaming.report().bytes_read > 0
    model.streaming.close(restore=True)
    for (name, weight), (other, expected) in zip(model.state_dict().items(), known.state_dict().items(), strict=True):
        assert (name, weight.dtype) == (other, expected.dtype)
        assert torch.equal(weight, expected)


def test_weights_that_transformers_rearranges_are_named_and_need_a_store(drive: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.HrmTextConfig(vocab_size=64, head_dim=16, **sizes)
    known = transformers.AutoModelForCausalLM.from_config(config)
    known.save_pretrained(drive / "checkpoint")
    with pytest.raises(ValueError, match=r"rearranges '.*weight' of this HrmText.*Chunk\(dim=0.* give path="):
        from_pretrained(drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", path=drive / "store")
    assert torch.equal(logits_of(model), logits_of(known.eval()))


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([[1, 5, 9]])).logits
        return found


def test_an_expert_that_is_missing_is_a_weight_of_another_shape(drive: Path) -> None:
    models.checkpoint("mixtral", drive / "checkpoint")
    file = drive / "checkpoint" / "model.safetensors"
    state = safetensors.torch.load_file(file)
    del state["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    safetensors.torch.save_file(state, file, {"format": "pt"})
    with pytest.raises(
        WeightMismatch, match=r"shape: 'model\.layers\.1\.mlp\.experts\.down_proj' should be .*\[4, 64, 128\], found"
    ):
        from_pretrained(drive / "checkpoint")
    del state["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    safetensors.torch.save_file(state, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"gate_up_proj.* cannot be merged"):
        from_pretrained(drive / "checkpoint")


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"kv_offload": "nvme"}])
def test_what_has_to_be_written_needs_a_store(options: Any, drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    with pytest.raises(ValueError, match=f"{next(iter(options))} needs path"):
        from_pretrained(drive / "checkpoint", **options)


def test_a_store_has_no_tables_of_a_given_size(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    with pytest.raises(ValueError, match=r"min_table_bytes is for a checkpoint.* got '1KB'"):
        from_pretrained(drive / "checkpoint", path=drive / "store", min_table_bytes="1KB")
    assert not (drive / "store").exists()


def test_weights_that_the_checkpoint_lacks_are_named_before_memory_is_taken_for_them(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    with pytest.raises(ValueError, match=r"lacks weights of this LlamaForSequenceClassification: 'score\.weight'"):
        from_pretrained(drive / "checkpoint", model_class=transformers.LlamaForSequenceClassification)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("t5", torch.float16), ("llama", torch.float32), ("gpt2", "auto"), ("mixtral", torch.float32), ("deepseek", torch.float16)],
)
def test_a_dtype_that_is_asked_for_is_that_of_the_weights(kind: str, dtype: Any, drive: Path) -> None:
    models.checkpoint(kind, drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", dtype=dtype)
    known = type(model).from_pretrained(drive / "checkpoint", dtype=dtype)
    assert {name: weight.dtype for name, weight in model.named_parameters()} == {
        name: weight.dtype for name, weight in known.named_parameters()
    }
    assert torch.equal(logits(model, kind), logits(known, kind))


def test_shards_and_a_file_of_torchs(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "shards", max_shard_size="100KB")
    assert len(list((drive / "shards").glob("*.safetensors"))) > 2
    models.checkpoint("llama", drive / "torch")
    (drive / "torch" / "model.safetensors").unlink()
    torch.save(known.state_dict(), drive / "torch" / "pytorch_model.bin")
    for checkpoint in ("shards", "torch"):
        model = from_pretrained(drive / checkpoint, memory_budget="1MB")
        assert torch.equal(models.tokens(model), models.tokens(known))
        model.streaming.close()


def test_a_checkpoint_in_the_hubs_cache(drive: Path) -> None:
    known = models.checkpoint("llama-tied", drive / "checkpoint")
    cached = drive / "cache" / "models--someone--llama"
    (cached / "refs").mkdir(parents=True)
    (cached / "blobs").mkdir()
    (cached / "refs" / "main").write_text("1" * 40)
    shutil.copytree(drive / "checkpoint", cached / "snapshots" / ("1" * 40))
    weights = cached / "snapshots" / ("1" * 40) / "model.safetensors"
    weights.rename(cached / "blobs" / "f00")
    weights.symlink_to("../../blobs/f00")
    model = from_pretrained("someone/llama", cache_dir=drive / "cache", local_files_only=True)
    assert torch.equal(models.tokens(model), models.tokens(known))


def test_the_class_can_be_chosen_and_options_count(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    inputs = models.prompts()
    for kind in (transformers.AutoModel, transformers.LlamaModel):
        known = kind.from_pretrained(drive / "checkpoint")
        model = from_pretrained(drive / "checkpoint", model_class=kind, attn_implementation="eager")
        assert model.config._attn_implementation == "eager"
        known.set_attn_implementation("eager")
        assert type(model) is type(known)
        assert torch.equal(model(**inputs).last_hidden_state, known(**inputs).last_hidden_state)
        model.streaming.close()
    generation = transformers.GenerationConfig(max_new_tokens=3)
    config = transformers.AutoConfig.from_pretrained(drive / "checkpoint")
    before = config.to_dict()
    model = from_pretrained(drive / "checkpoint", generation_config=generation, config=config)
    assert model.generation_config.max_new_tokens == 3
    assert config.to_dict() == before


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_the_current_directory_may_change_meanwhile(kind: str, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = models.checkpoint(kind, drive / "checkpoint")
    monkeypatch.chdir(drive)
    model = from_pretrained("checkpoint", min_table_bytes=1000)
    monkeypatch.chdir("/")
    assert torch.equal(models.tokens(model), models.tokens(known))
    model.streaming.close()


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_model_is_copied_and_pickled_once_it_is_restored(kind: str, drive: Path) -> None:
    known = models.checkpoint(kind, drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", memory_budget="1GB")
    for use in (copy.deepcopy, pickle.dumps):
        for each in (model, model.streaming):
            with pytest.raises(RuntimeError, match=r"close\(restore=True\)"):
                use(each)
    model.streaming.close(restore=True)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.streaming is None
        assert torch.equal(models.tokens(copied), models.tokens(known))


def test_an_adapter_in_the_folder_is_refused(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")

    def load_adapter(self: Any, path: str, **_: Any) -> None:
        """Do as transformers does where peft is installed."""
        self._load_pretrained_model(model=self, state_dict=None, checkpoint_files=[path], load_config=None, expected_keys=[])

    with (
        mock.patch("transformers.modeling_utils.maybe_load_adapters", lambda name, *_, **how: (name, name, how)),
        mock.patch("transformers.PreTrainedModel.load_adapter", load_adapter),
        pytest.raises(ValueError, match=r"checkpoint' also has an adapter.*load it into the streamed model"),
    ):
        from_pretrained(drive / "checkpoint")


def test_while_accelerates_offload_is_streamed_as_well(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    integration.enable()
    try:
        model = from_pretrained(drive / "checkpoint")
    finally:
        integration.disable()
    assert torch.equal(models.tokens(model), models.tokens(known))


def test_two_models_on_one_folder_generate_in_threads(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    expected = models.tokens(known)
    streamed = [from_pretrained(drive / "checkpoint", prefetch=prefetch) for prefetch in (0, 2)]
    together = threading.Barrier(2)

    def generate(model: Any) -> torch.Tensor:
        together.wait()
        return models.tokens(model)

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(generate, streamed):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_read_that_fails_in_the_midst_of_generate_is_told_of_and_the_next_call_works(kind: str, drive: Path) -> None:
    known = models.checkpoint(kind, drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", prefetch=0, experts="streamed")
    for first in (1, 20):
        with failing("read", first) as broken, pytest.raises(OSError, match=r"read of \d+ bytes at offset \d+"):
            models.tokens(model)
        assert broken.failed == 1
        assert torch.equal(models.tokens(model), models.tokens(known))
    model.streaming.close()


def test_a_checkpoint_that_is_replaced_during_generate_is_named(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    file = drive / "checkpoint" / "model.safetensors"
    model = from_pretrained(drive / "checkpoint", prefetch=0)
    assert torch.equal(models.tokens(model), models.tokens(known))
    shutil.copy(file, drive / "new")
    os.replace(drive / "new", file)
    with pytest.raises(CorruptCheckpoint, match="was changed") as raised:
        models.tokens(model)
    assert raised.value.filename == str(file)
    model.streaming.close()


def test_a_damaged_checkpoint_and_a_shard_that_is_missing(drive: Path) -> None:
    models.checkpoint("llama", drive / "whole")
    whole = drive / "whole" / "model.safetensors"
    os.truncate(whole, whole.stat().st_size - 1000)
    with pytest.raises(CorruptCheckpoint, match="cut off") as damaged:
        from_pretrained(drive / "whole")
    assert damaged.value.filename == str(whole)
    models.checkpoint("llama", drive / "shards", max_shard_size="100KB")
    index = drive / "shards" / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    shard = told["weight_map"]["model.layers.5.mlp.up_proj.weight"]
    kept = {name: file for name, file in told["weight_map"].items() if file != shard}
    index.write_text(json.dumps({**told, "weight_map": kept}))
    with pytest.raises(ValueError, match=r"lacks weights of this LlamaForCausalLM: 'model\.layers"):
        from_pretrained(drive / "shards")
    index.write_text(json.dumps(told))
    (drive / "shards" / shard).unlink()
    with pytest.raises(OSError, match=shard):
        from_pretrained(drive / "shards")


def test_what_is_no_folder_of_a_checkpoint_is_named(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    (drive / "empty").mkdir()
    for name in (drive / "nowhere", f"{drive}/nowhere", "./nowhere", "~/nowhere", "models/of/nowhere"):
        with pytest.raises(FileNotFoundError, match="No such file") as absent:
            from_pretrained(name)
        assert absent.value.filename == str(name)
    for name, inner in ((drive / "empty", ""), (drive, "empty")):
        with pytest.raises(FileNotFoundError, match=r"no config\.json") as empty:
            from_pretrained(name, subfolder=inner)
        assert empty.value.filename == str(drive / "empty")
    file = drive / "checkpoint" / "model.safetensors"
    with pytest.raises(NotADirectoryError, match="takes the folder of a checkpoint") as a_file:
        from_pretrained(file)
    assert a_file.value.filename == str(file)
    config = transformers.AutoConfig.from_pretrained(drive / "checkpoint")
    (drive / "checkpoint" / "config.json").unlink()
    from_pretrained(drive / "checkpoint", config=config).streaming.close()


def test_a_pointer_of_git_lfs_is_named(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    file = drive / "checkpoint" / "model.safetensors"
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1234\n")
    with pytest.raises(CorruptCheckpoint, match="git lfs pull") as pointer:
        from_pretrained(drive / "checkpoint")
    assert pointer.value.filename == str(file)


def test_a_model_without_experts_has_none_on_demand(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts that can be read on demand: leave experts= out"):
        from_pretrained(drive / "checkpoint", experts="on-demand")


def test_the_name_of_a_class_is_no_class(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    with pytest.raises(TypeError, match=r"model_class must be a class, such as .*, got 'LlamaForCausalLM'"):
        from_pretrained(drive / "checkpoint", model_class="LlamaForCausalLM")
