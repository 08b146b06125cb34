"""A layer's positions: those that attention sees, those that may go, and where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .states import states

transformers = pytest.importorskip("transformers", reason="needs transformers")

from deepnvme.streaming.kv import layer as kv_layer  # noqa: E402
from deepnvme.streaming.kv.drive import KVChunkStore  # noqa: E402
from deepnvme.streaming.kv.layer import OffloadedLayer  # noqa: E402


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight positions."""
    monkeypatch.setattr(kv_layer, "CHUNK_BYTES", 2048)


@pytest.fixture
def there(drive: Path) -> Iterator[KVChunkStore]:
    there = KVChunkStore(drive, layers=1, prefetch=0)
    yield there
    there.close()


@pytest.fixture
def windowed(there: KVChunkStore) -> OffloadedLayer:
    return OffloadedLayer(there, 0, window=20, streamed=True)


def test_a_window_that_was_left_cannot_be_cropped(windowed: OffloadedLayer) -> None:
    windowed.update(*states(positions=40))
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        windowed.crop(-2)
    with pytest.raises(ValueError, match="negative"):
        windowed.crop(2)
    windowed.activate_past_recording()
    windowed.update(*states(positions=5))
    windowed.crop(-5)
    assert windowed.get_seq_length() == 40


def test_what_has_left_a_window_and_may_be_cropped_back_into_it_is_kept(windowed: OffloadedLayer) -> None:
    reference = transformers.cache_utils.DynamicSlidingWindowLayer(sliding_window=20)
    for each in (windowed, reference):
        each.activate_past_recording()
    for seed, (positions, removed) in enumerate([(90, 0), (1, 0), (30, 0), (1, -25), (1, 0)]):
        new = states(positions=positions, seed=seed)
        assert all(map(torch.equal, windowed.update(*new), reference.update(*new)))
        if removed:
            windowed.crop(removed)
            reference.crop(removed)


def test_what_leaves_a_window_leaves_the_drive(windowed: OffloadedLayer, there: KVChunkStore) -> None:
    for seed in range(200):
        windowed.update(*states(seed=seed))
    assert there.cache.bytes_written > 8 * sum(chunk.nbytes for chunk in there.chunks[0]) > 0


@pytest.mark.parametrize("window", [None, 20])
def test_a_mask_is_as_long_as_what_attention_sees(there: KVChunkStore, window: int | None) -> None:
    layer = OffloadedLayer(there, 0, window, streamed=True)
    for positions in (30, 1, 7):
        length, offset = layer.get_mask_sizes(positions)
        keys, _ = layer.update(*states(positions=positions))
        assert keys.shape[2] == length
        assert offset + length == layer.get_seq_length()


def test_a_layer_that_leaves_memory_has_its_newest_positions_there(there: KVChunkStore) -> None:
    layer = OffloadedLayer(there, 0)
    layer.update(*states(positions=100))
    assert not there.chunks[0]
    before = layer.resident_bytes
    layer.stream()
    assert there.chunks[0]
    assert layer.resident_bytes < before
    assert torch.equal(layer.keys, states(positions=100)[0])
