"""transformers' models whose tables are read by rows say what they say in memory: per-layer and n-gram embeddings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.streaming import from_pretrained

from .models import LLAMA_SIZES, prompts, qwen4_exp, tokens, transformers

Kind = tuple[Callable[[], transformers.PretrainedConfig], list[str]]
LEAST = 16 << 10
"""Bytes. The embeddings below have more."""
MODELS: dict[str, Kind] = {
    "llama": (
        lambda: transformers.LlamaConfig(num_hidden_layers=3, **LLAMA_SIZES),
        ["model.embed_tokens.weight"],
    ),
    # The output layer needs the whole weight.
    "llama-tied": (
        lambda: transformers.LlamaConfig(num_hidden_layers=3, tie_word_embeddings=True, **LLAMA_SIZES),
        [],
    ),
    # Its embeddings scale their rows. Ids beyond the per-layer table are looked up in the other one only.
    "gemma3n": (
        lambda: transformers.Gemma3nTextConfig(
            vocab_size_per_layer_input=300, hidden_size_per_layer_input=16, num_hidden_layers=4, head_dim=16,
            num_kv_shared_layers=2, laurel_rank=8, altup_num_inputs=2, pad_token_id=0,
            layer_types=["sliding_attention", "full_attention"] * 2, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
            **LLAMA_SIZES,
        ),
        ["model.embed_tokens_per_layer.weight"],
    ),
}  # fmt: skip


if hasattr(transformers, "Qwen4ExpTextConfig"):
    names = [f"model.layers.{layer}.ple.ple_embedding.ngram_embedding.weight" for layer in (0, 2)]
    MODELS["qwen4_exp"] = (qwen4_exp, ["model.embed_tokens.weight", *names])


@pytest.mark.parametrize("dtype", ["auto", pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_tokens_are_those_of_the_model_in_memory(kind: str, dtype: Any, drive: Path) -> None:
    config, tables = MODELS[kind]
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(config())
    made.save_pretrained(drive / "checkpoint", max_shard_size="200KB")  # so a table of n-grams lies in several files
    assert len(list((drive / "checkpoint").glob("*.safetensors"))) > 1
    known = type(made).from_pretrained(drive / "checkpoint", dtype=dtype)
    model = from_pretrained(drive / "checkpoint", dtype=dtype, min_table_bytes=LEAST, memory_budget="1MB")
    with model.streaming as streaming:
        assert list(streaming.tables) == tables
        with torch.inference_mode():
            for inputs in (prompts(), {"input_ids": torch.randint(3, 320, (1, 200))}):
                assert torch.equal(model(**inputs).logits, known(**inputs).logits)
        assert torch.equal(tokens(model), tokens(known))
        assert torch.equal(tokens(model, num_beams=3), tokens(known, num_beams=3))
        for table in streaming.tables.values():
            assert table.stats().rows_read > 0
        streaming.close(restore=True)
    assert torch.equal(tokens(model), tokens(known))


@pytest.mark.skipif("qwen4_exp" not in MODELS, reason="this transformers has no qwen4_exp")
def test_a_mixture_with_tables_reads_its_experts_on_demand(drive: Path) -> None:
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(qwen4_exp())
    made.save_pretrained(drive / "checkpoint")
    known = type(made).from_pretrained(drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", experts="on-demand", min_table_bytes=LEAST)
    with model.streaming as streaming:
        assert streaming.experts is not None
        assert list(streaming.tables) == MODELS["qwen4_exp"][1]
        assert torch.equal(tokens(model), tokens(known))
        assert streaming.experts.report().bytes_read
