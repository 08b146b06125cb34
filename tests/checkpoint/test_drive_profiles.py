"""Checkpoints are written and read with the settings of their drive's profile, or with those given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp

import deepnvme
import deepnvme.checkpoint
from deepnvme import AioConfig, Engine, safetensors
from deepnvme.checkpoint import file_io
from deepnvme.drives.mounts import drive_of
from deepnvme.drives.profiles import store_profile

from ..support.torch_versions import ALONE

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

NBYTES = 4 << 20
PROFILE = AioConfig(block_size=64 << 10, queue_depth=5, intra_op_parallelism=2)
GIVEN = AioConfig(block_size=128 << 10, queue_depth=7, intra_op_parallelism=1)


def tensors() -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(NBYTES // 8).view(-1, 1024)}


def model() -> torch.nn.Module:
    return torch.nn.Linear(1024, 1024, bias=False)


def settings_of(engine: Engine) -> tuple[int, int, int]:
    return engine.block_size, engine.in_flight_bytes // engine.block_size, engine.num_threads


def settings_in(config: AioConfig) -> tuple[int, int, int]:
    return config.block_size, config.queue_depth, config.intra_op_parallelism


@pytest.fixture
def profile(drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drive's profile, stored."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    store_profile(drive_of(drive), PROFILE)


class Uses(NamedTuple):
    """What engines have done meanwhile."""

    settings: set[tuple[int, int, int]]
    """Of the engines that have opened files."""
    nbytes: int
    """Transferred by them."""
    lookups: int
    """How often a drive was looked up."""


@contextlib.contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Uses]]:
    """Gives a function that returns the uses of engines so far."""
    engines: dict[Engine, int] = {}
    lookups: list[object] = []
    whole_open, whole_look = Engine.open, file_io.settings_for

    def transferred(engine: Engine) -> int:
        return engine.stats().bytes_read + engine.stats().bytes_written

    def opened(self: Engine, *arguments: Any, **more: Any) -> Any:
        engines.setdefault(self, transferred(self))
        return whole_open(self, *arguments, **more)

    def looked_up(*arguments: Any) -> AioConfig:
        lookups.append(arguments)
        return whole_look(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "open", opened)
        patched.setattr(file_io, "settings_for", looked_up)
        yield lambda: Uses(
            {settings_of(engine) for engine in engines},
            sum(transferred(engine) - before for engine, before in engines.items()),
            len(lookups),
        )


# -- entry points ------------------------------------------------------------------------------------------------------


def saved(directory: Path) -> None:
    deepnvme.save(tensors(), directory / "file.pt", checksum=True)


def saved_safetensors(directory: Path) -> None:
    safetensors.save_file({"weight": model().weight.detach()}, directory / "file.safetensors")


def distributed(directory: Path) -> None:
    dcp.save(tensors(), storage_writer=deepnvme.NVMeWriter(directory), **ALONE)


def save_by_manager(directory: Path, **config: Any) -> None:
    deepnvme.CheckpointManager(directory, **config).save(1, tensors())


USES: dict[str, tuple[Callable[[Path], None] | None, Callable[..., Any]]] = {
    "save": (None, lambda at, **config: deepnvme.save(tensors(), at / "file.pt", **config)),
    "load": (saved, lambda at, **config: deepnvme.load(at / "file.pt", **config)),
    "load of safetensors": (saved_safetensors, lambda at, **config: deepnvme.load(at / "file.safetensors", **config)),
    "async_save": (None, lambda at, **config: deepnvme.async_save(tensors(), at / "file.pt", **config).result()),
    "manager": (None, save_by_manager),
    "manager, load": (save_by_manager, lambda at, **config: deepnvme.CheckpointManager(at, **config).load()),
    "verify": (saved, lambda at, **config: deepnvme.checkpoint.verify(at / "file.pt", **config)),
    "save_file": (None, lambda at, **config: safetensors.save_file(tensors(), at / "file", **config)),
    "NVMeWriter": (
        None,
        lambda at, **config: dcp.save(tensors(), storage_writer=deepnvme.NVMeWriter(at, **config), **ALONE),
    ),
    "NVMeReader": (
        distributed,
        lambda at, **config: dcp.load(tensors(), storage_reader=deepnvme.NVMeReader(at, **config), **ALONE),
    ),
    "checkpoint engine": (
        None,
        lambda at, **config: deepnvme.checkpoint.NVMeCheckpointEngine(**config).save(tensors(), at / "file.pt"),
    ),
}


@pytest.fixture(params=USES)
def use(request: pytest.FixtureRequest, drive: Path) -> Callable[..., Any]:
    """Each way to write or read a checkpoint of NBYTES in turn."""
    prepare, act = USES[request.param]
    if prepare is not None:
        prepare(drive)
    return lambda **config: act(drive, **config)


@pytest.mark.parametrize("given", [{}, {"aio_config": GIVEN}])
def test_the_profile_is_used_unless_settings_are_given(
    use: Callable[..., Any], profile: None, monkeypatch: pytest.MonkeyPatch, given: dict[str, AioConfig]
) -> None:
    with watched(monkeypatch) as uses:
        use(**given)
        assert uses().settings == {settings_in(given.get("aio_config", PROFILE))}
        assert uses().nbytes >= NBYTES
        assert uses().lookups <= 2


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [deepnvme.save, deepnvme.async_save, safetensors.save_file])
def test_anything_but_settings_is_refused_before_a_file_is_created(drive: Path, save: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="config must be an AioConfig, got dict"):
        save(tensors(), drive / "file", aio_config={"queue_depth": 3})
    assert list(drive.iterdir()) == []


# -- shared engines ----------------------------------------------------------------------------------------------------


def test_files_with_the_same_settings_share_an_engine(drive: Path, profile: None) -> None:
    engine = file_io.shared_engine(drive / "one")
    assert file_io.shared_engine(drive / "missing" / "another") is engine
    assert file_io.shared_engine(drive, GIVEN) is not engine
    assert file_io.shared_engine(drive, GIVEN) is file_io.shared_engine(drive / "one", AioConfig(**GIVEN.model_dump()))
