"""Sweep files, sound and broken, and the settings that are chosen from without one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepnvme.drives.aio_config import AioConfig
from deepnvme.tools.tune.folder import NotMeasurable
from deepnvme.tools.tune.settings import default_space, read_sweep

MIB = 1 << 20


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return tmp_path / "sweep.json"


def refusal(path: Path) -> str:
    with pytest.raises(NotMeasurable) as refused:
        read_sweep(path)
    message = str(refused.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"queue_depth": [1,]}', b"\xff\xfe\x00", b'\xef\xbb\xbf{"queue_depth": [1]}', b"[" * 100_000],
    ids=["empty", "cut off", "trailing comma", "not UTF-8", "byte order mark", "bottomless"],
)
def test_what_is_no_json_is_said_to_be_none(sweep: Path, content: bytes) -> None:
    sweep.write_bytes(content)
    assert "invalid JSON: " in refusal(sweep)


@pytest.mark.parametrize("document", ["[]", "{}", "null", "17", '"queue_depth"', '[{"queue_depth": [1]}]'])
def test_what_is_no_object_is_refused(sweep: Path, document: str) -> None:
    sweep.write_text(document)
    assert "object" in refusal(sweep) or "dictionary" in refusal(sweep)


def test_an_unknown_option_is_named(sweep: Path) -> None:
    sweep.write_text('{"block_sise": ["1M"]}')
    assert "block_sise: extra inputs are not permitted" in refusal(sweep)


@pytest.mark.parametrize("values", ["[]", "8", '"1M"', "null", '{"1": 2}'])
def test_an_option_without_a_list_of_values_is_named_with_what_it_has(sweep: Path, values: str) -> None:
    sweep.write_text(f'{{"queue_depth": {values}}}')
    assert "queue_depth: " in refusal(sweep)
    assert "list" in refusal(sweep)


@pytest.mark.parametrize(
    ("option", "value", "shown"),
    [
        ("queue_depth", True, "True"),
        ("queue_depth", "32", "'32'"),
        ("queue_depth", 1.5, "1.5"),
        ("queue_depth", None, "None"),
        ("queue_depth", 4097, "4097"),
        ("queue_depth", 10**30, "1" + "0" * 30),
        ("io_parallel", 0, "0"),
        ("io_parallel", [1], "[1]"),
        ("block_size", "1X", "'1X'"),
        ("block_size", "2G", "2147483648"),
        ("block_size", True, "True"),
        ("block_size", {}, "{}"),
        ("block_size", float("nan"), "nan"),
        ("single_submit", "true", "'true'"),
        ("sequential_requests", 0, "0"),
        ("backend", "posix", "'posix'"),
    ],
)
def test_a_value_out_of_place_is_named_with_its_option(sweep: Path, option: str, value: object, shown: str) -> None:
    sweep.write_text(json.dumps({option: [value]}))
    told = refusal(sweep).partition(f"'{sweep}': ")[2]
    assert told.startswith(f"{option}: ")
    assert shown in told


def test_the_default_sweep_of_deepspeed_is_all_its_combinations(sweep: Path) -> None:
    sweep.write_text(
        """{"block_size": ["1M", "8M"], "queue_depth": [32, 128], "sequential_requests": [true, false],
            "single_submit": [false, true], "io_parallel": [1, 2, 4, 8]}"""
    )
    settings = read_sweep(sweep)
    # Sequential requests or not is one setting, as the engine always overlaps.
    assert len(settings) == len(set(settings)) == 32
    assert {each.block_size for each in settings} == {MIB, 8 * MIB}
    assert {each.queue_depth for each in settings} == {32, 128}
    assert {each.single_submit for each in settings} == {False, True}
    assert {each.intra_op_parallelism for each in settings} == {1, 2, 4, 8}
    assert all(each.overlap_events for each in settings)


def test_sequential_requests_alone_are_kept_for_deepspeed(sweep: Path) -> None:
    sweep.write_text('{"sequential_requests": [true]}')
    assert [each.overlap_events for each in read_sweep(sweep)] == [False]


def test_what_is_listed_twice_is_one_setting(sweep: Path) -> None:
    sweep.write_text('{"block_size": ["1M", 1048576, "1024K"], "queue_depth": [8, 8]}')
    assert read_sweep(sweep) == [AioConfig(block_size=MIB, queue_depth=8)]


def test_settings_for_gpudirect_storage_ask_for_it(sweep: Path) -> None:
    sweep.write_text('{"queue_depth": [1, 2]}')
    assert all(each.use_gds for each in read_sweep(sweep, use_gds=True))


@given(
    st.sets(st.integers(512, 1 << 30), min_size=1, max_size=4),
    st.sets(st.integers(1, 4096), min_size=1, max_size=4),
    st.sets(st.integers(1, 256), min_size=1, max_size=4),
)
def test_a_sweep_file_yields_each_combination_once(
    tmp_path_factory: pytest.TempPathFactory, blocks: set[int], depths: set[int], workers: set[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "combinations.json"
    path.write_text(json.dumps({"io_parallel": [*workers], "block_size": [*blocks], "queue_depth": [*depths]}))
    wanted = {(block, depth, count) for block in blocks for depth in depths for count in workers}
    found = [(each.block_size, each.queue_depth, each.intra_op_parallelism) for each in read_sweep(path)]
    assert set(found) == wanted
    assert len(found) == len(wanted)


# -- without a file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("io_size", [1, 4096, MIB, 16 * MIB, 400 * MIB, 1 << 40])
def test_what_a_transfer_cannot_fill_is_not_tried(io_size: int) -> None:
    settings = default_space(io_size, ["io_uring"])
    assert settings
    assert len(settings) == len(set(settings))
    smallest = min(each.in_flight_bytes for each in settings)
    assert all(each.in_flight_bytes <= max(io_size, smallest) for each in settings)


def test_the_first_backend_is_left_to_auto() -> None:
    assert {each.backend for each in default_space(MIB, ["libaio", "threads"])} == {"auto", "threads"}


def test_no_more_workers_than_processors_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    assert {each.intra_op_parallelism for each in default_space(1 << 30, ["threads"])} == {1, 2, 4}
