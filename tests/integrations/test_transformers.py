"""transformers' models with their weights on the drive say what they say in memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from deepnvme.streaming import from_pretrained

from . import models

KINDS = list(models.KINDS)


def logits(model: torch.nn.Module, kind: str) -> torch.Tensor:
    inputs = models.prompts()
    if kind == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :3]
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_tokens_are_those_of_the_model_in_memory(kind: str, drive: Path) -> None:
    known = models.checkpoint(kind, drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", offload_dir=drive / "store")
    assert type(model) is type(known)
    assert not model.training
    for _ in range(2):
        assert torch.equal(logits(model, kind), logits(known, kind))
    assert torch.equal(models.tokens(model), models.tokens(known))
    assert torch.equal(models.tokens(model, num_beams=3), models.tokens(known, num_beams=3))
    assert model.streaming.report().bytes_read > 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_offload_dir_is_used_again(kind: str, drive: Path) -> None:
    known = models.checkpoint(kind, drive / "checkpoint")
    with from_pretrained(drive / "checkpoint", offload_dir=drive / "store").streaming:
        pass
    before = {path: path.stat().st_mtime_ns for path in (drive / "store").iterdir() if path.suffix == ".data"}
    assert before
    model = from_pretrained(drive / "checkpoint", offload_dir=drive / "store")
    assert torch.equal(models.tokens(model), models.tokens(known))
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_budget_keeps_weights_in_memory(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", offload_dir=drive / "store", memory_budget=1 << 30)
    assert torch.equal(models.tokens(model), models.tokens(known))
    model.streaming.reset()
    assert torch.equal(models.tokens(model), models.tokens(known))
    assert model.streaming.report().bytes_read == 0


def test_a_sharded_checkpoint_is_streamed(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint", max_shard_size="100KB")
    assert len(list((drive / "checkpoint").glob("*.safetensors"))) > 2
    model = from_pretrained(drive / "checkpoint", offload_dir=drive / "store")
    assert torch.equal(models.tokens(model), models.tokens(known))


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_dtype_that_is_asked_for_is_that_of_the_weights(kind: str, drive: Path) -> None:
    known = models.checkpoint(kind, drive / "checkpoint").float()
    for _ in range(2):  # built, and opened again
        model = from_pretrained(drive / "checkpoint", offload_dir=drive / "store", dtype=torch.float32)
        assert model.dtype == torch.float32
        assert torch.equal(logits(model, kind), logits(known, kind))
        model.streaming.close()


def test_the_class_can_be_chosen(drive: Path) -> None:
    import transformers

    models.checkpoint("llama", drive / "checkpoint")
    known = transformers.AutoModel.from_pretrained(drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", offload_dir=drive / "store", model_class=transformers.AutoModel)
    inputs = models.prompts()
    assert torch.equal(model(**inputs).last_hidden_state, known(**inputs).last_hidden_state)


def test_quantised_weights_are_near_what_they_were(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", offload_dir=drive / "store", quantize="int8")
    expected, found = logits(known, "llama").float(), logits(model, "llama").float()
    error = (expected - found).norm() / expected.norm()
    assert 0 < error < 0.02


@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_keys_and_values_can_be_offloaded_too(where: str, drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", offload_dir=drive / "store", kv_offload=where)
    for _ in range(2):
        assert torch.equal(models.tokens(model), models.tokens(known))


def test_the_store_of_another_checkpoint_is_refused(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    models.checkpoint("gpt2", drive / "other")
    from_pretrained(drive / "checkpoint", offload_dir=drive / "store").streaming.close()
    with pytest.raises(ValueError, match="another checkpoint"):
        from_pretrained(drive / "other", offload_dir=drive / "store")


def test_the_store_of_an_older_version_of_the_checkpoint_is_refused(drive: Path) -> None:
    known = models.checkpoint("llama", drive / "checkpoint")
    from_pretrained(drive / "checkpoint", offload_dir=drive / "store").streaming.close()
    with torch.no_grad():
        known.model.norm.weight.mul_(2)
    known.save_pretrained(drive / "checkpoint")
    with pytest.raises(ValueError, match=r"another checkpoint.*model\.safetensors"):
        from_pretrained(drive / "checkpoint", offload_dir=drive / "store")


def test_a_checkpoint_that_is_quantised_already_is_refused(drive: Path) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    config = drive / "checkpoint" / "config.json"
    config.write_text(config.read_text().replace("{", '{"quantization_config": {"quant_method": "gptq", "bits": 4},', 1))
    with pytest.raises(ValueError, match="gptq"):
        from_pretrained(drive / "checkpoint", offload_dir=drive / "store")
    assert not (drive / "store").exists()


@pytest.mark.parametrize("missing", ["transformers", "accelerate"])
def test_what_is_not_installed_is_named(missing: str, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"pip install 'deepnvme\[transformers\]'"):
        from_pretrained(drive, offload_dir=drive / "store")


def test_a_checkpoint_that_is_not_there_leaves_nothing(drive: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        from_pretrained(drive / "nowhere", offload_dir=drive / "store")
    assert list(drive.iterdir()) == []


def test_wrong_options_are_named(drive: Path) -> None:
    with pytest.raises(ValueError, match="kv_offload must be None, 'cpu' or 'nvme', got 'disk'"):
        from_pretrained(drive, offload_dir=drive / "store", kv_offload="disk")
    with pytest.raises(TypeError, match="device_map"):
        from_pretrained(drive, offload_dir=drive / "store", device_map="auto")
