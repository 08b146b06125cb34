"""``NVMeHiCache`` with real SGLang: its factory and its interface, with a stand-in for its pool of host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.host_pool import HostPool

from deepnvme.files.directory_lock import StoreLocked
from deepnvme.kvstore.block_files import FILE_NAME

from ..support.kv_blocks import content
from ..support.patience import PATIENCE
from . import serving

PAGES, TOKENS, LAYERS, WIDTH = 16, 4, 8, 1024
HALF = TOKENS * LAYERS * WIDTH
FOLDER = Path("tp0-pp0-cp0-dp0", "kv")

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def sglang(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The names of SGLang that the tests use."""
    return serving.sglang(request.config)


def pool_of(layout: str = "page_first", pages: int = PAGES) -> HostPool:
    tokens = pages * TOKENS
    shape = (2, tokens, LAYERS, WIDTH) if layout == "page_first" else (2, LAYERS, tokens, WIDTH)
    return HostPool(torch.zeros(shape, dtype=torch.uint8), TOKENS, layout)


@pytest.fixture
def pool() -> HostPool:
    return pool_of()


@pytest.fixture
def make(sglang: SimpleNamespace, pool: HostPool, drive: Path) -> Iterator[Make]:
    """Makes backends on one path, as SGLang does, by its factory."""
    made = []

    def backend(host: HostPool | None = None, settings: dict[str, Any] | None = None, **fields: Any) -> Any:
        extra = {"backend_name": "deepnvme", "module_path": "deepnvme.integrations.sglang", "class_name": "NVMeHiCache"}
        extra |= {"interface_v1": 1, "path": str(drive / "kv"), "capacity": "4MiB", **(settings or {})}
        ranks: dict[str, Any] = dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0) | dict.fromkeys(
            ("tp_size", "pp_size", "attn_cp_size"), 1
        )
        flags = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "org/model"}
        config = sglang.HiCacheStorageConfig(**(ranks | flags | {"extra_config": extra} | fields))
        made.append(sglang.StorageBackendFactory.create_backend("dynamic", config, host or pool))
        made[-1].register_mem_pool_host(host or pool)
        made[-1].on_host_pools_registered()
        return made[-1]

    yield backend
    for each in made:
        each.close()


def keys_of(numbers: range) -> list[str]:
    return [f"{number:064x}" for number in numbers]


def fill(pool: HostPool, page: int, key: str) -> None:
    pool.set_from_flat_data_page(page * TOKENS, content(key.encode(), 2 * HALF))


def right(pool: HostPool, page: int, key: str) -> bool:
    return torch.equal(pool.get_data_page(page * TOKENS), content(key.encode(), 2 * HALF))


def store(backend: Any, pool: HostPool, keys: list[str]) -> None:
    for page, key in enumerate(keys):
        fill(pool, page, key)
    assert backend.batch_set_v1(keys, pool.indices_of(list(range(len(keys))))) == [True] * len(keys)


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_come_back_at_other_places(make: Make, layout: str) -> None:
    pool = pool_of(layout)
    backend, keys = make(pool), keys_of(range(4))
    store(backend, pool, keys)
    pool.kv_buffer.zero_()
    places = [9, 3, 15, 0]
    assert backend.batch_get_v1([*keys, "f" * 64], pool.indices_of([*places, 5])) == [True] * 4 + [False]
    assert all(right(pool, place, key) for place, key in zip(places, keys, strict=True))
    assert not any(pool.get_data_page(page * TOKENS).any() for page in range(PAGES) if page not in places)


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_both_interfaces_have_the_same_pages(make: Make, layout: str) -> None:
    pool = pool_of(layout)
    backend, keys = make(pool), keys_of(range(4))
    store(backend, pool, keys[:2])
    assert backend.batch_set(keys[2:], [content(key.encode(), 2 * HALF) for key in keys[2:]])
    pages = [pool.get_dummy_flat_data_page() for _ in range(4)]
    found = backend.batch_get(keys, pages)
    assert all(
        each is page and torch.equal(page, content(key.encode(), 2 * HALF))
        for each, page, key in zip(found, pages, keys, strict=True)
    )
    assert torch.equal(backend.get(keys[3]), pages[3])
    assert backend.get("f" * 64, pages[0]) is None
    assert backend.set("e" * 64, pages[0]) is True
    assert backend.set("d" * 64, pages[0][:-1]) is False
    pool.kv_buffer.zero_()
    assert backend.batch_get_v1(keys, pool.indices_of([4, 5, 6, 7])) == [True] * 4
    assert all(right(pool, 4 + row, key) for row, key in enumerate(keys))


def test_pages_are_counted_up_to_the_first_that_is_missing(make: Make, pool: HostPool) -> None:
    backend, keys = make(), keys_of(range(6))
    assert backend.batch_exists(keys) == 0
    store(backend, pool, keys[:2] + keys[3:])
    assert backend.batch_exists(keys) == 2
    assert backend.batch_exists(keys[3:]) == 3
    assert backend.exists(keys[0])
    assert not backend.exists(keys[2])
    assert backend.clear()
    assert backend.batch_exists(keys) == 0


def test_a_damaged_page_is_missed_whichever_half_it_is(make: Make, pool: HostPool, drive: Path) -> None:
    backend, keys = make(), keys_of(range(3))
    store(backend, pool, keys)
    text = content(keys[1].encode(), 2 * HALF).numpy().tobytes()
    serving.flip_bytes(drive / "kv" / FOLDER / FILE_NAME, text[HALF:])
    pool.kv_buffer.zero_()
    assert backend.batch_get_v1(keys, pool.indices_of([4, 5, 6])) == [True, False, True]
    assert right(pool, 4, keys[0])
    assert right(pool, 6, keys[2])
    assert backend.batch_exists(keys) == 1
    assert backend.stats()["kv"].corrupt == 1


def test_wrong_indices_are_refused(make: Make, pool: HostPool, caplog: pytest.LogCaptureFixture) -> None:
    backend = make()
    assert backend.batch_set_v1(keys_of(range(2)), pool.indices_of([0])) == [False, False]
    assert backend.batch_get_v1(keys_of(range(2)), None) == [False, False]
    assert "2 pages of 4 cannot be at 4 indices" in caplog.text
    assert backend.batch_set_v1([], torch.empty(0, dtype=torch.int64)) == []


def test_a_thread_that_loads_beside_one_that_stores_has_whole_pages(make: Make, pool: HostPool) -> None:
    """As SGLang's threads for prefetches and backups do."""
    backend, keys = make(), keys_of(range(200))
    wrong: list[str] = []
    last_turn = threading.Event()

    def stores() -> None:
        for key in keys:
            fill(pool, 0, key)
            backend.batch_set_v1([key], pool.indices_of([0]))
        last_turn.set()

    def loads() -> None:
        ended = False
        while not ended:  # the last turn finds what stayed
            ended = last_turn.is_set()
            for key in keys:
                if backend.batch_get_v1([key], pool.indices_of([1])) == [True] and not right(pool, 1, key):
                    wrong.append(key)

    threads = [threading.Thread(target=target) for target in (stores, loads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert wrong == []
    stats = backend.stats()["kv"]
    assert stats.hits > 0
    assert stats.evictions > 0
    assert stats.used <= stats.slots


def test_pages_are_found_again_by_the_next_server(make: Make, pool: HostPool) -> None:
    backend, keys = make(), keys_of(range(4))
    store(backend, pool, keys)
    backend.close()
    backend.close()
    again = make()
    pool.kv_buffer.zero_()
    assert again.batch_exists(keys) == 4
    assert again.batch_get_v1(keys, pool.indices_of([0, 1, 2, 3])) == [True] * 4
    assert all(right(pool, page, key) for page, key in enumerate(keys))


def test_ranks_have_folders_of_their_own_and_other_models_are_refused(make: Make) -> None:
    for rank in range(2):
        make(tp_rank=rank, tp_size=2).close()
    for changed in ({"model_name": "org/other", "tp_size": 2}, {"tp_size": 4}, {"pp_size": 2, "tp_size": 2}):
        with pytest.raises(ValueError, match="fingerprint"):
            make(**changed)
    with pytest.raises(ValueError, match="fingerprint"):
        make(pool_of("layer_first"), tp_size=2)
    make(tp_size=2)
    with pytest.raises(StoreLocked, match="BlockStore of this process"):
        make(tp_size=2)


def test_ranks_with_the_same_keys_and_values_read_what_one_has_written(
    make: Make, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepnvme.integrations.sglang import hicache

    monkeypatch.setattr(hicache, "_REFRESH_SECONDS", 0.0)
    reader = make(is_mla_model=True, tp_rank=1, tp_size=2)
    keys = keys_of(range(3))
    assert reader.batch_exists(keys) == 0  # nobody has made the files yet
    writer = make(is_mla_model=True, tp_rank=0, tp_size=2)
    store(writer, pool, keys[:2])
    assert reader.batch_exists(keys) == 2
    store(writer, pool, keys[2:])
    assert reader.batch_exists(keys) == 3
    pool.kv_buffer.zero_()
    assert reader.batch_get_v1(keys, pool.indices_of([7, 8, 9])) == [True] * 3
    assert all(right(pool, 7 + row, key) for row, key in enumerate(keys))
    assert reader.batch_set_v1(keys, pool.indices_of([7, 8, 9])) == [False] * 3  # SGLang does not ask it to


def test_pools_beside_keys_and_values(sglang: SimpleNamespace, make: Make, pool: HostPool) -> None:
    backend, keys, other = make(), keys_of(range(4)), pool_of()
    backend.register_mem_host_pool_v2(other, sglang.PoolName.MAMBA)
    store(backend, pool, keys)

    def transfer(name: Any, pages: list[int], named: list[str], policy: str = "ALL_PAGES") -> Any:
        return sglang.PoolTransfer(name, host_indices=pool.indices_of(pages), keys=named, hit_policy=sglang.PoolHitPolicy[policy])

    mamba = sglang.PoolName.MAMBA
    for page in (1, 2):
        fill(other, page, "mamba" + keys[page])
    assert backend.batch_set_v2([transfer(mamba, [1, 2], keys[1:3])]) == {mamba: [True, True]}
    found = backend.batch_exists_v2(keys, [transfer(mamba, [0], keys[3:], "TRAILING_PAGES")])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [2, 3])
    assert found.extra_pool_hit_pages == {sglang.PoolName.KV: 4, mamba: 3}
    assert backend.batch_exists_v2(keys, [transfer(mamba, [0], keys)]).kv_hit_pages == 0
    assert backend.batch_exists_v2(keys).kv_hit_pages == 4
    other.kv_buffer.zero_()
    loaded = backend.batch_get_v2([transfer(mamba, [8, 9, 10], keys[1:]), transfer("kv", [5], keys[:1])])
    assert loaded == {mamba: [True, True, False], "kv": [True]}
    assert right(other, 8, "mamba" + keys[1])
    assert right(pool, 5, keys[0])
    with pytest.raises(ValueError, match="BLOCK_GROUPS"):
        backend.batch_exists_v2(keys, [transfer(mamba, [0], keys, "BLOCK_GROUPS")])


@pytest.mark.parametrize(
    ("settings", "fields", "text"),
    [
        ({"capacity": "1KiB"}, {}, "no room for a block"),
        ({"aio_config": {"queue_dept": 3}}, {}, "queue_dept"),
        ({}, {"dcp_size": 2, "tp_size": 2, "is_mla_model": True, "logical_page_size": 8}, "dcp_size 2"),
    ],
)
def test_wrong_settings_are_refused(make: Make, settings: dict[str, Any], fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(settings=settings, **fields)


def test_missing_settings_are_named(sglang: SimpleNamespace) -> None:
    from deepnvme.integrations.sglang import NVMeHiCache

    with pytest.raises(ValueError, match="'capacity' in --hicache-storage-backend-extra-config"):
        NVMeHiCache(SimpleNamespace(extra_config={"path": "/mnt"}, dcp_size=1))
