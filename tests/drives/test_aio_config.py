"""The ``aio`` block of a DeepSpeed JSON: names, defaults, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

from deepnvme import AioConfig


@pytest.mark.parametrize("key", ["blocksize", "queue_dept", "block_size ", "threads", "", "pin_memory"])
def test_an_unknown_key_is_refused_by_name(key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        AioConfig.model_validate({key: 1})
    assert [error["loc"] for error in caught.value.errors()] == [(key,)]


@pytest.mark.parametrize(("key", "value"), [
    ("block_size", 511), ("block_size", 0), ("block_size", -1), ("block_size", (1 << 30) + 1), ("block_size", "1 parsec"),
    ("block_size", "50%"), ("block_size", 4096.5), ("block_size", None),
    ("queue_depth", 0), ("queue_depth", 4097), ("queue_depth", "deep"),
    ("intra_op_parallelism", 0), ("intra_op_parallelism", 257), ("thread_count", 0), ("num_threads", -1),
    ("single_submit", "perhaps"), ("single_submit", 2), ("overlap_events", None), ("use_gds", "yes please"),
])  # fmt: skip
def test_a_bad_value_is_refused_with_key_and_value(key: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        AioConfig.model_validate({key: value})
    assert [(error["loc"], error["input"]) for error in caught.value.errors()] == [((key,), value)]


@pytest.mark.parametrize(("text", "size"), [("1M", 1 << 20), ("1MiB", 1 << 20), ("64 KiB", 65536), ("4096", 4096)])
def test_a_block_size_may_be_written_with_a_unit(text: str, size: int) -> None:
    assert AioConfig.model_validate({"block_size": text}).block_size == size


def test_the_defaults_are_deepspeeds() -> None:
    assert AioConfig().model_dump() == {
        "block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True,
        "use_gds": False, "backend": "auto",
    }  # fmt: skip


@pytest.mark.parametrize("key", ["intra_op_parallelism", "thread_count", "num_threads"])
def test_the_number_of_workers_has_three_names(key: str) -> None:
    assert AioConfig.model_validate({key: 4}).intra_op_parallelism == 4


def test_two_names_for_the_number_of_workers_are_one_too_many() -> None:
    with pytest.raises(ValidationError):
        AioConfig.model_validate({"thread_count": 2, "num_threads": 4})


def test_it_makes_a_handle(op: ModuleType) -> None:
    config = AioConfig(block_size=65536, queue_depth=4, intra_op_parallelism=2, single_submit=True, overlap_events=False)
    handle = op.aio_handle(**config.handle_arguments())
    assert handle.get_block_size() == 65536
    assert handle.get_queue_depth() == 4
    assert handle.get_intra_op_parallelism() == 2
    assert handle.get_single_submit() is True
    assert handle.get_overlap_events() is False


@pytest.mark.parametrize("config", [
    AioConfig(), AioConfig(block_size=65536, queue_depth=4, intra_op_parallelism=2, single_submit=True, overlap_events=False),
    AioConfig(backend="threads"), AioConfig(use_gds=True),
], ids=str)  # fmt: skip
def test_what_deepspeed_is_given_is_the_same_configuration(config: AioConfig) -> None:
    assert AioConfig.from_deepspeed(json.loads(json.dumps(config.to_deepspeed()))) == config


def test_deepspeed_is_given_no_key_that_its_handle_lacks() -> None:
    expected = {"block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism"}
    config = AioConfig(block_size=65536)
    assert set(config.to_deepspeed()["aio"]) == set(config.handle_arguments()) == expected


DEEPSPEED = {
    "train_batch_size": 8,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/nvme"}},
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True},
}


def test_it_is_taken_from_a_whole_configuration() -> None:
    assert AioConfig.from_deepspeed(DEEPSPEED) == AioConfig(block_size=262144, queue_depth=32)


@pytest.mark.parametrize("kind", [str, Path])
def test_it_is_taken_from_a_file(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(DEEPSPEED))
    assert AioConfig.from_deepspeed(kind(path)) == AioConfig.from_deepspeed(DEEPSPEED)


@pytest.mark.parametrize("whole", [{}, {"train_batch_size": 8}, {"aio": None}, {"aio": {}}], ids=str)
def test_the_defaults_stand_where_there_is_no_block(whole: dict[str, Any]) -> None:
    assert AioConfig.from_deepspeed(whole) == AioConfig()


@pytest.mark.parametrize("block", ["fast", 3, [], True], ids=str)
def test_a_block_that_is_no_object_is_refused(block: Any) -> None:
    with pytest.raises(ValidationError):
        AioConfig.from_deepspeed({"aio": block})


@pytest.mark.parametrize("text", ["[]", "3", '"aio"', "null"])
def test_a_file_that_holds_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match="a DeepSpeed configuration is a JSON object, got"):
        AioConfig.from_deepspeed(tmp_path / "file")
