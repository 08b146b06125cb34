"""Stores of weights and caches of keys and values take the settings of their drive, or those that they are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme import AioConfig
from deepnvme.checkpoint.weight_locations import weights_in
from deepnvme.safetensors import save_file
from deepnvme.streaming import WeightStore, stream

from ..support.disks import Disk
from ..support.drive_profiles import EngineSettings, default_for, engine_settings, engines_made, store_profile

pytestmark = pytest.mark.usefixtures("configuration")

TUNED = AioConfig(block_size=65536, queue_depth=3, intra_op_parallelism=2)
GIVEN = AioConfig(block_size=131072, queue_depth=5, intra_op_parallelism=3)
IN_FLIGHT = 32 << 20
"""Most bytes that a worker of an open store reads at a time, unless it was given settings."""


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def build(place: Path, config: AioConfig | None) -> None:
    WeightStore.build(layers(), place / "store", aio_config=config).close()


def open_built(place: Path, config: AioConfig | None) -> None:
    WeightStore.open(place / "built", aio_config=config).close()


def stream_in_place(place: Path, config: AioConfig | None) -> None:
    torch.save(layers().state_dict(), place / "model.pt")
    stream(layers(), place / "model.pt", aio_config=config).close()


def llama() -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 64}
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes))


def make_cache(place: Path, config: AioConfig | None) -> None:
    model = llama()
    from deepnvme.streaming import OffloadedCache

    OffloadedCache(model.config, place, aio_config=config).close()


def generate(place: Path, config: AioConfig | None) -> None:
    model = llama()
    from deepnvme.streaming import offload_kv

    offload_kv(model, place, aio_config=config)
    model.generate(torch.tensor([[3, 4]]), max_new_tokens=2, pad_token_id=0)


ENTRIES: list[tuple[Callable[[Path, AioConfig | None], None], list[int | None]]] = [
    (build, [None, IN_FLIGHT]),  # it is built, and opened
    (open_built, [IN_FLIGHT]),
    (stream_in_place, [IN_FLIGHT]),
    (make_cache, [None]),
    (generate, [None]),
]
"""What makes engines: for each of them, the most bytes that a worker of it has under way."""


@pytest.mark.parametrize("chosen", ["profile", "config"])
@pytest.mark.parametrize(("make", "limits"), ENTRIES, ids=[make.__name__ for make, _ in ENTRIES])
def test_engines_have_the_settings_of_the_drive_or_those_given(
    make: Callable[[Path, AioConfig | None], None],
    limits: list[int | None],
    chosen: str,
    drive: Path,
) -> None:
    WeightStore.build(layers(), drive / "built").close()
    store_profile(drive, TUNED)
    with engines_made() as made:
        make(drive, GIVEN if chosen == "config" else None)
    expected = {"profile": TUNED, "config": GIVEN}[chosen]
    assert made == [engine_settings(expected, None if chosen == "config" else limit) for limit in limits]


def test_an_open_store_has_32_mib_in_flight_for_each_worker_unless_it_was_given_settings(drive: Path) -> None:
    WeightStore.build(layers(), [drive / "a", drive / "b"]).close()
    deep = AioConfig(block_size=4 << 20, queue_depth=64)
    store_profile(drive, deep)
    with engines_made() as made:
        WeightStore.open([drive / "a", drive / "b"]).close()
        WeightStore.open([drive / "a", drive / "b"], aio_config=deep).close()
    assert made == [EngineSettings(4 << 20, 8, 1), EngineSettings(4 << 20, 64, 1)]


@pytest.mark.root
@pytest.mark.parametrize("located", [False, True], ids=["path", "places of weights"])
def test_a_build_takes_the_drive_of_the_checkpoint_into_account(located: bool, drive: Path, small_disk: Disk) -> None:
    checkpoint = small_disk.path / "model.safetensors"
    save_file(dict(layers().state_dict()), checkpoint)
    store_profile(small_disk.path, AioConfig(block_size=8 << 20, queue_depth=1))
    with engines_made() as made:
        WeightStore.build(weights_in(checkpoint) if located else checkpoint, drive / "store").close()
    assert [settings.block_size for settings in made] == [8 << 20, default_for(drive).block_size]  # built, opened


def test_what_is_no_settings_is_refused(drive: Path) -> None:
    for make, _ in ENTRIES:
        with pytest.raises(TypeError, match="AioConfig"):
            make(drive, {"block_size": 65536})  # type: ignore[arg-type]
