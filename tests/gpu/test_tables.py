"""Rows of tables that go to a device, and rows that are trained by what the device computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme.nn import EmbeddingBagOnDisk, EmbeddingOnDisk
from deepnvme.tables import RowOptimizer, RowWiseAdagrad, Table

from ..support.embedding_ids import DIM, ROWS, SMALL, some_ids

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")]


@pytest.fixture
def values() -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(4))


@pytest.fixture
def table(drive: Path, values: torch.Tensor) -> Iterator[Table]:
    with Table.from_tensor(drive / "table", values, memory_budget=SMALL) as table:
        yield table


@pytest.mark.parametrize("shape", [(500,), (3, 70), (), (0,), (2, 0)], ids=str)
def test_rows_come_to_the_device(shape: tuple[int, ...], table: Table, values: torch.Tensor, device: torch.device) -> None:
    ids = some_ids(*shape) if shape else torch.tensor(7)
    out = torch.full((*shape, DIM), torch.nan, device=device)
    assert table.read(ids.to(device), out) is out
    assert torch.equal(out.cpu(), values[ids])


def test_rows_come_to_memory_of_the_device_that_is_laid_out_otherwise(
    table: Table, values: torch.Tensor, device: torch.device
) -> None:
    ids, whole = some_ids(64), torch.zeros(2 * DIM, 64, device=device)
    table.read(ids, whole[::2].t())
    assert torch.equal(whole[::2].t().cpu(), values[ids])
    assert not whole[1::2].any()


def test_several_reads_at_once_while_the_device_is_busy(table: Table, values: torch.Tensor, device: torch.device) -> None:
    batches = [some_ids(200) for _ in range(6)]
    out = torch.zeros(6, 200, DIM, device=device)
    futures = [table.read_async(ids, into) for ids, into in zip(batches, out, strict=True)]
    torch.cuda._sleep(50_000_000)
    for future in futures:
        future.result()
    assert torch.equal(out.cpu(), values[torch.stack(batches)])


def test_rows_are_written_from_the_device_as_its_stream_leaves_them(
    drive: Path, values: torch.Tensor, device: torch.device
) -> None:
    with Table.create(drive / "table", ROWS, DIM, torch.float32, memory_budget=SMALL) as table:
        rows = torch.zeros(ROWS, DIM, device=device)
        torch.cuda._sleep(50_000_000)
        rows += values.to(device)
        table.write(torch.arange(ROWS, device=device), rows)
        table.commit()
        assert torch.equal(table.read(torch.arange(ROWS)), values)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam, RowWiseAdagrad])
def test_twenty_steps_are_those_of_torchs_embedding_on_the_device(kind: Any, drive: Path, device: torch.device) -> None:
    torch.manual_seed(5)
    ours = EmbeddingOnDisk(ROWS, DIM, path=drive / "table", optimizer=kind, memory_budget=SMALL)
    torch.manual_seed(5)
    theirs = nn.Embedding(ROWS, DIM, sparse=True).to(device)
    torchs, mine = kind(theirs.parameters(), lr=0.1), RowOptimizer(ours, kind, lr=0.1)
    for _ in range(20):
        ids, factor = some_ids(4, 16).to(device), torch.randn(4, 16, DIM, device=device)
        for module, optimizer in ((theirs, torchs), (ours, mine)):
            out = module(ids)
            assert out.device == device
            (out * factor).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    mine.commit()
    found, wanted = ours.state_dict()["weight"], theirs.weight.detach().cpu()
    if kind is torch.optim.SGD:  # which adds a row's gradients in the order in which the device comes to them
        torch.testing.assert_close(found, wanted)
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_have_the_bits_of_torchs_on_the_device(mode: Any, drive: Path, device: torch.device) -> None:
    torch.manual_seed(5)
    ours = EmbeddingBagOnDisk(ROWS, DIM, mode=mode, path=drive / "table", memory_budget=SMALL)
    torch.manual_seed(5)
    theirs = nn.EmbeddingBag(ROWS, DIM, mode=mode).to(device)
    ids = some_ids(32, 6).to(device)
    with torch.no_grad():
        assert torch.equal(ours(ids), theirs(ids))


def test_ids_of_the_device_that_are_out_of_range_are_named(table: Table, device: torch.device) -> None:
    ids = torch.tensor([[0, 1], [2, ROWS]], device=device)
    with pytest.raises(IndexError, match=rf"ids\[1, 1\] is {ROWS}"):
        table.read(ids, torch.empty(2, 2, DIM, device=device))
