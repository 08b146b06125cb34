"""Tuning real folders: what comes out, what is labelled, what is left behind, and what an interrupt keeps."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from deepnvme.drives.aio_config import AioConfig
from deepnvme.tools.tune import transfers, tuner
from deepnvme.tools.tune.bench import TrialBench
from deepnvme.tools.tune.halving import search
from deepnvme.tools.tune.tuner import Order, tune
from deepnvme.tools.tune.workspace import NotMeasurable

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
            raise NotMeasurable("out of events")
        return make_handle(setting)

    monkeypatch.setattr(transfers, "make_handle", make)


@pytest.mark.usefixtures("_few_events")
def test_a_setting_that_no_handle_can_be_made_with_is_left_out_and_said_why(drive: Path) -> None:
    tuning = tune(order(drive, settings=(*SETTINGS, IMPOSSIBLE)))
    assert tuning.refused == {"{'queue_depth': 4096, 'intra_op_parallelism': 200}": "out of events"}
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


# -- interrupts --------------------------------------------------------------------------------------------------------


def interrupt_moves(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    move, moves = TrialBench.move, iter(range(after))

    def interrupted(self: TrialBench, *arguments: Any) -> Any:
        if next(moves, None) is None:
            raise KeyboardInterrupt
        return move(self, *arguments)

    monkeypatch.setattr(TrialBench, "move", interrupted)


# Two of the warm-up, and six of three settings in each pass: in the middle of the first pass, of the second, between both
# directions.
@pytest.mark.parametrize("after", [4, 9, 16])
def test_an_interrupted_search_gives_what_was_measured(drive: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    interrupt_moves(monkeypatch, after)
    # A search that is given more time than a test has. A shorter one ends after two passes, the least, if these took most of its
    # time, as they may on a busy machine: then nothing is left to be interrupted.
    tuning = tune(order(drive, seconds=3600.0))
    assert not tuning.complete
    assert not tuning.chosen.complete
    assert len(tuning.chosen.results) == min((after - 2) // 2, 3)
    assert tuning.chosen.best.read is not None
    assert tuning.chosen.best.write is not None
    assert not [*drive.iterdir()]


# Of twelve settings six go on to the final: there the best may not have been reached yet, but others have.
@pytest.mark.parametrize("moves", [1, 4, 8])
def test_an_interrupt_in_the_first_pass_of_a_later_round_gives_all(
    drive: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    settings = tuple(AioConfig(block_size=256 << 10, queue_depth=depth) for depth in range(1, 13))
    move, left = TrialBench.move, [moves]
    steps: list[str] = []

    def interrupted(self: TrialBench, *arguments: Any) -> Any:
        if "the final" in steps[-1]:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        return move(self, *arguments)

    monkeypatch.setattr(TrialBench, "move", interrupted)
    tuning = tune(order(drive, settings=settings, seconds=0.0), lambda share, step: steps.append(step))
    assert not tuning.complete
    assert {each.setting for each in tuning.chosen.results} == set(settings)
    assert {each.rounds for each in tuning.chosen.results} == {1}


def test_an_interrupt_before_anything_was_measured_is_passed_on(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_moves(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        tune(order(drive))
    assert not [*drive.iterdir()]


def test_an_interrupt_before_the_second_folder_keeps_the_first(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [drive / "a", drive / "b"]
    for folder in folders:
        folder.mkdir()
    searches = iter([1])

    def interrupted(*arguments: Any, **more: Any) -> Any:
        if next(searches, None) is None:
            raise KeyboardInterrupt
        return search(*arguments, **more)

    monkeypatch.setattr(tuner, "search", interrupted)
    tuning = tune(order(*folders))
    assert not tuning.complete
    assert [each.complete for each in tuning.searches] == [True]


# -- results -----------------------------------------------------------------------------------------------------------


def test_every_setting_has_sound_figures_both_ways(drive: Path) -> None:
    tuning = tune(order(drive))
    assert tuning.complete
    assert len(tuning.searches) == 1
    assert tuning.chosen.best in tuning.chosen.results
    assert {each.setting for each in tuning.chosen.results} == set(SETTINGS)
    for result in tuning.chosen.results:
        assert result.backend in ("io_uring", "libaio", "threads")
        for figures in (result.read, result.write):
            assert figures is not None
            assert figures.gb_per_second > 0
            assert figures.cpu_seconds_per_gb >= 0
            assert 0 < figures.latency_p50 <= figures.latency_p99 < 60
    assert 4 * MIB * (1 + 2 * len(SETTINGS)) <= tuning.bytes_written <= order(drive).write_limit == tuning.write_limit
    assert all(each.difference is not None for each in tuning.chosen.results if each is not tuning.chosen.best)
    assert not [*drive.iterdir()]


def test_reads_alone_write_only_the_file_that_is_read(drive: Path) -> None:
    assert tune(order(drive, write=False)).bytes_written == 4 * MIB


@pytest.mark.parametrize("io_size", [1, 3 * MIB + 5])
def test_any_size_can_be_measured(drive: Path, io_size: int) -> None:
    tuning = tune(order(drive, io_size=io_size, seconds=0.0))
    assert tuning.complete
    assert tuning.chosen.best.read is not None


@pytest.mark.slow
def test_folders_are_measured_alone_and_together(drive: Path) -> None:
    folders = [drive / "a", drive / "b"]
    for folder in folders:
        folder.mkdir()
    tuning = tune(order(*folders))
    assert [[Path(facts.path) for facts in each.folders] for each in tuning.searches] == [
        [folders[0].resolve()],
        [folders[1].resolve()],
        [folder.resolve() for folder in folders],
    ]
    assert tuning.chosen is tuning.searches[2]
    for search_ in tuning.searches:
        assert all(figures.gb_per_second > 0 for figures in search_.best.measured.values())
    assert not any([*folder.iterdir()] for folder in folders)
