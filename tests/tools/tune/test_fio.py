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

from deepnvme.tools.tune.fio import FioFailed, FioTransfer, version

from .conftest import Command

MIB = 1 << 20
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
    moved = {"io_bytes": nbytes, "runtime": 20, **more}
    return json.dumps({"jobs": [{"write": moved, "usr_cpu": 10.0, "sys_cpu": 15.0, "job_runtime": 20}]})


def transfer(program: str, paths: list[Path], nbytes: int, **more: Any) -> FioTransfer:
    return FioTransfer(program, "libaio", more.pop("operation", "write"), paths, nbytes, MIB, 8, **more)


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
    ({"output": "{}"}, "cannot be read: KeyError('jobs')"),
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
    (["--io_size", "4097"], "whole blocks only; give an --io_size that is a multiple of --block_size for each worker"),
    (["--io_size", "1M", "--block_size", "1000"], "whole blocks only"),
    (["--io_size", "1536K"], "whole blocks only"),
    (["--io_size", "3M", "--io_parallel", "2"], "whole blocks only"),
    (["--io_size", "1M", "--engine", "torch_io"], "leave out --engine and --gpu"),
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


def test_a_report_is_read_by_fios_own_clocks(fake: Fake, tmp_path: Path) -> None:
    program = fake("note: both {iodepth} and {more}\n" + report(8 * MIB))
    work = transfer(program, [Path("/with:colon/f"), Path("/g")], 4 * MIB, jobs=2, fsync=True)
    found = work.run(fresh=True)
    assert (found.nbytes, found.seconds, found.gb_per_second) == (8 * MIB, 0.02, 8 * MIB / 0.02 / 1e9)
    assert found.cpu_seconds == pytest.approx(0.25 * 0.02)
    given = (tmp_path / "arguments").read_text().split()
    assert {"--rw=write", "--iodepth=8", "--direct=1", "--end_fsync=1", "--fallocate=native", "--group_reporting"} <= set(given)
    assert {"--numjobs=2", f"--size={2 * MIB}", f"--offset_increment={2 * MIB}", f"--bs={MIB}"} <= set(given)
    assert given[-4:] == ["--name=job0", "--filename=/with\\:colon/f", "--name=job1", "--filename=/g"]


def test_a_run_too_short_for_fios_clock_took_one_millisecond(fake: Fake) -> None:
    assert transfer(fake(report(MIB, runtime=0)), [Path("/f")], MIB).run().seconds == 0.001


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
        transfer(program, [drive / "file" / "below"], MIB, operation="read").run()


@pytest.mark.parametrize("arguments", [
    ["--io_size", "4M"],
    ["--io_size", "4M", "--read"],
    ["--io_size", "256K", "--read"],
    ["--io_size", "4M", "--io_parallel", "2", "--fsync"],
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
