"""Experts that are read on demand, on a device: what the model computes with all of them there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepnvme.streaming import offload_experts

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_logits_on_a_device(implementation: str, dtype: torch.dtype, device: torch.device, drive: Path) -> None:
    """In every bit, but for grouped_mm, which multiplies expert by expert and not by the device's kernel for groups."""
    config = transformers.OlmoeConfig(
        hidden_size=64, intermediate_size=48, num_hidden_layers=3, vocab_size=128, num_attention_heads=2, num_experts=8,
        num_experts_per_tok=2, eos_token_id=None, dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.OlmoeForCausalLM._from_config(config).save_pretrained(drive)
    memory, offloaded = (
        transformers.OlmoeForCausalLM.from_pretrained(drive, dtype=dtype, experts_implementation=implementation).to(device)
        for _ in range(2)
    )
    ids = torch.randint(0, 128, (2, 20), device=device)
    with offload_experts(offloaded, drive, memory_budget=200_000) as experts, torch.inference_mode():
        for _ in range(3):
            found, expected = offloaded(ids).logits, memory(ids).logits
            if implementation == "grouped_mm":
                torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
            else:
                assert torch.equal(found, expected)
        assert experts.report().bytes_read > 0
