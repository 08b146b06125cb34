"""``Engine.scatter`` writes rows to records of a file, and ``whole_sectors`` has them written directly within a page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deepnvme


@pytest.mark.parametrize("record", [1, 100, 512, 1000, 4096, 6000])
@pytest.mark.parametrize("base", [0, 7, 512])
def test_records_are_written_where_their_numbers_say(drive: Path, engine: deepnvme.Engine, record: int, base: int) -> None:
    content = torch.randint(0, 256, (100, record), dtype=torch.uint8)
    (drive / "file").write_bytes(b"x" * base + content.numpy().tobytes() + b"tail")
    ids = torch.randperm(100)[:60].view(6, 10)
    values = torch.randint(0, 256, (6, 10, record), dtype=torch.uint8)
    assert engine.scatter(drive / "file", ids, values, base=base).result() == values.nbytes
    content[ids] = values
    assert (drive / "file").read_bytes() == b"x" * base + content.numpy().tobytes() + b"tail"
    found = torch.empty_like(values)
    engine.gather(drive / "file", ids, found, base=base).result()
    assert torch.equal(found, values)


def test_what_is_no_record_is_refused_before_anything_is_written(drive: Path, engine: deepnvme.Engine) -> None:
    (drive / "file").write_bytes(b"content")
    values = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="-1"):
        engine.scatter(drive / "file", torch.tensor([0, -1]), values)
    with pytest.raises(ValueError, match="shape of ids"):
        engine.scatter(drive / "file", torch.tensor([0, 1, 2]), values)
    with pytest.raises(ValueError, match="values has rows"):
        engine.scatter(drive / "file", torch.tensor([0, 1]), values, record_size=5)
    with pytest.raises(TypeError):
        engine.scatter(drive / "file", torch.tensor([0.0, 1.0]), values)
    with pytest.raises(ValueError, match=r"largest file offset|must be in"):
        engine.scatter(drive / "file", torch.tensor([0, 1 << 60]), values)
    assert (drive / "file").read_bytes() == b"content"
    with engine.open(drive / "file") as file, pytest.raises((ValueError, OSError)):
        engine.scatter(file, torch.tensor([0, 1]), values)


def test_whole_sectors_of_a_page_are_written_directly(drive: Path, engine: deepnvme.Engine) -> None:
    with engine.open(drive / "file", "x+", whole_sectors=True) as file:
        if file.sector_size not in (512, 1024, 2048):
            pytest.skip(f"needs a drive with sectors smaller than a page, got {file.sector_size}")
        sector = file.sector_size
        values = engine.empty_pinned((100, sector), torch.uint8)
        values.random_(0, 256)
        before = engine.stats().bytes_direct
        engine.scatter(file, torch.arange(1, 200, 2), values).result()
        assert engine.stats().bytes_direct - before == values.nbytes
        found = engine.empty_pinned((100, sector), torch.uint8)
        engine.gather(file, torch.arange(1, 200, 2), found).result()
        assert engine.stats().bytes_direct - before == 2 * values.nbytes
    assert torch.equal(found, values)
    content = torch.frombuffer(bytearray((drive / "file").read_bytes()), dtype=torch.uint8).view(200, sector)
    assert torch.equal(content[1::2], values)
    assert not content[::2].any()
