"""The rows in memory: nearly as many hits as with the best choice, and no more memory than was given."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.tables import Table

from ..support.interpreters import Interpreters


def zipf(rows: int, count: int, seed: int) -> torch.Tensor:
    """Numbers of rows, of which some are used much more often than others: Zipf(1.05), in an order of their own."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.arange(1, rows + 1, dtype=torch.float64) ** -1.05
    drawn = torch.searchsorted((weights / weights.sum()).cumsum(0), torch.rand(count, dtype=torch.float64, generator=generator))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    return order[drawn.clamp_(max=rows - 1)]


@pytest.mark.parametrize("share", [0.1, 0.02], ids=["each row has its count", "rows share counts"])
def test_the_hit_rate_is_within_two_points_of_the_best_static_choice(drive: Path, share: float) -> None:
    rows = 100_000
    with Table.create(drive / "table", rows, (16,), torch.uint8, updatable=False, memory_budget=0) as table:
        path = drive / "table"
    with Table.open(path, memory_budget=int(rows * share * 64)) as table:
        slots = table.stats().cache_capacity
        trace = zipf(rows, 2_000_000, 5)
        for ids in trace[:1_500_000].split(8192):
            table.read(ids)
        before = table.stats()
        measured = trace[1_500_000:]
        for ids in measured.split(8192):
            table.read(ids)
        after = table.stats()
    hit_rate = (after.hits - before.hits) / len(measured)
    best = torch.bincount(measured, minlength=rows).sort(descending=True).values[:slots].sum().item() / len(measured)
    ideal = torch.arange(1, rows + 1, dtype=torch.float64) ** -1.05
    best = min(best, float(ideal[:slots].sum() / ideal.sum()))  # who chooses has not seen what comes
    assert hit_rate > best - 0.02, f"{hit_rate:.3f} with {slots} rows, and {best:.3f} with the best choice"


@pytest.mark.parametrize("scan", [Table.read, partial(Table.read_records, keep=False)], ids=["read", "read_records"])
def test_rows_that_are_used_often_stay_when_all_are_read_once(scan: Any, drive: Path) -> None:
    with Table.create(drive / "table", 20_000, (16,), torch.float32, updatable=False, memory_budget=0):
        pass
    with Table.open(drive / "table", memory_budget=200 << 10) as table:
        hot = torch.randperm(20_000)[:500]
        for _ in range(4):
            table.read(hot)
        scan(table, torch.arange(20_000))
        before = table.stats()
        table.read(hot)
        assert table.stats().hits - before.hits > 450


_READ_ALL = """
import torch
from deepnvme import Engine
from deepnvme.tables import Table
from deepnvme.tables.reading import StagingPool
def pages(kind):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before, code = pages("VmRSS"), pages("RssFile")
budget = 8 << 20
with Table.open({path!r}, writable={writable}, memory_budget=budget) as table:
    for turn in range(2):
        for number, ids in enumerate(torch.arange(len(table)).split(512)):
            rows = table.read(ids)
            if {writable}:
                table.write(ids, rows)
                if number % 32 == 0:
                    table.commit()
print(pages("VmHWM") - before - (pages("RssFile") - code) - budget)
"""


@pytest.mark.parametrize("writable", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_memory_stays_within_the_budget(interpreters: Interpreters, drive: Path, writable: bool) -> None:
    path = drive / "table"
    Table.create(
        path, 1 << 15, (2048,), torch.uint8, updatable=writable, values=lambda b, e: torch.ones(e - b, 2048).byte()
    ).close()
    more = int(interpreters.run(_READ_ALL.format(path=str(path), writable=writable)).check())
    # Seen: 35 to 38 MiB without writes, 52 to 67 with. Why the latter varies from run to run was not looked into.
    assert more < 80 << 20, f"{more >> 20} MiB more than the budget"


@pytest.mark.parametrize("width", [16, 100_000], ids=["small rows", "rows of 400 KB"])
def test_tables_work_with_little_staging_memory(drive: Path, width: int) -> None:
    values = torch.arange(40 * width, dtype=torch.float32).view(40, width)
    for staging_bytes in (0, 1 << 20):
        path = drive / f"{staging_bytes}"
        with Table.from_tensor(path, values, updatable=True, memory_budget=0, staging_bytes=staging_bytes) as table:
            assert table.staging_bytes == staging_bytes
            table.prefetch(torch.arange(40))
            assert torch.equal(table.read(torch.arange(40)), values)
            table.write(torch.arange(40), values + 1)
            table.commit()
        with Table.open(path, staging_bytes=staging_bytes) as table:
            assert torch.equal(table.read(torch.arange(40)), values + 1)
