"""The logs are found and understood by what reads DeepSpeed's, here written anew from the names and lines it looks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deepnvme.drives.aio_config import AioConfig
from deepnvme.tools.tune.ds_nvme_tune import write_logs
from deepnvme.tools.tune.folder import FolderFacts
from deepnvme.tools.tune.results import Figures, Result, Search, Tuning

DRIVE = FolderFacts("/mnt/nvme0", "ext4", "/dev/nvme0n1", True, "ext4, takes direct I/O")
GIB = 1 << 30
KIB = 1 << 10


def result(read: float | None, write: float | None, **setting: object) -> Result:
    def figures(rate: float | None) -> Figures | None:
        return None if rate is None else Figures(rate, 0.02, 2e-3)

    return Result(AioConfig.model_validate(setting), "io_uring", figures(read), figures(write), 1)


def tuning(*results: Result, folders: int = 1) -> Tuning:
    search = Search((DRIVE,) * folders, results[0], "the fastest", 1, 1.0, results)
    return Tuning(400 << 20, 1.0, 0, (search,))


Key = tuple[str, str, str, int, int, int]


def read_back(directory: Path, operation: str) -> dict[Key, float]:
    """(submission, events, folders, depth, block size, workers) and the rate in units of 1024^3 bytes a second."""
    found: dict[Key, float] = {}
    for path in (directory / f"_aio_bench_{operation}_logs").iterdir():
        operation_named, submission, events, folders, depth, block, workers = path.stem.split("_")
        assert operation_named == operation
        assert path.suffix == ".txt"
        units = {"K": KIB, "M": KIB**2}
        size = int(block[2:-1]) * units[block[-1]] if block[-1] in units else int(block[2:])
        assert (block[:2], depth[0], workers[0]) == ("bs", "d", "p")
        rates = [line for line in path.read_text().splitlines() if line.startswith(f"E2E {operation.capitalize()} Speed")]
        assert len(rates) == 1
        found[submission, events, folders, int(depth[1:]), size, int(workers[1:])] = float(rates[0].split()[-2])
    return found


def test_each_setting_has_a_log_for_each_direction(tmp_path: Path) -> None:
    found = tuning(
        result(2.0, 1.0, block_size=128 * KIB, queue_depth=32),
        result(4.0, 3.0, block_size=8 << 20, queue_depth=128, intra_op_parallelism=8, single_submit=True),
        result(5.0, 6.0, block_size=1025, overlap_events=False),
    )
    write_logs(found, tmp_path / "made" / "anew")
    expected = {
        ("block", "overlap", "ftd1", 32, 128 * KIB, 1): 2.0,
        ("single", "overlap", "ftd1", 128, 8 << 20, 8): 4.0,
        ("block", "sequential", "ftd1", 8, 1025, 1): 5.0,
    }
    read = read_back(tmp_path / "made" / "anew", "read")
    assert read == {key: pytest.approx(rate * 1e9 / GIB) for key, rate in expected.items()}
    assert read_back(tmp_path / "made" / "anew", "write").keys() == read.keys()


@pytest.mark.parametrize("size", [512, 1 << 10, 1 << 20, 1536 * KIB, 1 << 30, 513])
def test_every_block_size_is_one_that_deepspeed_reads(tmp_path: Path, size: int) -> None:
    write_logs(tuning(result(1.0, 1.0, block_size=size)), tmp_path)
    (key,) = read_back(tmp_path, "read")
    assert key[4] == size


def test_of_two_backends_the_faster_one_is_logged(tmp_path: Path) -> None:
    write_logs(tuning(result(1.0, 4.0), result(2.0, 3.0, backend="threads")), tmp_path)
    assert [*read_back(tmp_path, "read").values()] == [pytest.approx(2e9 / GIB)]
    assert [*read_back(tmp_path, "write").values()] == [pytest.approx(4e9 / GIB)]


def test_an_eliminated_setting_has_no_higher_rate_than_the_recommended_one(tmp_path: Path) -> None:
    """Its rate may be a fluke of its few transfers; what reads the logs chooses the highest."""
    best = replace(result(2.0, 2.0), rounds=2)
    faster_in_reads = replace(result(3.0, 1.0, queue_depth=16), rounds=2)
    fluke = result(99.0, 1.5, queue_depth=32)
    write_logs(tuning(best, faster_in_reads, fluke), tmp_path)
    rates = {key[3]: rate * GIB / 1e9 for key, rate in read_back(tmp_path, "read").items()}
    assert rates == {8: pytest.approx(2.0), 16: pytest.approx(3.0), 32: pytest.approx(2.0)}
    rates = {key[3]: rate * GIB / 1e9 for key, rate in read_back(tmp_path, "write").items()}
    assert rates[32] == pytest.approx(1.5)


@pytest.mark.parametrize(("rates", "there"), [((1.0, None), "read"), ((None, 1.0), "write")])
def test_a_direction_that_was_not_measured_has_no_logs(
    tmp_path: Path, rates: tuple[float | None, float | None], there: str
) -> None:
    write_logs(tuning(result(*rates)), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"_aio_bench_{there}_logs"]
