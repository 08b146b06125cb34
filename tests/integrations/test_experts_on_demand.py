"""Mixtures of transformers whose experts are read on demand: the same logits and tokens as in memory, in every bit."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepnvme.streaming import from_pretrained, offload_experts

from ..support.engines import failing
from ..support.interrupts import ctrl_c_in_a_wait_for
from .models import LLAMA_SIZES, prompts, tokens, transformers

_FEW: dict[str, Any] = {"num_hidden_layers": 3, "num_experts_per_tok": 2, **LLAMA_SIZES}
MIXTURES: dict[str, transformers.PretrainedConfig] = {
    "mixtral": transformers.MixtralConfig(num_local_experts=4, **_FEW),
    "qwen3": transformers.Qwen3MoeConfig(moe_intermediate_size=48, num_experts=8, head_dim=16, **_FEW),
    "olmoe": transformers.OlmoeConfig(num_experts=8, eos_token_id=None, **{**_FEW, "intermediate_size": 48}),
    "deepseek": transformers.DeepseekV3Config(
        first_k_dense_replace=1, moe_intermediate_size=32, n_routed_experts=8, n_group=2, topk_group=1, q_lora_rank=32,
        kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, **{**_FEW, "num_key_value_heads": 4},
    ),
    # Packed in the file, transposed, gate and up interleaved, with biases.
    "gpt-oss": transformers.GptOssConfig(
        num_local_experts=8, head_dim=16, layer_types=["full_attention"] * 3, **{**_FEW, "intermediate_size": 48}
    ),
}  # fmt: skip
BUDGET = 300_000
"""Bytes: a part of the experts."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for kind, config in MIXTURES.items():
        torch.manual_seed(3)
        folders[kind] = tmp_path_factory.mktemp(kind)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folders[kind])
    return folders


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_logits_and_tokens_are_those_of_the_model_in_memory(
    checkpoints: dict[str, Path], kind: str, implementation: str, dtype: torch.dtype
) -> None:
    options = {"experts_implementation": implementation, "dtype": dtype}
    memory, offloaded = (load(checkpoints[kind], **options) for _ in range(2))
    with offload_experts(offloaded, checkpoints[kind], memory_budget=BUDGET) as experts, torch.inference_mode():
        assert torch.equal(offloaded(**prompts()).logits, memory(**prompts()).logits)  # prefill of a padded batch
        assert torch.equal(tokens(offloaded), tokens(memory))  # decode with a cache
        sampled = []
        for model in (memory, offloaded):
            torch.manual_seed(7)
            sampled.append(tokens(model, do_sample=True, temperature=2.0))
        assert torch.equal(*sampled)
        report = experts.report()
        assert report.bytes_read
        assert report.hit_rate
        assert len(report.layers) == (2 if kind == "deepseek" else 3)


class Alignments(TorchDispatchMode):
    """Notes how the second operand of each matrix product is aligned."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in ("aten.mm.default", "aten.linear.default"):
            self.found.append(args[1].data_ptr() % 64)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "gpt-oss"])
def test_weights_are_aligned_as_in_memory(checkpoints: dict[str, Path], kind: str) -> None:
    """Products of few rows have other last bits otherwise. Merged weights are tensors; others, views of mapped files."""
    memory, offloaded = (load(checkpoints[kind], experts_implementation="eager") for _ in range(2))
    with offload_experts(offloaded, checkpoints[kind], memory_budget=BUDGET), torch.no_grad():
        with Alignments() as expected:
            memory(**prompts())
        with Alignments() as found:
            offloaded(**prompts())
    assert found.found == expected.found != []


def test_logits_are_the_same_where_torch_has_no_grouped_mm_for_processors(checkpoints: dict[str, Path]) -> None:
    """As torch 2.10 and older for weights that are not aligned, as mapped ones."""
    memory, offloaded = (load(checkpoints["qwen3"], experts_implementation="grouped_mm") for _ in range(2))
    with (
        mock.patch("transformers.integrations.moe.is_torch_less_or_equal", return_value=True),
        offload_experts(offloaded, checkpoints["qwen3"], memory_budget=BUDGET),
        torch.inference_mode(),
    ):
        assert torch.equal(offloaded(**prompts()).logits, memory(**prompts()).logits)


@pytest.mark.parametrize("budget", [0, 400_000])
@pytest.mark.parametrize("kind", MIXTURES)
def test_from_pretrained_reads_experts_on_demand_and_streams_the_rest(
    checkpoints: dict[str, Path], kind: str, budget: int
) -> None:
    memory = load(checkpoints[kind])
    model = from_pretrained(checkpoints[kind], memory_budget=budget)
    with model.streaming as streaming:
        assert torch.equal(tokens(model), tokens(memory))
        assert streaming.experts is not None
        assert streaming.experts.report().bytes_read
        streaming.close(restore=True)
    assert torch.equal(tokens(model), tokens(memory))


def test_experts_are_streamed_with_their_layers_if_all_fit_or_if_asked(checkpoints: dict[str, Path]) -> None:
    expected = tokens(load(checkpoints["qwen3"]))
    for options in ({"memory_budget": "1GB"}, {"experts": "streamed"}):
        model = from_pretrained(checkpoints["qwen3"], **options)
        with model.streaming as streaming:
            assert streaming.experts is None
            assert torch.equal(tokens(model), expected)


def test_what_experts_on_demand_need_is_told(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for options in ({"experts": "on-demand", "path": tmp_path / "store"}, {"experts": "maybe"}):
        with pytest.raises(ValueError, match=r"experts must be 'on-demand' \(without path\)"):
            from_pretrained(checkpoints["qwen3"], **options)


def test_what_fails_in_the_middle_of_generate_is_told_and_the_next_call_works(checkpoints: dict[str, Path]) -> None:
    model = load(checkpoints["olmoe"])
    expected = tokens(model)
    with offload_experts(model, checkpoints["olmoe"], memory_budget=BUDGET):
        assert torch.equal(tokens(model), expected)
        with failing("read", first=20, count=10**6):
            with pytest.raises(OSError, match=r"expert \d of 'model\.layers\.\d\.mlp\.experts' .* at offset") as raised:
                tokens(model)
            assert raised.value.errno == errno.EIO
        assert torch.equal(tokens(model), expected)
        with ctrl_c_in_a_wait_for("read"), pytest.raises(KeyboardInterrupt):
            tokens(model)
        assert torch.equal(tokens(model), expected)


def test_experts_that_transformers_would_rearrange_are_refused(checkpoints: dict[str, Path]) -> None:
    """As the files of Qwen3-VL have them: packed, but transposed."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    model = load(checkpoints["gpt-oss"])
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    mapping = [WeightConverter(name, name, operations=[Transpose(1, 2)]) for name in names]
    with (
        mock.patch.object(conversion_mapping, "get_model_conversion_mapping", return_value=mapping),
        pytest.raises(ValueError, match=r"rearranges '.*experts\.\w+_proj'.*Transpose"),
    ):
        offload_experts(model, checkpoints["gpt-oss"], memory_budget=BUDGET)
