"""transformers' models with their weights on the drive say what they say in memory."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from deepnvme.integrations import accelerate as integration
from deepnvme.streaming import from_pretrained
from deepnvme.streaming.weights.build_once import BUILDING
from deepnvme.swap import TensorStore

from ..support.disks import Disk
from . import models
from .models import logits

KINDS = list(models.KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_tokens_are_those_of_the_model_in_memory(kind: str, drive: Path) -> None:
    known = models.checkpoint(kind, drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", path=drive / "store")
    assert type(model) is type(known)
    assert not model.training
    for _ in range(2):
        assert torch.equal(logits(model, kind), logits(known, kind))
    assert torch.equal(models.tokens(model), models.tokens(known))
    assert torch.equal(models.tokens(model, num_beams=3), models.tokens(known, num_beams=3))
    assert model.streaming.report().bytes_read > 0


@pytest.mark.parametrize("kind", ["llama", "deepseek"])
def test_an_offload_dir_is_used_again(kind: str, drive: Path) -> None:
    known = models.checkpoint(kind, drive / "checkpoint")
    with from_pretrained(drive / "checkpoint", path=drive / "store").streaming:
        pass
    before = {path: path.stat().st_mtime_ns for path in (drive / "store").iterdir() if path.suffix == ".data"}
    assert before
    model = from_pretrained(drive / "checkpoint", path=drive / "store")
    assert torch.equal(models.tokens(model), models.tokens(known))
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_sharded_checkpoint_is_streamed(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint", max_shard_size="100KB")
    assert len(list((drive / "checkpoint").glob("*.safetensors"))) > 2
    model = from_pretrained(drive / "checkpoint", path=drive / "store")
    assert torch.equal(models.tokens(model), models.tokens(known))


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_dtype_that_is_asked_for_is_that_of_the_weights(kind: str, drive: Path) -> None:
    known = models.checkpoint(kind, drive / "checkpoint").float()
    for _ in range(2):  # built, and opened again
        model = from_pretrained(drive / "checkpoint", path=drive / "store", dtype=torch.float32)
        assert model.dtype == torch.float32
        assert torch.equal(logits(model, kind), logits(known, kind))
        model.streaming.close()


@pytest.mark.parametrize(("kind", "dtype"), [("t5", torch.float16), ("deepseek", torch.bfloat16)])
def test_what_a_model_keeps_in_float32_is_in_float32(kind: str, dtype: torch.dtype, drive: Path) -> None:
    models.checkpoint(kind, drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", path=drive / "store", dtype=dtype)
    known = type(model).from_pretrained(drive / "checkpoint", dtype=dtype)
    assert {name: weight.dtype for name, weight in model.named_parameters()} == {
        name: weight.dtype for name, weight in known.named_parameters()
    }
    assert torch.float32 in {weight.dtype for weight in (*model.parameters(), *model.buffers())}
    for (name, buffer), (other, expected) in zip(model.named_buffers(), known.named_buffers(), strict=True):
        assert (name, buffer.dtype) == (other, expected.dtype)
        assert torch.equal(buffer, expected)
    assert torch.equal(logits(model, kind), logits(known, kind))


@pytest.mark.parametrize("kind", ["llama-tied", "deepseek"])
def test_a_checkpoint_of_torchs_is_streamed(kind: str, drive: Path) -> None:
    known = models.checkpoint(kind, drive / "checkpoint")
    (drive / "checkpoint" / "model.safetensors").unlink()
    torch.save(known.state_dict(), drive / "checkpoint" / "pytorch_model.bin")
    known = type(known).from_pretrained(drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", path=drive / "store")
    assert torch.equal(models.tokens(model), models.tokens(known))


def test_the_class_can_be_chosen(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    known = transformers.AutoModel.from_pretrained(drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", path=drive / "store", model_class=transformers.AutoModel)
    inputs = models.prompts()
    assert torch.equal(model(**inputs).last_hidden_state, known(**inputs).last_hidden_state)


@pytest.mark.slow
def test_a_class_that_is_beside_the_checkpoint(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(drive / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    models.checkpoint("llama", drive / "checkpoint")
    (drive / "checkpoint" / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\nclass Own(LlamaForCausalLM):\n    pass\n"
    )
    change_config(drive, architectures=["Own"], auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    options: dict[str, Any] = {"trust_remote_code": True}
    known = transformers.AutoModelForCausalLM.from_pretrained(drive / "checkpoint", **options)
    for _ in range(2):
        model = from_pretrained(drive / "checkpoint", path=drive / "store", **options)
        assert type(model).__name__ == "Own"
        assert torch.equal(models.tokens(model), models.tokens(known))
        model.streaming.close()


def change_config(drive: Path, **facts: Any) -> None:
    path = drive / "checkpoint" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def test_options_of_transformers_count_and_a_config_stays_as_it_is(drive: Path) -> None:
    models.checkpoint("mixtral", drive / "checkpoint")
    config = transformers.AutoConfig.from_pretrained(drive / "checkpoint")
    before = config.to_dict()
    how = {"attn_implementation": "eager", "experts_implementation": "eager", "trust_remote_code": True}
    generation = transformers.GenerationConfig(max_new_tokens=3)
    for given in ({"config": config}, {}):
        model = from_pretrained(
            drive / "checkpoint", path=drive / "store", generation_config=generation, dtype="float32", **how, **given
        )
        assert (model.config._attn_implementation, model.config._experts_implementation) == ("eager", "eager")
        assert model.generation_config.max_new_tokens == 3
        assert model.dtype == torch.float32
        model.streaming.close()
    assert config.to_dict() == before


def test_while_accelerates_offload_is_streamed_as_well(drive: Path) -> None:
    known = models.checkpoint("mixtral", drive / "checkpoint")
    integration.enable()
    try:
        model = from_pretrained(drive / "checkpoint", path=drive / "store")
    finally:
        integration.disable()
    assert torch.equal(models.tokens(model), models.tokens(known))


def test_closing_what_was_returned_closes_the_store(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", path=drive / "store")
    model.streaming.close()
    TensorStore(drive / "store", persist=True).close()  # StoreLocked, where others have it open


def test_what_was_converted_is_gone_and_so_is_what_a_killed_process_has_left(drive: Path) -> None:
    models.checkpoint("mixtral", drive / "checkpoint")
    left = drive / "store" / "building" / "converted"
    left.mkdir(parents=True)
    (left / "model.layers.0.safetensors").write_bytes(bytes(100))
    from_pretrained(drive / "checkpoint", path=drive / "store").streaming.close()
    assert not any(path.suffix == ".safetensors" for path in drive.rglob("*") if path.parent != drive / "checkpoint")
    assert sorted(path.name for path in drive.iterdir()) == ["checkpoint", "store"]


def test_a_build_that_fails_leaves_nothing(drive: Path) -> None:
    models.checkpoint("mixtral", drive / "checkpoint")
    weights = drive / "checkpoint" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(Exception, match=r"(?i)incomplete|cut|invalid|safetensors"):
        from_pretrained(drive / "checkpoint", path=drive / "below" / "store")
    assert [path.name for path in drive.iterdir()] == ["checkpoint"]


def test_a_disk_that_is_full_while_weights_are_converted_is_named(drive: Path, small_disk: Disk) -> None:
    known = models.checkpoint("mixtral", drive / "checkpoint")
    with (small_disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while ballast.write(bytes(1 << 16)):
            pass
    with pytest.raises(OSError, match="converts") as full:
        from_pretrained(drive / "checkpoint", path=small_disk / "store")
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(small_disk / "store" / BUILDING / "converted"))
    assert not any(path.is_file() for path in (small_disk / "store").rglob("*"))
    (small_disk / "ballast").unlink()
    model = from_pretrained(drive / "checkpoint", path=small_disk / "store")
    assert torch.equal(models.tokens(model), models.tokens(known))
    model.streaming.close()


def test_quantised_weights_are_near_what_they_were(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", path=drive / "store", quantize="int8")
    expected, found = logits(known, "llama").float(), logits(model, "llama").float()
    error = (expected - found).norm() / expected.norm()
    assert 0 < error < 0.02


def test_keys_and_values_can_be_offloaded_too(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", path=drive / "store", kv_offload="nvme")
    for _ in range(2):
        assert torch.equal(models.tokens(model), models.tokens(known))


def test_the_store_of_another_checkpoint_is_refused(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    models.checkpoint("gpt2", drive / "other")
    from_pretrained(drive / "checkpoint", path=drive / "store").streaming.close()
    with pytest.raises(ValueError, match="another checkpoint"):
        from_pretrained(drive / "other", path=drive / "store")


def test_a_store_is_of_one_variant_in_one_folder(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    known.save_pretrained(drive / "checkpoint", variant="other")
    known.save_pretrained(drive / "checkpoint" / "inner")
    from_pretrained(drive / "checkpoint", path=drive / "store", subfolder="inner").streaming.close()
    for options in ({}, {"variant": "other"}, {"subfolder": "inner", "use_safetensors": True}):
        with pytest.raises(ValueError, match="another checkpoint"):
            from_pretrained(drive / "checkpoint", path=drive / "store", **options)
    from_pretrained(drive / "checkpoint", path=drive / "store", subfolder="inner").streaming.close()
    with torch.no_grad():
        known.model.norm.weight.mul_(2)
    known.save_pretrained(drive / "checkpoint" / "inner")
    with pytest.raises(ValueError, match=r"another checkpoint.*model\.safetensors"):
        from_pretrained(drive / "checkpoint", path=drive / "store", subfolder="inner")


def test_a_store_is_of_one_commit_of_a_name(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    cached = drive / "cache" / "models--someone--llama"
    (cached / "refs").mkdir(parents=True)
    options: dict[str, Any] = {"cache_dir": drive / "cache", "local_files_only": True}
    for commit in ("1" * 40, "2" * 40):
        shutil.copytree(drive / "checkpoint", cached / "snapshots" / commit)
        (cached / "refs" / "main").write_text(commit)
        if commit[0] == "1":
            model = from_pretrained("someone/llama", path=drive / "store", **options)
            assert torch.equal(models.tokens(model), models.tokens(known))
            model.streaming.close()
    with pytest.raises(ValueError, match=r"revision: expected '2222.*', found '1111"):
        from_pretrained("someone/llama", path=drive / "store", **options)
    from_pretrained("someone/llama", path=drive / "store", revision="1" * 40, **options).streaming.close()


def test_a_checkpoint_that_is_quantised_already_is_refused(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    change_config(drive, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match="gptq"):
        from_pretrained(drive / "checkpoint", path=drive / "store")
    assert not (drive / "store").exists()


@pytest.mark.parametrize("missing", ["transformers", "accelerate"])
def test_what_is_not_installed_is_named(missing: str, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"pip install 'deepnvme\[transformers\]'"):
        from_pretrained(drive, path=drive / "store")


def test_a_checkpoint_that_is_not_there_leaves_nothing(drive: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        from_pretrained(drive / "nowhere", path=drive / "store")
    assert list(drive.iterdir()) == []


def test_wrong_options_are_named(drive: Path) -> None:
    with pytest.raises(ValueError, match="kv_offload must be None or 'nvme', got 'cpu'"):
        from_pretrained(drive, path=drive / "store", kv_offload="cpu")
    with pytest.raises(TypeError, match="device_map"):
        from_pretrained(drive, path=drive / "store", device_map="auto")
    with pytest.raises(TypeError, match="output_loading_info"):
        from_pretrained(drive, path=drive / "store", output_loading_info=True)


def test_a_misspelt_option_is_named_whether_or_not_there_is_a_store(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    where: dict[str, Any] = {"path": drive / "store"}
    with pytest.raises(TypeError, match="memory_bugdet"):
        from_pretrained(drive / "checkpoint", **where, memory_bugdet="8GB")
    assert not (drive / "store").exists()
    options: dict[str, Any] = {"use_cache": False, "low_cpu_mem_usage": True, "use_safetensors": True, "dtype": "float32"}
    from_pretrained(drive / "checkpoint", **where, **options).streaming.close()
    model = from_pretrained(drive / "checkpoint", **where, **options)
    assert model.config.use_cache is False
    model.streaming.close()
    for config in ({}, {"config": known.config}):
        with pytest.raises(TypeError, match="memory_bugdet"):
            from_pretrained(drive / "checkpoint", **where, **config, memory_bugdet="8GB")
