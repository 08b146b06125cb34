"""What the tiers for vLLM, SGLang and LMCache have in common; and what they say where these are not installed, or are others."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest

from deepnvme import AioConfig
from deepnvme.integrations._serving import aio_config_of, block_key, folders_in, require_version

from .sglang_stand_in import forget_integration, install


@pytest.mark.parametrize("found", ["0.32.0", "0.32.0+cpu", "0.32", "0.5.6"])
def test_tested_versions_are_accepted(found: str) -> None:
    require_version("vLLM", found, ("0.32.0", "0.5.6"))


@pytest.mark.parametrize("found", ["0.32.1", "0.33.0", "0.32.0rc1", "0.32.0.post1", "dev", "", None])
def test_other_versions_are_refused_by_name(found: str | None) -> None:
    with pytest.raises(ImportError, match=f"tested with vLLM 0.32.0 or 0.5.6, and refuses {found or 'an unknown version'}"):
        require_version("vLLM", found, ("0.32.0", "0.5.6"))


def test_keys_differ_with_every_part() -> None:
    parts = [("a", "b"), ("ab", ""), ("", "ab"), ("a", "b", ""), ("a", 1), ("a", "1", 0), ("b", "a"), ("ä",), ()]
    keys = [block_key(*each) for each in parts]
    assert all(len(key) == 32 for key in keys)
    assert [pair for pair in combinations(keys, 2) if pair[0] == pair[1]] == []
    assert block_key("a", 1) == block_key("a", "1")


def test_paths_and_settings_are_as_json_gives_them() -> None:
    assert folders_in("/mnt/a", "") == [Path("/mnt/a")]
    assert folders_in(["/mnt/a", Path("/mnt/b")], "rank/kv") == [Path("/mnt/a/rank/kv"), Path("/mnt/b/rank/kv")]
    assert aio_config_of(None) is None
    assert aio_config_of({"queue_depth": 3}) == AioConfig(queue_depth=3)
    assert aio_config_of(AioConfig(queue_depth=3)) == AioConfig(queue_depth=3)
    with pytest.raises(ValueError, match="queue_dept"):
        aio_config_of({"queue_dept": 3})


@pytest.mark.parametrize(("module", "project"), [("vllm", "vllm==0.32.0"), ("lmcache", "lmcache==0.5.6")])
def test_without_the_project_the_import_says_what_to_install(module: str, project: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [module, *(each for each in sys.modules if each.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"deepnvme.integrations.{module}", raising=False)
    with pytest.raises(ImportError, match=f"pip install {project}"):
        __import__(f"deepnvme.integrations.{module}")


def test_another_sglang_serves_the_offloader_and_not_hicache(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_integration()
    install(monkeypatch)
    storage = ModuleType("sglang.srt.mem_cache.hicache_storage")
    for name in ("HiCacheStorage", "PoolHitPolicy", "PoolName", "PoolTransferResult"):
        setattr(storage, name, object)
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache", ModuleType("sglang.srt.mem_cache"))
    monkeypatch.setitem(sys.modules, storage.__name__, storage)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5.22")
    from deepnvme.integrations import sglang

    assert sglang.StreamingOffloader is not None
    with pytest.raises(ImportError, match=r"tested with SGLang 0\.5\.23, and refuses 0\.5\.22"):
        sglang.NVMeHiCache  # noqa: B018
    forget_integration()
