"""Small models of transformers with random weights, one of each kind that is streamed differently."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of packages that it imports
    import transformers

SIZES: dict[str, Any] = {"vocab_size": 320, "dtype": "bfloat16"}
LLAMA_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, **SIZES
}  # fmt: skip

KINDS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(num_hidden_layers=8, **LLAMA_SIZES),
    "llama-tied": lambda: transformers.LlamaConfig(num_hidden_layers=4, tie_word_embeddings=True, **LLAMA_SIZES),
    # Its experts are one tensor each in the file and one tensor together in the module.
    "mixtral": lambda: transformers.MixtralConfig(num_hidden_layers=3, num_local_experts=4, **LLAMA_SIZES),
    # Its routers have buffers that are weights, in float32 whatever the model is in.
    "deepseek": lambda: transformers.DeepseekV3Config(
        num_hidden_layers=3, first_k_dense_replace=1, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2,
        n_group=2, topk_group=1, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
        **{**LLAMA_SIZES, "num_key_value_heads": 4},
    ),
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=4, n_head=4, **SIZES),
    "t5": lambda: transformers.T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, decoder_start_token_id=0, **SIZES
    ),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=64, word_embed_proj_dim=64, ffn_dim=128, num_hidden_layers=4, num_attention_heads=4, **SIZES
    ),
}  # fmt: skip


def qwen4_exp(**more: Any) -> transformers.PretrainedConfig:
    """A mixture in which two layers have tables of n-grams, each of which is several tensors in the files."""
    small: dict[str, Any] = {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2, "num_experts": 4,
        "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 64, "indexer_compress_ratio": 4, "ple_layer_ids": [1, 3], "ple_embed_dim": 64, "heads_per_ngram": 4,
        "ngram_vocab_size_base": 500, "split_ngram_parts": 16, "make_ngram_vocab_size_divisible_by": 16, "eos_token_id": 2,
    }  # fmt: skip
    return transformers.Qwen4ExpTextConfig(**{**small, **SIZES, **more})


SOME_KINDS = ["llama", "deepseek", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mixtral", "t5"))]
"""For tests beside one that has all kinds."""


def checkpoint(kind: str, directory: Path, **how: Any) -> transformers.PreTrainedModel:
    """A checkpoint of random weights in ``directory``; return what transformers makes of it, in memory."""
    config = KINDS[kind]()
    torch.manual_seed(3)
    model_class = {"t5": transformers.AutoModelForSeq2SeqLM}.get(kind, transformers.AutoModelForCausalLM)
    model = model_class.from_config(config)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = torch.rand(module.e_score_correction_bias.shape)
    model.save_pretrained(directory, **how)
    return model_class.from_pretrained(directory)


def prompts(rows: int = 3, length: int = 7) -> dict[str, torch.Tensor]:
    """Padded on the left, as for generating."""
    own = torch.Generator().manual_seed(5)  # torch's is shared: another thread could draw, or seed it, in between
    ids = torch.randint(3, SIZES["vocab_size"], (rows, length), generator=own)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, :row] = 0
    return {"input_ids": ids, "attention_mask": mask}


def tokens(model: transformers.PreTrainedModel, **options: Any) -> torch.Tensor:
    """Six new ones a row, whatever they are."""
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(**prompts(), **options)


def logits(model: torch.nn.Module, kind: str = "llama") -> torch.Tensor:
    """Return the logits of :func:`prompts`; of an encoder-decoder, for their first tokens."""
    inputs = prompts()
    if kind == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :3]
    with torch.no_grad():
        return model(**inputs).logits
