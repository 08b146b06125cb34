"""Architectures that docs/mixtures.md and docs/streaming.md name: streamed in place, they say what they say in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from deepnvme.streaming import from_pretrained

from .models import LLAMA_SIZES, SIZES, tokens

_FEW: dict[str, Any] = {"num_hidden_layers": 3, **LLAMA_SIZES}
_TOP2: dict[str, Any] = {"num_experts_per_tok": 2, **_FEW}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16
}  # fmt: skip
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16
}  # fmt: skip
_ENCODER: dict[str, Any] = {
    "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0, **SIZES
}  # fmt: skip

DENSE: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen3": lambda: transformers.Qwen3Config(head_dim=16, **_FEW),
    "gemma3": lambda: transformers.Gemma3TextConfig(head_dim=16, **_FEW),
    "phi3": lambda: transformers.Phi3Config(pad_token_id=0, **_FEW),
    "llama4": lambda: transformers.Llama4TextConfig(
        num_local_experts=4, intermediate_size_mlp=128, head_dim=16, interleave_moe_layer_step=1, **_FEW
    ),
}
"""Models that are read layer by layer. The last one is a mixture that computes all its experts."""

MIXTURES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen3-next": lambda: transformers.Qwen3NextConfig(
        num_experts=8, moe_intermediate_size=32, shared_expert_intermediate_size=32, head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"], **_LINEAR, **_TOP2,
    ),
    "granite": lambda: transformers.GraniteMoeConfig(num_local_experts=4, **_TOP2),
    "qwen2": lambda: transformers.Qwen2MoeConfig(
        num_experts=8, moe_intermediate_size=48, shared_expert_intermediate_size=32, **_TOP2
    ),
    "deepseek-v2": lambda: transformers.DeepseekV2Config(
        first_k_dense_replace=1, moe_intermediate_size=32, n_routed_experts=8, n_group=1, topk_group=1,
        **_LATENT, **{**_TOP2, "num_key_value_heads": 4},
    ),
    "glm4": lambda: transformers.Glm4MoeConfig(
        n_routed_experts=8, moe_intermediate_size=32, n_group=1, topk_group=1, first_k_dense_replace=1, head_dim=16, **_TOP2
    ),
    "granite-hybrid": lambda: transformers.GraniteMoeHybridConfig(
        num_local_experts=4, layer_types=["attention"] * 3, shared_intermediate_size=32, **_TOP2
    ),
    "phi": lambda: transformers.PhimoeConfig(num_local_experts=4, **_TOP2),
    "ernie": lambda: transformers.Ernie4_5_MoeConfig(
        moe_num_experts=8, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=1, moe_layer_start_index=1, **_FEW
    ),
    "hunyuan": lambda: transformers.HunYuanMoEV1Config(num_experts=4, moe_topk=2, head_dim=16, **_FEW),
    "minimax": lambda: transformers.MiniMaxConfig(
        num_local_experts=4, layer_types=["full_attention", "linear_attention", "full_attention"], **_TOP2
    ),
    "lfm2": lambda: transformers.Lfm2MoeConfig(
        num_experts=4, moe_intermediate_size=32, num_dense_layers=1, layer_types=["full_attention", "conv", "full_attention"],
        **_TOP2,
    ),
    "jamba": lambda: transformers.JambaConfig(
        num_experts=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8,
        mamba_dt_rank=8, **_TOP2,
    ),
}  # fmt: skip
"""Mixtures beside those of test_experts_on_demand.py."""


def slow_beyond(kinds: Any, first: int) -> list[Any]:
    return [kind if number < first else pytest.param(kind, marks=pytest.mark.slow) for number, kind in enumerate(kinds)]


def saved(config: transformers.PretrainedConfig, folder: Path) -> Any:
    """Write a checkpoint of random weights in several files, and return the model in memory."""
    torch.manual_seed(3)
    encoder = getattr(config, "is_encoder_decoder", False)
    kind = transformers.AutoModelForSeq2SeqLM if encoder else transformers.AutoModelForCausalLM
    kind.from_config(config).save_pretrained(folder, max_shard_size="100KB")
    return kind.from_pretrained(folder)


def check_same(model: Any, known: Any) -> None:
    """Check that two models generate the same tokens of a padded batch: the likeliest, sampled ones, and by beams."""
    for options in ({}, {"do_sample": True, "temperature": 2.0}, {"num_beams": 2}):
        found = []
        for each in (model, known):
            torch.manual_seed(7)
            found.append(tokens(each, **options))
        assert torch.equal(*found), options


@pytest.mark.parametrize("kind", slow_beyond(DENSE, 2))
def test_models_without_experts_on_demand(kind: str, drive: Path) -> None:
    known = saved(DENSE[kind](), drive)
    model = from_pretrained(drive)
    with model.streaming:
        check_same(model, known)
    with pytest.raises(ValueError, match="has no experts that can be read on demand"):
        from_pretrained(drive, experts="on-demand")


@pytest.mark.filterwarnings("ignore:.*falling back")
@pytest.mark.parametrize("kind", slow_beyond(MIXTURES, 2))
def test_mixtures(kind: str, drive: Path) -> None:
    known = saved(MIXTURES[kind](), drive)
    model = from_pretrained(drive, experts="on-demand", memory_budget="350KB")
    with model.streaming as streaming:
        check_same(model, known)
        assert streaming.experts is not None
        assert streaming.experts.report().bytes_read > 0


def test_routers_that_convert_their_own_weights_need_float32(drive: Path) -> None:
    config = transformers.SwitchTransformersConfig(
        num_experts=4, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, **_ENCODER
    )
    saved(config, drive)
    for path in (None, drive / "store"):
        with pytest.raises(ValueError, match=r"routers of SwitchTransformers convert .* give dtype='float32'"):
            from_pretrained(drive, path=path)
    assert not (drive / "store").exists()
    model = from_pretrained(drive, dtype="float32")
    with model.streaming:
        check_same(model, transformers.AutoModelForSeq2SeqLM.from_pretrained(drive, dtype="float32"))


def test_experts_that_transformers_transposes_need_a_store(drive: Path) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 2, "out_hidden_size": 64}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    text = {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16, "rope_scaling": rope, **_TOP2}
    config = transformers.Qwen3VLMoeConfig(
        vision_config={**vision, "deepstack_visual_indexes": [0]}, text_config=text, dtype="bfloat16"
    )
    torch.manual_seed(3)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(drive / "checkpoint")
    with pytest.raises(ValueError, match=r"rearranges '.*experts\.down_proj'.*Transpose.*give path="):
        from_pretrained(drive / "checkpoint")
    model = from_pretrained(drive / "checkpoint", path=drive / "store", progress=False)
    with model.streaming:
        check_same(model, transformers.AutoModelForImageTextToText.from_pretrained(drive / "checkpoint"))
