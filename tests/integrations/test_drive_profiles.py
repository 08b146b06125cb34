"""Models that other libraries load are streamed with the settings of their drive, or those that they are given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from deepnvme import AioConfig
from deepnvme.integrations import accelerate as integration
from deepnvme.streaming import from_pretrained

from ..support.drive_profiles import engine_settings, engines_made, store_profile
from . import models
from .sglang_stand_in import forget_integration, install

pytestmark = pytest.mark.usefixtures("configuration")

TUNED = AioConfig(block_size=65536, queue_depth=3, intra_op_parallelism=2)
GIVEN = AioConfig(block_size=131072, queue_depth=5, intra_op_parallelism=3)
IN_FLIGHT = 32 << 20
"""Most bytes that a worker of an open store reads at a time, unless it was given settings."""


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget_integration()
    install(monkeypatch)
    yield
    forget_integration()


def load_streamed(place: Path, config: AioConfig | None) -> None:
    for _ in range(2):  # with a new store, and with the one that is there
        model = from_pretrained(place / "checkpoint", path=place / "store", kv_offload="nvme", aio_config=config)
        models.tokens(model)
        model.streaming.close()


def load_offloaded(place: Path, config: AioConfig | None) -> None:
    integration.enable(aio_config=config)
    try:
        for _ in range(2):
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                place / "checkpoint", device_map={"": "disk"}, offload_folder=place / "folder"
            )
            model.streaming.close()
    finally:
        integration.disable()


def load_into_sglang(place: Path, config: AioConfig | None) -> None:
    from deepnvme.integrations.sglang import enable

    for reuse in (False, True):
        enable(place, reuse=reuse, aio_config=config)
        ours = sys.modules["sglang.srt.utils.offloader"].create_offloader()  # type: ignore[attr-defined]
        ours.wrap_modules(iter(transformers.AutoModelForCausalLM.from_pretrained(place / "checkpoint").model.layers))
        ours.post_init()
        ours.close()


LOADERS = [load_streamed, load_offloaded, load_into_sglang]


@pytest.mark.parametrize("chosen", ["profile", "config"])
@pytest.mark.parametrize("load", LOADERS)
def test_engines_have_the_settings_of_the_drive_or_those_given(
    load: Callable[[Path, AioConfig | None], None], chosen: str, drive: Path
) -> None:
    models.checkpoint("llama", drive / "checkpoint")
    store_profile(drive, TUNED)
    with engines_made() as made:
        load(drive, GIVEN if chosen == "config" else None)
    expected = {"profile": TUNED, "config": GIVEN}[chosen]
    # One builds the store, or writes keys and values; the others open a store.
    assert set(made) == {engine_settings(expected), engine_settings(expected, None if chosen == "config" else IN_FLIGHT)}
    assert len(made) >= 3
