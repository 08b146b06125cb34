"""NVMeCheckpointEngine: what DeepSpeed calls, without DeepSpeed."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme import AioConfig
from deepnvme.checkpoint import CorruptCheckpoint, NVMeCheckpointEngine
from deepnvme.drives.mounts import drive_of
from deepnvme.drives.profiles import default_settings
from deepnvme.integrations.deepspeed.swap_tensor import AIO_DEFAULT_DICT

from ...support.distributed_states import assert_equal


@dataclass
class Info:
    tag: str
    save_dir: str
    save_latest: bool = True


class Kept:
    """Of a class that weights_only refuses."""


def test_errors_are_those_of_save_and_load(drive: Path) -> None:
    engine = NVMeCheckpointEngine()
    with pytest.raises(FileNotFoundError):
        engine.save({}, drive / "missing" / "file")
    engine.save({"t": torch.zeros(100_000)}, drive / "file")
    with (drive / "file").open("r+b") as file:
        file.truncate(50_000)
    with pytest.raises(CorruptCheckpoint) as caught:
        engine.load(drive / "file")
    assert (caught.value.errno, caught.value.filename) == (errno.EBADMSG, str(drive / "file"))
    with pytest.raises(FileExistsError):
        engine.makedirs(drive)


@pytest.mark.parametrize("fsync", [True, False])
def test_it_saves_what_torch_loads_and_loads_what_torch_saves(drive: Path, fsync: bool) -> None:
    engine = NVMeCheckpointEngine(None, fsync=fsync)
    info = Info("step1", str(drive))
    state = {"module": {"weight": torch.randn(300, 400)}, "step": 3, "args": Kept()}
    engine.create(info)
    engine.makedirs(drive / "step1", exist_ok=True)
    engine.save(state, str(drive / "step1" / "mp_rank_00_model_states.pt"))
    assert engine.commit(info) is True
    for found in (
        torch.load(drive / "step1" / "mp_rank_00_model_states.pt", weights_only=False),
        engine.load(str(drive / "step1" / "mp_rank_00_model_states.pt"), map_location="cpu"),
        engine.load(str(drive / "step1" / "mp_rank_00_model_states.pt"), map_location=lambda storage, location: storage),
    ):
        assert type(found.pop("args")) is Kept
        assert_equal(found, {"module": state["module"], "step": 3})
    torch.save(state, drive / "theirs")
    assert_equal(engine.load(drive / "theirs")["module"], state["module"])


def test_the_first_data_parallel_rank_writes_and_nothing_is_left_behind() -> None:
    engine = NVMeCheckpointEngine()
    assert [engine.is_data_parallel_writer(rank) for rank in range(3)] == [True, False, False]
    assert not engine.is_decoupled()
    assert engine.preserves_storage_sharing()
    assert engine.get_commit_info() is None
    engine.set_commit_info(Info("a", "b"))
    engine.cleanup()
    assert engine.commit(Info("a", "/gone")) is True


class DeepSpeedConfig:
    """As DeepSpeed's: of its JSON, and of the ``aio`` block with all keys, whether or not the JSON has it."""

    def __init__(self, **json: Any) -> None:
        self._param_dict = json
        self.aio_config = {**AIO_DEFAULT_DICT, **(json.get("aio") or {}), "thread_count": 1, "io_backend": "async_io"}
        self.aio_config.pop("backend", None)


@pytest.mark.parametrize(
    ("json", "config", "expected"),
    [
        ({}, None, None),
        ({"aio": None}, None, None),
        ({"aio": {"block_size": 65536}}, None, AioConfig(block_size=65536)),
        ({"aio": {"queue_depth": 3, "backend": "threads"}}, None, AioConfig(queue_depth=3, backend="threads")),
        ({"aio": {"queue_depth": 3}}, AioConfig(queue_depth=9), AioConfig(queue_depth=9)),
    ],
)
def test_an_aio_block_gives_the_settings_where_none_are_given(
    drive: Path, monkeypatch: pytest.MonkeyPatch, json: dict[str, Any], config: AioConfig | None, expected: AioConfig | None
) -> None:
    used: list[deepnvme.Engine] = []
    opened = deepnvme.Engine.open
    monkeypatch.setattr(deepnvme.Engine, "open", lambda self, *rest, **more: used.append(self) or opened(self, *rest, **more))
    engine = NVMeCheckpointEngine(DeepSpeedConfig(**json), aio_config=config)
    engine.save({"t": torch.ones(3)}, drive / "file")
    engine.load(drive / "file")
    wanted = expected or default_settings(drive_of(drive))
    for each in used:
        assert (each.block_size, each.queue_depth) == (wanted.block_size, wanted.queue_depth)
        assert wanted.backend in ("auto", each.backend)
    assert len(used) == 2


def test_an_invalid_aio_block_is_refused() -> None:
    with pytest.raises(ValueError, match="queue_depth"):
        NVMeCheckpointEngine(DeepSpeedConfig(aio={"queue_depth": 0}))
