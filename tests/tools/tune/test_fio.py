"""--compare fio: fio does the same transfer, or one line says why it did not."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepnvme.tools.tune.measure.fio import (
    FioFailed,
    FioRange,
    FioSettings,
    can_move,
    huge_pages_needed,
    run,
    split_file,
    version,
)

from .conftest import Command

KIB, MIB = 1 << 10, 1 << 20
Fake = Callable[..., str]


@pytest.fixture
def program() -> str:
    found = shutil.which("fio")
    if found is None:
        pytest.skip("needs fio")
    return found


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts a program named fio into PATH, which prints, complains and ends as told, and notes its arguments in ``arguments``."""

    def made(output: str = "", errors: str = "", status: int = 0, says_version: bool = True) -> str:
        place = tmp_path / "fio"
        place.write_text(f"""#!{shlex.quote(sys.executable)} -S
import sys
if sys.argv[1:] == ["--version"] and {says_version}:
    print("fio-9.99")
    sys.exit()
with open({str(tmp_path / "arguments")!r}, "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
sys.stdout.write({output!r})
sys.stderr.write({errors!r})
sys.exit({status})
""")
        place.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return str(place)

    return made


def report(nbytes: int, **more: Any) -> str:
    moved = {
        "io_bytes": nbytes,
        "runtime": 20,
        "clat_ns": {"percentile": {"50.000000": 1_000_000, "99.000000": 3_000_000}},
        **more,
    }
    return json.dumps({"jobs": [{"write": moved, "usr_cpu": 10.0, "sys_cpu": 15.0, "job_runtime": 20}]})


def settings(program: str) -> FioSettings:
    return FioSettings(program, "libaio", 1 * MIB, 8, huge_pages=False)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_without_fio_there_is_nothing_to_compare_with(
    ds_io: Command, drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ran = ds_io("--folder", drive, "--io_size", "1M", "--compare", "fio")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == "ds_io: --compare fio: fio was not found; install your distribution's package of that name\n"
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize(("printed", "said"), [
    ({"status": 1, "errors": "fio: pid 7, no such engine\nmore\n"}, "fio ended with 1: fio: pid 7, no such engine"),
    ({"status": 1, "output": "said on stdout\n"}, "fio ended with 1: said on stdout"),
    ({"status": 3}, "fio ended with 3: no message"),
    ({"output": ""}, "cannot be read"),
    ({"output": "no document"}, "cannot be read"),
    ({"output": '{"jobs": ['}, "cannot be read"),
    ({"output": "{}"}, "cannot be read: KeyError('jobs')"),
    ({"output": '{"jobs": []}'}, "cannot be read"),
    ({"output": '{"jobs": [1]}'}, "cannot be read"),
    ({"output": report(MIB).replace("runtime", "walltime")}, "cannot be read"),
    ({"output": report(4096)}, "fio moved 4096 bytes of 1048576"),
    ({"status": 2, "errors": "unknown option", "says_version": False}, "fio ended with 2: unknown option"),
])  # fmt: skip
def test_what_fio_does_wrong_is_one_line_and_leaves_nothing(
    ds_io: Command, fake: Fake, drive: Path, printed: dict[str, Any], said: str
) -> None:
    fake(**printed)
    ran = ds_io("--folder", drive, "--io_size", "1M", "--loops", 1, "--compare", "fio")
    assert said in ran.refusal(1)
    assert ran.out == ""
    assert list(drive.iterdir()) == []


def test_a_fio_that_is_no_program_is_one_line(ds_io: Command, fake: Fake, drive: Path) -> None:
    Path(fake()).write_bytes(b"\0\0")
    ran = ds_io("--folder", drive, "--io_size", "1M", "--compare", "fio")
    assert (ran.status, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "fio" in ran.err


@pytest.mark.parametrize(("arguments", "said"), [
    (["--io_size", "4097"], "whole blocks only; give an --io_size that is a multiple of --block_size"),
    (["--io_size", "1M", "--block_size", "1000"], "whole blocks only"),
    (["--io_size", "1536K"], "whole blocks only"),
    (["--io_size", "1M", "--engine", "torch_io"], "leave out --engine and --gpu"),
    (["--io_size", "1M", "--engine", "aio_basic"], "leave out --engine and --gpu"),
])  # fmt: skip
def test_what_fio_cannot_do_is_told_before_anything_is_moved(
    ds_io: Command, fake: Fake, drive: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    fake()
    ran = ds_io("--folder", drive, "--compare", "fio", *arguments)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("ds_io: --compare fio: ")
    assert said in ran.err
    assert not (tmp_path / "arguments").exists()


# -- the same transfer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nbytes", "block", "count", "expected"), [
    (MIB, MIB, 1, [(0, MIB)]),
    (MIB, 4 * MIB, 8, [(0, MIB)]),
    (4 * MIB, MIB, 2, [(0, 2 * MIB), (2 * MIB, 2 * MIB)]),
    (3 * MIB, MIB, 2, [(0, MIB), (MIB, 2 * MIB)]),
    (3 * MIB + 1, MIB, 4, [(0, MIB), (MIB, MIB), (2 * MIB, MIB), (3 * MIB, 1)]),
])  # fmt: skip
def test_a_file_is_dealt_in_whole_blocks_without_gap_or_overlap(
    nbytes: int, block: int, count: int, expected: list[tuple[int, int]]
) -> None:
    assert [(piece.offset, piece.nbytes) for piece in split_file(Path("f"), nbytes, block, count)] == expected


@pytest.mark.parametrize(("nbytes", "block", "possible"), [
    (MIB, MIB, True), (4 * MIB, MIB, True), (512, MIB, True), (4 * KIB, MIB, True),
    (MIB + 512, MIB, False), (511, MIB, False), (1, 1, False), (1000, 500, False),
])  # fmt: skip
def test_fio_moves_whole_blocks_of_whole_sectors(nbytes: int, block: int, possible: bool) -> None:
    assert can_move(FioRange(Path("f"), 0, nbytes), block) is possible


def test_huge_pages_hold_what_is_under_way_and_one_more_for_each_piece() -> None:
    assert huge_pages_needed(FioSettings("fio", "libaio", MIB, 8, True), jobs=2, page=2 * MIB) == 2 * (4 + 1)
    assert huge_pages_needed(FioSettings("fio", "libaio", 4 * KIB, 1, True), jobs=1, page=2 * MIB) == 2


def test_a_report_is_read_by_fios_own_clocks(fake: Fake, tmp_path: Path) -> None:
    program = fake("note: both {iodepth} and {more}\n" + report(MIB + 4 * KIB))
    work = [FioRange(Path("/with:colon/f"), 0, MIB), FioRange(Path("/g"), MIB, 4 * KIB)]
    sample = run(settings(program), "write", work, fallocate="native", fsync=True)
    assert (sample.nbytes, sample.seconds, sample.gb_per_second) == (MIB + 4 * KIB, 0.02, (MIB + 4 * KIB) / 0.02 / 1e9)
    assert sample.cpu_seconds == pytest.approx(0.25 * 0.02)
    assert (sample.block_latency_p50, sample.block_latency_p99) == (0.001, 0.003)
    given = (tmp_path / "arguments").read_text().split()
    assert {"--rw=write", "--iodepth=8", "--direct=1", "--end_fsync=1", "--fallocate=native", "--group_reporting"} <= set(given)
    first, second = given.index("--name=job0"), given.index("--name=job1")
    assert given[first + 1 : second] == ["--filename=/with\\:colon/f", "--offset=0", f"--size={MIB}", f"--bs={MIB}"]
    assert given[second + 1 :] == ["--filename=/g", f"--offset={MIB}", f"--size={4 * KIB}", f"--bs={4 * KIB}"]


def test_a_run_too_short_for_fios_clock_took_one_millisecond(fake: Fake) -> None:
    program = fake(report(MIB, runtime=0, clat_ns={}))
    sample = run(settings(program), "write", [FioRange(Path("/f"), 0, MIB)], fallocate="none")
    assert (sample.seconds, sample.block_latency_p50) == (0.001, 0.0)


def test_the_ratio_is_ours_to_fios_loop_by_loop(ds_io: Command, fake: Fake, drive: Path, tmp_path: Path) -> None:
    fake(report(2 * MIB))
    ran = ds_io("--folder", drive, "--io_size", "2M", "--loops", 3, "--warmup_loops", 2, "--compare", "fio", "--json")
    assert (ran.status, ran.err) == (0, "")
    document = json.loads(ran.out)
    theirs = 2 * MIB / 0.02 / 1e9
    ratios = sorted(loop["gb_per_second"] / theirs for loop in document["loops"])
    assert document["fio"]["ratio"]["median"] == pytest.approx(ratios[1])
    assert document["fio"]["version"] == "fio-9.99"
    assert len(document["fio"]["samples"]) == 3
    assert len((tmp_path / "arguments").read_text().splitlines()) == 5, "the warm-up is fio's as well"


def test_the_real_fio_says_its_version(program: str) -> None:
    assert version(program).startswith("fio-")


def test_the_real_fio_refusing_is_an_error(program: str, drive: Path) -> None:
    (drive / "file").write_bytes(b"")
    with pytest.raises(FioFailed, match="fio ended with 1: "):
        run(settings(program), "read", [FioRange(drive / "file" / "below", 0, MIB)], fallocate="none")


@pytest.mark.parametrize("arguments", [
    ["--io_size", "4M"],
    ["--io_size", "4M", "--read"],
    ["--io_size", "256K", "--read"],
    ["--io_size", "1536K", "--io_parallel", "2", "--fsync"],
    ["--io_size", "1M", "--different_file_each_iteration"],
])  # fmt: skip
def test_the_real_fio_moves_the_same(ds_io: Command, program: str, drive: Path, arguments: list[str]) -> None:
    folder = drive / "with:colon"
    folder.mkdir()
    ran = ds_io("--folder", folder, "--loops", 2, "--warmup_loops", 0, "--compare", "fio", "--json", "-", *arguments)
    if "ended with" in ran.err and "nvalid argument" in ran.err:
        pytest.skip("needs a file system that takes direct I/O")
    assert (ran.status, ran.err) == (0, "")
    document = json.loads(ran.out)
    assert [sample["nbytes"] for sample in document["fio"]["samples"]] == [document["job"]["io_size"]] * 2
    assert list(folder.iterdir()) == []


def test_the_text_has_fios_rate_and_the_ratio(ds_io: Command, fake: Fake, drive: Path) -> None:
    fake(report(2 * MIB))
    ran = ds_io("--folder", drive, "--io_size", "2M", "--loops", 2, "--compare", "fio")
    lines = {line[:15].strip(): line[15:] for line in ran.out.splitlines()}
    assert lines["fio"].startswith("0.10 GB/s, 2.384 CPU s/GB (fio-9.99, ")
    assert "loop by loop" in lines["ours / fio"]
