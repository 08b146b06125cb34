"""The command line of ds_nvme_tune: one line for what goes wrong, nothing left behind, and an output that others can read."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from deepnvme.drives.aio_config import AioConfig
from deepnvme.tools.tune import ds_nvme_tune as program
from deepnvme.tools.tune import tuner

from ...support.disks import MIB, Disk
from ...support.interpreters import Interpreters
from ...support.patience import until
from .conftest import Command, Ran

# Twelve settings: more than the table has rows.
SWEEP = {"block_size": ["256K"], "queue_depth": [*range(1, 13)], "sequential_requests": [True, False]}


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """A sweep file of one setting."""
    path = tmp_path / "few.json"
    path.write_text('{"block_size": ["1M"], "queue_depth": [8]}')
    return path


@pytest.fixture
def many(tmp_path: Path) -> Path:
    path = tmp_path / "many.json"
    path.write_text(json.dumps(SWEEP))
    return path


# -- refused before a byte is written ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--no_read", "--no_write"], "nothing to measure"),
        (["--gds"], "give --gpu"),
        (["--block_size", "1M"], "--block_size"),
        (["--no_rea"], "--no_rea"),
        (["--io_size", "many"], "'many'"),
        (["--loops", "0"], "'0'"),
        (["--seconds", "-1"], "--seconds"),
        (["--output", "/nowhere/report.html"], "there is no directory '/nowhere'"),
        (["--output", "/tmp"], "'/tmp' is a directory"),
        (["--json", ""], "is a directory"),
        (["--output", "-"], "must be a file"),
        (["--log_dir", ""], "must be a directory"),
        (["--log_dir", "/dev/null"], "'/dev/null' is not a directory"),
        (["--nvme_dir", ""], "--nvme_dir"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_one_line_and_status_2(ds_nvme_tune: Command, drive: Path, options: list[str], told: str) -> None:
    ran = ds_nvme_tune(*options, "--nvme_dir", drive)
    assert told in ran.refusal(2)
    assert ran.out == ""
    assert not [*drive.iterdir()]


def test_a_missing_folder_is_named(ds_nvme_tune: Command, drive: Path, few: Path) -> None:
    told = ds_nvme_tune("--nvme_dir", drive, drive / "missing", "--sweep_config", few).refusal(1)
    assert f"'{drive / 'missing'}'" in told
    assert not [*drive.iterdir()]


@pytest.mark.root
def test_a_disk_that_is_too_small_is_told_before_anything_is_written(ds_nvme_tune: Command, small_disk: Disk) -> None:
    before = small_disk.bytes_free()
    told = ds_nvme_tune("--nvme_dir", small_disk.path, "--io_size", "64M").refusal(1)
    assert "smaller --io_size" in told
    assert small_disk.bytes_free() == before
    assert [each.name for each in small_disk.path.iterdir()] == ["lost+found"]


@pytest.mark.parametrize("options", [["--gpu"], ["--gpu", "--gds"]], ids=" ".join)
def test_a_gpu_that_is_not_there_is_told(
    ds_nvme_tune: Command, drive: Path, few: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = ds_nvme_tune("--nvme_dir", drive, "--io_size", "1M", "--sweep_config", few, *options).refusal(1)
    assert "gds" in told or "no CUDA device" in told
    assert not [*drive.iterdir()]


def test_an_error_of_a_transfer_is_one_line(
    ds_nvme_tune: Command, drive: Path, few: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **more: object) -> None:
        raise OSError(5, "Input/output error\nand a second line", "tensor")

    monkeypatch.setattr(tuner, "search", fail)
    told = ds_nvme_tune("--nvme_dir", drive, "--io_size", "1M", "--sweep_config", few).refusal(1)
    assert "Input/output error" in told
    assert not [*drive.iterdir()]


def test_results_are_told_although_a_file_for_them_cannot_be_written(ds_nvme_tune: Command, drive: Path, few: Path) -> None:
    ran = ds_nvme_tune("--nvme_dir", drive, "--io_size", "1M", "--seconds", 1, "--sweep_config", few, "--json", "/dev/full")
    assert "No space left on device: '/dev/full'" in ran.refusal(1)
    assert "Best performance (GB/sec)" in ran.out


# -- interrupts --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, "laying out a file"), (signal.SIGTERM, "the final")])
def test_an_interrupt_is_one_line_and_removes_the_files(
    interpreters: Interpreters, drive: Path, many: Path, number: int, step: str
) -> None:
    stderr = interpreters.stdout().with_name("stderr")
    size = "512M" if step == "laying out a file" else "4M"
    child = interpreters.start(f"""
        from deepnvme.tune.sweep import main
        main(["--nvme_dir", {str(drive)!r}, "--io_size", {size!r}, "--seconds", "60", "--sweep_config", {str(many)!r}])
    """)
    until(lambda: step in stderr.read_text(), f"that the program says {step!r}")
    os.kill(child, number)
    ended = interpreters.wait(child)
    assert "interrupted; its files are removed" in Ran(ended.returncode, ended.stdout, ended.stderr).refusal(130)
    assert "Best performance" not in ended.stdout
    assert not [*drive.iterdir()]


# -- what it prints ----------------------------------------------------------------------------------------------------


def block_of(out: str) -> dict[str, Any]:
    """What stands after the line that DeepSpeed's tuner prints, to the end."""
    block: dict[str, Any] = json.loads(out[re.search(r"^Best performance .*$", out, re.MULTILINE).end() :])  # type: ignore[union-attr]
    return block


@dataclass(frozen=True)
class Written:
    """A run with all outputs."""

    out: str
    err: str
    document: dict[str, Any]
    directory: Path


@pytest.fixture(scope="module")
def written(io_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Twelve settings, measured once for all tests that only look."""
    directory = tmp_path_factory.mktemp("tuned")
    (directory / "many.json").write_text(json.dumps(SWEEP))
    out, err = (directory / name for name in ("out", "err"))
    with tempfile.TemporaryDirectory(dir=io_dir) as drive, out.open("w") as stdout, err.open("w") as stderr:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            patch.setattr(sys, "stderr", stderr)
            measured = ["--io_size", "4M", "--seconds", "1", "--sweep_config", str(directory / "many.json")]
            written = ["--json", directory / "tuned.json", "--log_dir", directory / "logs", "--output", directory / "report.html"]
            program.main(["--nvme_dir", drive, *measured, *map(str, written)])
        assert not os.listdir(drive)
    document = json.loads((directory / "tuned.json").read_text())
    return Written(out.read_text(), err.read_text(), document, directory)


def test_the_best_performance_is_told_as_deepspeed_tells_it(written: Written) -> None:
    line = next(line for line in written.out.splitlines() if line.startswith("Best"))
    match = re.fullmatch(r"Best performance \(GB/sec\): read = +(\d+\.\d\d), write = +(\d+\.\d\d)", line)
    assert match is not None, line
    best = written.document["searches"][-1]["best"]
    for shown, operation in zip(match.groups(), ("read", "write"), strict=True):
        assert float(shown) == pytest.approx(best[operation]["gb_per_second"] * 1e9 / 2**30, abs=0.006)


def test_the_block_comes_last_and_makes_a_handle(written: Written, op: ModuleType) -> None:
    document = block_of(written.out)
    assert [*document] == ["aio"]
    block = document["aio"]
    assert {"block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events"} == block.keys()
    assert block["single_submit"] is False
    assert block["overlap_events"] is True
    handle = op.aio_handle(**block)
    assert (handle.get_block_size(), handle.get_queue_depth()) == (block["block_size"], block["queue_depth"])
    assert handle.get_intra_op_parallelism() == block["intra_op_parallelism"]
    assert AioConfig.from_deepspeed(document).to_deepspeed() == document
    assert written.document["aio"] == block


def test_of_twelve_settings_the_six_finalists_are_shown_and_the_best_is_marked(written: Written) -> None:
    rows = [line for line in written.out.splitlines() if re.match(r"[* ]+256K +\d", line)]
    assert len(rows) == 6
    assert len([row for row in rows if row.lstrip().startswith("*")]) == 1
    assert re.search(r"^  measured in turn in \d+ passes of [1-4]M$", written.out, re.MULTILINE)
    assert "eliminated before: 6 in round 1 (--verbose lists them)" in written.out


# -- bytes written -----------------------------------------------------------------------------------------------------


def test_what_will_be_written_is_said_before_anything_else(written: Written) -> None:
    first = written.err.splitlines()[0]
    assert re.fullmatch(r"ds_nvme_tune: writes up to 28 GiB to .*: --max-writes SIZE allows less, .*", first)


def test_help_says_that_it_writes_and_how_much(ds_nvme_tune: Command) -> None:
    told = " ".join(ds_nvme_tune("--help").out.split())
    assert "It writes to the drive: at most 28G for each search (--max-writes)" in told
    assert "Sizes: K, M, G and T are powers of 1024" in told


@pytest.mark.parametrize("option", ["--max-writes", "--max_writes"])
def test_no_more_is_written_than_allowed(ds_nvme_tune: Command, drive: Path, many: Path, option: str) -> None:
    ran = ds_nvme_tune("--nvme_dir", drive, "--io_size", "4M", "--seconds", 60, "--sweep_config", many, option, "500M", "--json")
    assert ran.status == 0
    assert "writes up to 500 MiB to " in ran.err
    document = json.loads(ran.out)
    assert document["write_limit"] == 500 << 20
    assert 400 << 20 < document["bytes_written"] <= 500 << 20
    assert document["searches"][0]["shortened"] is True
    assert document["seconds"] < 30


def test_a_limit_that_is_too_low_is_refused_before_a_byte_is_written(ds_nvme_tune: Command, drive: Path, many: Path) -> None:
    told = ds_nvme_tune("--nvme_dir", drive, "--io_size", "4M", "--sweep_config", many, "--max-writes", "20M").refusal(1)
    assert "--max-writes: 12 settings need at least" in told
    assert not [*drive.iterdir()]


def test_a_limit_that_is_too_low_is_refused_before_the_op_is_compiled(
    ds_nvme_tune: Command, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "load_async_io", lambda: pytest.fail("the op is loaded"))
    told = ds_nvme_tune("--nvme_dir", drive, "--max-writes", "1G").refusal(1)
    assert re.search(r"--max-writes: \d+ settings need at least \d+ bytes, got 1073741824", told)
    assert not [*drive.iterdir()]


def test_a_low_limit_leaves_out_backends(ds_nvme_tune: Command, drive: Path) -> None:
    """Rather than to be refused."""
    options = ("--nvme_dir", drive, "--io_size", "1M", "--seconds", 1, "--no_read", "--json")
    ran = ds_nvme_tune(*options, "--max-writes", "40M")
    assert ran.status == 0
    assert "leaving out threads: --max-writes is too low to try it as well" in ran.err
    document = json.loads(ran.out)
    assert document["bytes_written"] <= 40 << 20
    (search,) = document["searches"]
    assert "threads" not in {each["backend"] for each in search["results"]}


@pytest.mark.parametrize("more", [0, 40 << 20])
def test_several_folders_share_the_limit(ds_nvme_tune: Command, drive: Path, few: Path, more: int) -> None:
    folders = [drive / "a", drive / "b"]
    for folder in folders:
        folder.mkdir()
    options = ("--nvme_dir", *folders, "--io_size", "1M", "--seconds", 5, "--sweep_config", few, "--json")
    least = int(re.search(r"need at least (\d+) bytes", ds_nvme_tune(*options, "--max-writes", 1).refusal(1))[1])  # type: ignore[index]
    ran = ds_nvme_tune(*options, "--max-writes", least + more)
    assert ran.status == 0
    assert json.loads(ran.out)["bytes_written"] <= least + more


def test_reads_alone_announce_the_file_only(ds_nvme_tune: Command, drive: Path, few: Path) -> None:
    ran = ds_nvme_tune("--nvme_dir", drive, "--io_size", "1M", "--seconds", 1, "--sweep_config", few, "--no_write")
    assert ran.err.startswith(f"ds_nvme_tune: writes 1 MiB to {drive}, to be read\n")


def test_the_document_has_every_setting(written: Written) -> None:
    (search,) = written.document["searches"]
    assert sorted(each["queue_depth"] for each in search["results"]) == SWEEP["queue_depth"]
    assert search["best"] in search["results"]


def test_the_logs_and_the_report_are_written(written: Written) -> None:
    assert (written.directory / "report.html").read_text().startswith("<!DOCTYPE html>")
    names = {path.name for path in (written.directory / "logs" / "_aio_bench_read_logs").iterdir()}
    assert names == {f"read_block_overlap_ftd1_d{depth}_bs256K_p1.txt" for depth in range(1, 13)}


def test_each_step_is_a_line(written: Written) -> None:
    announced, *lines, hint = written.err.splitlines()
    assert "writes up to" in announced
    assert "--save_profile" in hint
    assert all(re.match(r" +\d+ % ", line) for line in lines)
    assert len(lines) == len(set(lines)) < 12


@pytest.mark.slow
def test_verbose_shows_all_settings(ds_nvme_tune: Command, drive: Path, many: Path) -> None:
    ran = ds_nvme_tune("--nvme_dir", drive, "--io_size", "1M", "--seconds", 1, "--sweep_config", many, "--verbose", "--no_write")
    assert ran.status == 0
    assert len(re.findall(r"^[* ]+256K +\d", ran.out, re.MULTILINE)) == 12


@pytest.mark.parametrize(("option", "there", "missing"), [("--no_read", "write", "read"), ("--no_write", "read", "write")])
def test_only_what_was_measured_is_told(
    ds_nvme_tune: Command, drive: Path, few: Path, option: str, there: str, missing: str
) -> None:
    ran = ds_nvme_tune("--nvme_dir", drive, "--io_size", "1M", "--seconds", 1, "--sweep_config", few, option)
    assert ran.status == 0
    assert re.search(rf"^Best performance \(GB/sec\): {there} = +\d+\.\d\d$", ran.out, re.MULTILINE)
    assert f"{missing} p99" not in ran.out


def test_json_without_a_file_is_all_that_stdout_has(ds_nvme_tune: Command, drive: Path, few: Path) -> None:
    ran = ds_nvme_tune("--nvme_dir", drive, "--io_size", "1M", "--seconds", 1, "--sweep_config", few, "--json")
    assert ran.status == 0
    document = json.loads(ran.out)
    assert AioConfig.from_deepspeed(document) == AioConfig(block_size=MIB, queue_depth=8)
    assert document["searches"][0]["results"][0]["write"] is not None


def test_several_folders_are_told_alone_and_together(ds_nvme_tune: Command, drive: Path, few: Path) -> None:
    folders = [drive / "a", drive / "b"]
    for folder in folders:
        folder.mkdir()
    written = drive / "tuned.json"
    options = ("--io_size", "1M", "--seconds", 1, "--sweep_config", few, "--no_write", "--json", written)
    ran = ds_nvme_tune("--nvme_dir", *folders, folders[0], *options)
    assert ran.status == 0
    announced = ran.out.splitlines()[0].removeprefix("Running DeepNVMe performance tuning on ")
    assert ast.literal_eval(announced) == [str(folder) for folder in folders]
    paths = [str(folder.resolve()) for folder in folders]
    rows = re.findall(r"^(alone|together) +(\d+\.\d\d)   (.*)$", ran.out, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["alone", "alone", "together"]
    assert [where for _, _, where in rows] == [*paths, " + ".join(paths)]
    searches = json.loads(written.read_text())["searches"]
    assert [[each["path"] for each in search["folders"]] for search in searches] == [[paths[0]], [paths[1]], paths]
    assert [f"{search['best']['read']['gb_per_second']:.2f}" for search in searches] == [rate for _, rate, _ in rows]
    assert not any([*folder.iterdir()] for folder in folders)


def test_loops_multiply_the_time(ds_nvme_tune: Command, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(order: tuner.Order, progress: object) -> None:
        raise RuntimeError(f"{order.seconds} s, {order.io_size} bytes")

    monkeypatch.setattr(program, "tune", stop)
    assert "50 s, 419430400 bytes" in ds_nvme_tune("--nvme_dir", drive).refusal(1)
    assert "60 s, " in ds_nvme_tune("--nvme_dir", drive, "--loops", 3, "--seconds", 20).refusal(1)
