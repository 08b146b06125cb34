"""Sizes and budgets of memory as people write them, and that every public function that takes bytes takes them so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deepnvme
from deepnvme.memory import BufferPool
from deepnvme.memory.budget import budget_bytes
from deepnvme.offload import OffloadedOptimizer
from deepnvme.tables import Table
from deepnvme.telemetry.sizes import byte_count, parse_size

GB, GIB = 10**9, 1 << 30


# What is a size


@pytest.mark.parametrize(("text", "size"), [
    ("0", 0), ("1024", 1024), (" 007 ", 7), ("8B", 8), ("8 b", 8),
    ("8GB", 8 * GB), ("8gb", 8 * GB), ("8 GB", 8 * GB), ("1.5GB", 1_500_000_000), ("64KB", 64_000), ("2TB", 2000 * GB),
    ("1PB", 10**15),
    ("512MiB", 512 << 20), ("512mib", 512 << 20), ("8 GiB", 8 * GIB), ("0.5KiB", 512), ("1Gi", GIB), ("1PiB", 1 << 50),
    ("64K", 64 << 10), ("400M", 400 << 20), ("1G", GIB), ("2t", 2 << 40), ("0.3KB", 300), ("0.0001KB", 0),
])  # fmt: skip
def test_units_with_a_b_are_decimal_and_others_binary(text: str, size: int) -> None:
    assert parse_size(text) == byte_count(text, "size") == budget_bytes(text, "size") == size


@pytest.mark.parametrize("text", [
    "", " ", "GB", "8 parsecs", "8GBs", "8XB", "8iB", "1.5", "1.5B", ".5GB", "1.GB", "1,5GB", "1e9", "1_000", "-8GB", "+8GB",
    "0x10", "8GB 2MB", "8G B", "٣GB", "1\u212a", "inf", "nan", "8%%", "%", "-5%", "half", "9" * 30,
])  # fmt: skip
def test_what_is_no_size_is_refused_with_name_and_value(text: str) -> None:
    for check in (byte_count, budget_bytes):
        with pytest.raises(ValueError, match="capacity must be a number of bytes, or a size such as") as caught:
            check(text, "capacity")
        assert repr(text) in str(caught.value)


@pytest.mark.parametrize("value", [1.0, 8e9, float("nan"), np.float64(1), None, b"8GB", True, False, [1], (1,), 1j])
def test_what_is_neither_a_whole_number_nor_a_text_is_refused(value: Any) -> None:
    for check in (byte_count, budget_bytes):
        with pytest.raises(TypeError, match="capacity must be a whole number of bytes, or a size such as"):
            check(value, "capacity")


@pytest.mark.parametrize("value", [7, np.int64(7), np.uint8(7), torch.tensor(7)])
def test_integers_of_any_type_are_bytes(value: Any) -> None:
    assert (byte_count(value, "capacity"), type(byte_count(value, "capacity"))) == (7, int)


def test_a_number_below_the_least_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity must not be negative, got -1"):
        byte_count(-1, "capacity")
    with pytest.raises(ValueError, match="capacity must be at least 1, got '0GB'"):
        byte_count("0GB", "capacity", least=1)


UNITS = {"": 1, "B": 1} | {
    letter + ending: (1000 if ending == "B" else 1024) ** power
    for power, letter in enumerate("KMGTP", 1)
    for ending in ("", "B", "i", "iB")
}


@given(st.integers(0, 10**9), st.sampled_from(sorted(UNITS)), st.text(" \t", max_size=3), st.booleans())
def test_a_whole_number_of_a_unit_is_exact(number: int, unit: str, space: str, lower: bool) -> None:
    text = f"{number}{space}{unit}"
    assert parse_size(text.lower() if lower else text) == number * UNITS[unit]


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(sorted(set(UNITS) - {"", "B"})))
def test_a_fraction_of_a_unit_is_exact_but_for_what_it_leaves_of_a_byte(whole: int, thousandths: int, unit: str) -> None:
    assert parse_size(f"{whole}.{thousandths:03}{unit}") == (whole * 1000 + thousandths) * UNITS[unit] // 1000


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_none(text: str) -> None:
    size = parse_size(text)
    assert size is None or (size >= 0 and re.match(r"\s*[0-9]", text))


# Budgets


@pytest.mark.parametrize(("text", "budget"), [
    ("50%", 5000), ("50 %", 5000), (" 12.5% ", 1250), ("0%", 0), ("100%", 10_000), ("0.01%", 1), ("auto", 5000), ("AUTO", 5000),
])  # fmt: skip
def test_a_share_is_of_the_available_memory_and_auto_is_half_of_it(
    text: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert budget_bytes(text, "memory_budget", lambda: 10_000) == budget


def test_processes_that_torchrun_has_started_share_what_is_automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert budget_bytes("auto", "memory_budget", lambda: 10_000) == 1250
    assert budget_bytes("50%", "memory_budget", lambda: 10_000) == 5000


def test_more_than_all_of_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_budget must be at most 100% of the available memory, got '101%'"):
        budget_bytes("101%", "memory_budget")


# All public functions


# What some of them do with it


def test_a_pool_has_the_budget_that_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepnvme.memory.pool.available_memory", lambda: 10**10)
    pool = BufferPool("1.5GB")
    assert pool.budget == 1_500_000_000
    pool.set_budget("64 MiB")
    assert pool.budget == 64 << 20
    with pool.lease("1MiB") as lease:
        assert lease.nbytes == 1 << 20
        pool.set_budget("50%")  # what the pool has pinned itself is available to it
        assert pool.budget == (10**10 + (1 << 20)) // 2
    assert BufferPool("50%").budget > 0


@pytest.mark.parametrize("budget", ["1GB", "1%", "auto"])
def test_a_table_takes_sizes(budget: str, tmp_path: Path) -> None:
    rows = torch.arange(64.0).view(16, 4)
    with Table.from_tensor(tmp_path / "table", rows, memory_budget=budget, staging_bytes="1MiB") as table:
        assert table.memory_budget > 0
        assert table.staging_bytes == 1 << 20
        assert torch.equal(table.read(torch.arange(16)), rows)


def test_what_is_automatic_leaves_room_for_the_sub_groups_in_flight(tmp_path: Path) -> None:
    pool = BufferPool("4MiB")
    weight = torch.nn.Parameter(torch.ones(1 << 20))  # 8 MiB of states: not all can stay in memory
    optimizer = OffloadedOptimizer(
        [weight], torch.optim.AdamW, path=tmp_path, memory_budget="auto", sub_group_size=1 << 16, pool=pool
    )
    try:
        weight.grad = torch.ones(1 << 20)
        for _ in range(2):  # the first leaves all on the drive
            optimizer.step()
        assert 0 < optimizer.report().resident_bytes < 4 << 20
    finally:
        optimizer.close()


def test_objects_that_save_activations_share_their_files_also_with_an_automatic_budget(tmp_path: Path) -> None:
    for budget in ("auto", "25%", "1GB"):
        options: dict[str, Any] = {"memory_budget": budget, "min_bytes": "1KB"}
        one, other = (deepnvme.save_on_disk(tmp_path / "activations", **options) for _ in range(2))
        weight = torch.ones(1000, requires_grad=True)
        with one:
            loss = (weight * weight).exp().sum()
        loss.backward()
        assert other.report() == one.report()
        assert other.report().saved_bytes > 0
        one.close()
