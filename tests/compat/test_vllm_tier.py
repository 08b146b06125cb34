"""``NVMeTier`` with real vLLM: its factory, its interface, and its manager of tiers, without a GPU."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepnvme.files.directory_lock import StoreLocked
from deepnvme.kvstore.block_files import FILE_NAME

from ..support.faulty_filesystem import FaultyFilesystem
from ..support.kv_blocks import content
from ..support.patience import until
from . import serving

BLOCK = 256 << 10
ROWS = 8

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def vllm(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The names of vLLM that the tests use."""
    return serving.vllm(request.config)


@pytest.fixture
def memory() -> torch.Tensor:
    """vLLM's memory of blocks."""
    return torch.zeros(ROWS, BLOCK, dtype=torch.uint8)


@pytest.fixture
def make(vllm: SimpleNamespace, memory: torch.Tensor, drive: Path) -> Iterator[Make]:
    """Makes tiers on the same memory and path, as vLLM does, by its factory."""
    made = []

    def tier(spec: Any = None, **fields: Any) -> Any:
        entry = {"type": "NVMeTier", "module_path": "deepnvme.integrations.vllm", "path": str(drive / "kv"), "capacity": "16MiB"}
        view = memoryview(memory.numpy())
        made.append(vllm.SecondaryTierFactory.create_secondary_tier({**entry, **fields}, view, spec or serving.vllm_spec(vllm)))
        return made[-1]

    yield tier
    for each in made:
        each.shutdown()


def keys_of(vllm: SimpleNamespace, numbers: Sequence[int]) -> list[bytes]:
    return [vllm.make_offload_key(number.to_bytes(32, "big"), 0) for number in numbers]


def job(vllm: SimpleNamespace, number: int, keys: Sequence[bytes], rows: Sequence[int], load: bool = False) -> Any:
    request = vllm.ReqContext(req_id=f"request {number}")
    return vllm.TransferJob(number, list(keys), np.array(rows, dtype=np.int64), load, request)


def results_of(tier: Any) -> dict[int, Any]:
    tier.drain_jobs()
    return {result.job_id: result for result in tier.get_finished_jobs()}


def found(vllm: SimpleNamespace, tier: Any, keys: Sequence[bytes]) -> list[bool]:
    request = vllm.ReqContext(req_id="request")
    answers = [tier.lookup(key, request) for key in keys]
    assert set(answers) <= {vllm.LookupResult.HIT, vllm.LookupResult.MISS}
    return [answer is vllm.LookupResult.HIT for answer in answers]


def store(vllm: SimpleNamespace, tier: Any, memory: torch.Tensor, keys: Sequence[bytes]) -> None:
    """Store blocks that follow from their keys, from the first rows."""
    for row, key in enumerate(keys):
        memory[row] = content(key, BLOCK)
    tier.submit_store(job(vllm, 0, keys, range(len(keys))))
    assert results_of(tier)[0].success


def right(memory: torch.Tensor, row: int, key: bytes) -> bool:
    return torch.equal(memory[row], content(key, BLOCK))


def test_blocks_come_back_into_other_rows(vllm: SimpleNamespace, make: Make, memory: torch.Tensor) -> None:
    tier, keys = make(), keys_of(vllm, range(3))
    assert found(vllm, tier, keys) == [False] * 3
    store(vllm, tier, memory, keys)
    assert found(vllm, tier, keys) == [True] * 3
    memory.zero_()
    tier.submit_load(job(vllm, 1, keys, [7, 2, 5], load=True))
    result = results_of(tier)[1]
    assert (result.success, result.successful_keys, result.transfer_bytes) == (True, None, 3 * BLOCK)
    assert result.transfer_time >= 0
    assert all(right(memory, row, key) for row, key in zip([7, 2, 5], keys, strict=True))
    assert not memory[[0, 1, 3, 4, 6]].any()
    assert tier.medium is vllm.Medium.STORAGE


def test_results_are_reported_once_and_jobs_under_way_are_pending(
    vllm: SimpleNamespace, make: Make, memory: torch.Tensor
) -> None:
    tier, keys = make(), keys_of(vllm, range(8))
    assert not tier.has_pending_work()
    for number in range(4):
        tier.submit_store(job(vllm, number, keys[2 * number : 2 * number + 2], [2 * number, 2 * number + 1]))
    assert tier.has_pending_work()
    reported: list[int] = []
    until(lambda: reported.extend(result.job_id for result in tier.get_finished_jobs()) or len(reported) >= 4)  # type: ignore[func-returns-value]
    assert sorted(reported) == [0, 1, 2, 3]
    assert list(tier.get_finished_jobs()) == []
    assert not tier.has_pending_work()


def test_a_job_without_blocks_succeeds(vllm: SimpleNamespace, make: Make) -> None:
    tier = make()
    tier.submit_store(job(vllm, 1, [], []))
    tier.submit_load(job(vllm, 2, [], [], load=True))
    assert [result.success for result in results_of(tier).values()] == [True, True]


def test_a_row_that_vllm_does_not_have_fails_the_job(vllm: SimpleNamespace, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    tier, keys = make(), keys_of(vllm, range(1))
    tier.submit_store(job(vllm, 1, keys, [ROWS]))
    result = results_of(tier)[1]
    assert (result.success, result.successful_keys, result.transfer_bytes) == (False, None, 0)
    assert "there is no block 8 in a buffer of 8" in caplog.text
    assert found(vllm, tier, keys) == [False]


def test_a_damaged_block_is_missed_and_the_others_of_its_job_are_kept(
    vllm: SimpleNamespace, make: Make, memory: torch.Tensor, drive: Path
) -> None:
    tier, keys = make(), keys_of(vllm, range(4))
    store(vllm, tier, memory, keys)
    serving.flip_bytes(drive / "kv" / FILE_NAME, content(keys[2], BLOCK).numpy().tobytes())
    memory.zero_()
    tier.submit_load(job(vllm, 1, keys, [4, 5, 6, 7], load=True))
    result = results_of(tier)[1]
    assert (result.success, result.successful_keys) == (False, (keys[0], keys[1], keys[3]))
    assert [right(memory, row, key) for row, key in zip([4, 5, 6, 7], keys, strict=True)] == [True, True, False, True]
    assert found(vllm, tier, keys) == [True, True, False, True]  # so that vLLM does not try it again
    assert tier.stats().corrupt == 1


def test_a_block_for_which_memory_was_short_is_not_asked_for_again(
    vllm: SimpleNamespace, make: Make, memory: torch.Tensor, direct_disk: FaultyFilesystem
) -> None:
    tier, keys = make(path=str(direct_disk / "kv")), keys_of(vllm, range(2))
    store(vllm, tier, memory, keys)
    direct_disk.fail("read", errno.ENOMEM)
    tier.submit_load(job(vllm, 1, keys, [4, 5], load=True))
    result = results_of(tier)[1]
    direct_disk.heal()
    assert (result.success, result.successful_keys) == (False, None)
    assert found(vllm, tier, keys) == [False, False]
    store(vllm, tier, memory, keys)
    tier.shutdown()


def test_a_missing_block_fails_its_job_only(vllm: SimpleNamespace, make: Make, memory: torch.Tensor) -> None:
    tier, keys = make(), keys_of(vllm, range(3))
    store(vllm, tier, memory, keys[:2])
    tier.submit_load(job(vllm, 1, keys[2:], [4], load=True))
    tier.submit_load(job(vllm, 2, keys[:2], [5, 6], load=True))
    results = results_of(tier)
    assert [results[number].success for number in (1, 2)] == [False, True]
    assert results[1].successful_keys is None


def test_a_load_beside_a_store_of_the_same_keys_has_a_whole_block_or_misses(
    vllm: SimpleNamespace, make: Make, memory: torch.Tensor
) -> None:
    tier = make()
    hits = 0
    for turn in range(30):
        keys = keys_of(vllm, range(4 * turn, 4 * turn + 4))
        for row, key in enumerate(keys):
            memory[row] = content(key, BLOCK)
        memory[4:].zero_()
        tier.submit_store(job(vllm, 1, keys, range(4)))
        tier.submit_load(job(vllm, 2, keys, range(4, 8), load=True))
        results = results_of(tier)
        assert results[1].success
        loaded = set(keys if results[2].success else results[2].successful_keys or ())
        assert all(right(memory, 4 + row, key) for row, key in enumerate(keys) if key in loaded)
        hits += len(loaded)
    assert tier.stats().hits == hits


def test_capacity_is_kept_and_blocks_that_are_used_stay(
    vllm: SimpleNamespace, make: Make, memory: torch.Tensor, drive: Path
) -> None:
    tier = make()
    slots = tier.stats().slots
    used, request = keys_of(vllm, range(4)), vllm.ReqContext(req_id="request")
    store(vllm, tier, memory, used)
    size = (drive / "kv" / FILE_NAME).stat().st_size
    assert slots * BLOCK < size <= 16 << 20
    for number in range(1, slots):
        tier.touch(used, request)
        store(vllm, tier, memory, keys_of(vllm, range(4 * number, 4 * number + 4)))
        assert tier.stats().used <= slots
    assert tier.stats().evictions > 0
    assert found(vllm, tier, used) == [True] * 4
    assert (drive / "kv" / FILE_NAME).stat().st_size == size


def test_blocks_are_found_again_by_the_next_server(vllm: SimpleNamespace, make: Make, memory: torch.Tensor) -> None:
    tier, keys = make(), keys_of(vllm, range(5))
    store(vllm, tier, memory, keys)
    tier.shutdown()
    tier.shutdown()
    again = make()
    assert found(vllm, again, keys) == [True] * 5
    memory.zero_()
    again.submit_load(job(vllm, 1, keys, range(5), load=True))
    assert results_of(again)[1].success
    assert all(right(memory, row, key) for row, key in enumerate(keys))


def test_shutdown_ends_the_jobs_under_way(vllm: SimpleNamespace, make: Make, memory: torch.Tensor) -> None:
    tier, keys = make(), keys_of(vllm, range(64))
    rows = [row % ROWS for row in range(64)]
    for key, row in zip(keys[:ROWS], rows, strict=False):
        memory[row] = content(key, BLOCK)
    for number in range(8):
        tier.submit_store(job(vllm, number, keys[8 * number : 8 * number + 8], range(ROWS)))
    tier.shutdown()
    memory.zero_()  # vLLM frees it now
    assert make().stats().used > 0


def test_after_a_shutdown_nothing_is_pending_though_the_drive_failed(
    vllm: SimpleNamespace, make: Make, memory: torch.Tensor, direct_disk: FaultyFilesystem
) -> None:
    tier = make(path=str(direct_disk / "kv"))
    tier.submit_store(job(vllm, 1, keys_of(vllm, range(2)), [0, 1]))
    direct_disk.fail("fsync", errno.EIO)
    with pytest.raises(OSError, match="fdatasync"):
        tier.shutdown()
    assert not tier.has_pending_work()


def test_the_files_of_another_model_layout_or_rank_are_refused(vllm: SimpleNamespace, make: Make) -> None:
    make().shutdown()
    for changed in ({"model": "another"}, {"dtype": "float16"}, {"tp_size": 2}, {"tokens_per_hash": 32}, {"rank": 1}):
        with pytest.raises(ValueError, match="fingerprint"):
            make(serving.vllm_spec(vllm, **changed))
    make()


def test_a_second_server_is_told_who_has_the_directory(vllm: SimpleNamespace, make: Make) -> None:
    make()
    with pytest.raises(StoreLocked, match="BlockStore of this process"):
        make()


def test_each_engine_of_data_parallelism_has_its_own_folder(vllm: SimpleNamespace, make: Make, drive: Path) -> None:
    for index in (0, 1):
        make(serving.vllm_spec(vllm, data_parallel_index=index, data_parallel_size=2))
    assert sorted(path.name for path in (drive / "kv").iterdir()) == ["dp-0", "dp-1"]


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"capacity": "1KiB"}, ValueError, "no room for a block"),
        ({"aio_config": {"queue_dept": 3}}, ValueError, "queue_dept"),
        ({"locality": "NEAR"}, ValueError, "NEAR"),
        ({"size": "1GB"}, TypeError, "size"),
    ],
)
def test_wrong_settings_are_refused(make: Make, fields: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(**fields)


def test_stored_and_missed_blocks_are_reported_as_events(
    vllm: SimpleNamespace, make: Make, memory: torch.Tensor, drive: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quiet = make(enable_kv_events=True)  # but vLLM's events are disabled
    assert "enable_kv_events has no effect" in caplog.text
    keys = keys_of(vllm, range(2))
    store(vllm, quiet, memory, keys)
    assert list(quiet.take_events()) == []
    quiet.shutdown()
    (drive / "kv" / FILE_NAME).unlink()
    tier = make(serving.vllm_spec(vllm, events=True), enable_kv_events=True, locality="LOCAL")
    store(vllm, tier, memory, keys)
    tier.submit_load(job(vllm, 1, keys_of(vllm, [0, 7]), [3, 4], load=True))
    results_of(tier)
    events = list(tier.take_events())
    assert [(event.keys, event.removed) for event in events] == [(keys, False), (keys_of(vllm, [7]), True)]
    assert all((event.medium, event.locality) == (vllm.Medium.STORAGE, vllm.Locality.LOCAL) for event in events)
    assert list(tier.take_events()) == []


def test_metrics_have_what_has_happened_since_the_last_call(vllm: SimpleNamespace, make: Make, memory: torch.Tensor) -> None:
    tier, keys = make(), keys_of(vllm, range(2))
    defined = type(tier).build_metric_definitions({})
    store(vllm, tier, memory, keys)
    tier.submit_load(job(vllm, 1, keys, [3, 4], load=True))
    results_of(tier)
    first, second = serving.vllm_figures(tier.get_stats()), serving.vllm_figures(tier.get_stats())
    assert set(first) <= set(defined)
    assert (first["vllm:deepnvme_hits"], second.get("vllm:deepnvme_hits", 0)) == (2, 0)
    assert (first["vllm:deepnvme_used"], second["vllm:deepnvme_used"]) == (2, 2)


def test_vllms_manager_of_tiers_stores_and_promotes(vllm: SimpleNamespace, make: Make, memory: torch.Tensor) -> None:
    """From vLLM's memory to the drive, out of its memory, and back: as its scheduler does, step by step."""
    tier = make()
    manager = serving.vllm_manager(vllm, tier, memory)
    request = vllm.ReqContext(req_id="request")
    keys = keys_of(vllm, range(ROWS))
    manager.on_new_request(request)
    output = manager.prepare_store(keys, request)
    for key, row in zip(output.keys_to_store, output.store_spec.block_ids, strict=True):
        memory[int(row)] = content(key, BLOCK)
    manager.complete_store(keys, request)
    step = vllm.ScheduleEndContext(new_req_ids=[], preempted_req_ids=[])
    until(lambda: (manager.on_schedule_end(step), manager.lookup(keys[0], request), not tier.has_pending_work())[2])
    others = keys_of(vllm, range(100, 100 + ROWS))  # that need the whole memory
    output = manager.prepare_store(others, request)
    assert output is not None
    assert set(output.evicted_keys) == set(keys)
    manager.complete_store(others, request, success=False)
    memory.zero_()

    def ready() -> bool:
        answers = [manager.lookup(key, request) for key in keys]
        manager.on_schedule_end(step)
        return all(answer is vllm.LookupResult.HIT for answer in answers)

    until(ready, "promotion")
    spec = manager.prepare_load(keys, request)
    assert all(right(memory, int(row), key) for row, key in zip(spec.block_ids, keys, strict=True))
    manager.complete_load(keys, request)
