"""Tuning real folders: what comes out, what is labelled, and what is left behind."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from deepnvme.drives.aio_config import AioConfig
from deepnvme.tools.tune import transfers
from deepnvme.tools.tune.bench import TrialBench
from deepnvme.tools.tune.folder import NotMeasurable
from deepnvme.tools.tune.tuner import Order, tune

from ...support.disks import MIB, Disk

SETTINGS = tuple(AioConfig(block_size=256 << 10, queue_depth=depth) for depth in (1, 4, 16))


def order(*folders: Path, **changes: Any) -> Order:
    return Order(folders, **{"io_size": 4 * MIB, "settings": SETTINGS, "seconds": 0.3, **changes})


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_failing_transfer_is_passed_on_and_leaves_no_file(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "tensor")

    monkeypatch.setattr(TrialBench, "move", fail)
    with pytest.raises(OSError, match="Input/output error"):
        tune(order(drive))
    assert not [*drive.iterdir()]


IMPOSSIBLE = AioConfig(queue_depth=4096, intra_op_parallelism=200)


@pytest.fixture
def _few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that is too small for one setting."""
    make_handle = transfers.make_handle

    def make(setting: AioConfig) -> Any:
        if setting == IMPOSSIBLE:
            raise OSError("out of events")
        return make_handle(setting)

    monkeypatch.setattr(transfers, "make_handle", make)


@pytest.mark.usefixtures("_few_events")
def test_a_setting_that_no_handle_can_be_made_with_is_left_out_and_said_why(drive: Path) -> None:
    tuning = tune(order(drive, settings=(*SETTINGS, IMPOSSIBLE)))
    assert tuning.refused == {str(IMPOSSIBLE): "out of events"}
    assert {each.setting for each in tuning.chosen.results} == set(SETTINGS)


@pytest.mark.usefixtures("_few_events")
def test_where_no_setting_can_be_used_that_is_said_and_no_file_left(drive: Path) -> None:
    with pytest.raises(NotMeasurable, match="no setting can be used here: out of events"):
        tune(order(drive, settings=(IMPOSSIBLE,)))
    assert not [*drive.iterdir()]


@pytest.mark.root
def test_folders_of_one_disk_must_fit_together(small_disk: Disk) -> None:
    folders = [small_disk / "a", small_disk / "b"]
    for folder in folders:
        folder.mkdir()
    with pytest.raises(NotMeasurable, match=f"{40 * MIB} are needed"):
        tune(order(*folders, io_size=20 * MIB))
    assert not any([*folder.iterdir()] for folder in folders)


# -- results -----------------------------------------------------------------------------------------------------------


def test_every_setting_has_sound_figures_both_ways(drive: Path) -> None:
    tuning = tune(order(drive))
    assert len(tuning.searches) == 1
    assert tuning.chosen.best in tuning.chosen.results
    assert {each.setting for each in tuning.chosen.results} == set(SETTINGS)
    for result in tuning.chosen.results:
        assert result.backend in ("io_uring", "libaio", "threads")
        for figures in (result.read, result.write):
            assert figures is not None
            assert figures.gb_per_second > 0
            assert figures.cpu_seconds_per_gb >= 0
            assert 0 < figures.latency_p99 < 60
    assert 4 * MIB * (1 + 2 * len(SETTINGS)) <= tuning.bytes_written <= order(drive).write_limit == tuning.write_limit
    assert all(each.difference is not None for each in tuning.chosen.results if each is not tuning.chosen.best)
    assert not [*drive.iterdir()]


def test_reads_alone_write_only_the_file_that_is_read(drive: Path) -> None:
    assert tune(order(drive, write=False)).bytes_written == 4 * MIB


@pytest.mark.parametrize("io_size", [1, 3 * MIB + 5])
def test_any_size_can_be_measured(drive: Path, io_size: int) -> None:
    assert tune(order(drive, io_size=io_size, seconds=0.0)).chosen.best.read is not None
