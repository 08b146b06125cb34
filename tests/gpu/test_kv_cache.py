"""transformers' generation on a device, with its keys and values on a drive or in pinned memory, against its own cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("deepnvme.streaming.kv.cache", exc_type=ImportError)  # an older transformers: the reason says which is needed

from deepnvme.streaming import OffloadedCache  # noqa: E402
from deepnvme.streaming.kv import layer as kv_layer  # noqa: E402

from ..support.decoders import decoder, generated  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few positions in each, so that short generation has many."""
    monkeypatch.setattr(kv_layer, "CHUNK_BYTES", 2048)


@pytest.fixture
def model(device: torch.device) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(decoder("Llama"), dtype=torch.float32).eval().to(device)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("memory_budget", [0, 1 << 30])
def test_the_same_tokens(memory_budget: int, beams: int, prefetch: int, model: Any, device: torch.device, drive: Path) -> None:
    ids = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(1)).to(device)
    wanted = generated(model, ids, num_beams=beams)
    with OffloadedCache(model.config, drive, prefetch=prefetch, memory_budget=memory_budget) as cache:
        assert torch.equal(generated(model, ids, cache, num_beams=beams), wanted)
        assert cache.layers[0].keys.device == device
