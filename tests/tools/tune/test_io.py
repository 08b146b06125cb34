"""ds_io as people and programs run it: DeepSpeed's options and lines, one line for what goes wrong, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.tools.tune import ds_io as program
from deepnvme.tools.tune import transfers
from deepnvme.tools.tune.job import Job

from ...support.disks import Disk
from ...support.interpreters import REPOSITORY
from ...support.patience import PATIENCE, until
from .conftest import Command, Ran

SCRIPT = (str(REPOSITORY / "bin" / "ds_io"),)

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


class Understood(Exception):
    """Instead of a measurement."""


@pytest.fixture
def understood(monkeypatch: pytest.MonkeyPatch, drive: Path) -> Callable[..., Job]:
    """The job that ds_io makes of its arguments, on the drive unless they say where."""

    def parse(*arguments: str) -> Job:
        jobs: list[Job] = []

        def instead(job: Job) -> None:
            jobs.append(job)
            raise Understood

        monkeypatch.setattr(program, "measure", instead)
        where = () if any(each.startswith("--folder") for each in arguments) else ("--folder", str(drive))
        with pytest.raises(Understood):
            program.main([*where, *arguments])
        return jobs[0]

    return parse


def metric(text: str, name: str) -> float:
    """As DeepSpeed's deepspeed/nvme/parse_nvme_stats.py finds it."""
    (line,) = (line for line in text.splitlines() if line.startswith(name))
    return float(line.split()[-2])


# -- wrong arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "--io_size"),
    (["--io_size", "1M"], "give either --folder or --folder_to_device_mapping"),
    (["--io_size", "1M", "--folder", ".", "--folder_to_device_mapping", ".:0"], "give either --folder or"),
    (["--io_size", "1M", "--folder", ""], "--folder: must be a directory, got ''"),
    (["--io_size", "1M", "--folder", ".", "--nonsense"], "unrecognized arguments: --nonsense"),
    (["--io_si", "1M", "--folder", "."], "--io_size"),
    (["--io_size", "0", "--folder", "."], "--io_size: must be a size such as 4096, 128K, 400M or 1G, got '0'"),
    (["--io_size", "9" * 5000, "--folder", "."], "--io_size"),
    (["--io_size", "1M", "--folder", ".", "--loops", "0"], "--loops: must be a whole number, at least 1, got '0'"),
    (["--io_size", "1M", "--folder", ".", "--loops", "1.5"], "got '1.5'"),
    (["--io_size", "1M", "--folder", ".", "--warmup_loops", "-1"], "--warmup_loops"),
    (["--io_size", "1M", "--folder", ".", "--multi_process", "0"], "--multi_process"),
    (["--io_size", "1M", "--folder", ".", "--queue_depth", "4097"], "queue_depth: "),
    (["--io_size", "1M", "--folder", ".", "--io_parallel", "257"], "io_parallel: "),
    (["--io_size", "1M", "--folder", ".", "--block_size", "511"], "block_size: "),
    (["--io_size", "1M", "--folder", ".", "--engine", "libaio"], "--engine: invalid choice: 'libaio'"),
    (["--io_size", "1M", "--folder", ".", "--use_gds"], "--use_gds moves GPU memory: give --gpu, too"),
    (["--io_size", "1M", "--folder_to_device_mapping", ":0"], "must be DIR:GPU"),
    (["--io_size", "1M", "--folder_to_device_mapping", "/mnt:gpu"], "must be DIR:GPU"),
    (["--io_size", "1M", "--folder_to_device_mapping", "/mnt:0", "--multi_process", "2"], "--multi_process goes with --folder"),
    (["--io_size", "1M", "--folder", ".", "--json", "/missing/file"], "there is no directory '/missing'"),
    (["--io_size", "1M", "--folder", ".", "--json", "/"], "'/' is a directory"),
])  # fmt: skip
def test_wrong_arguments_are_one_line_and_status_2(
    ds_io: Command, drive: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(drive)
    ran = ds_io(*arguments)
    assert said in ran.refusal(2)
    assert ran.err.endswith("(ds_io --help lists the options)\n")
    assert ran.out == ""
    assert list(drive.iterdir()) == []


# -- what cannot be measured -------------------------------------------------------------------------------------------


def failed(ran: Ran, said: str) -> None:
    """Status 1, and one line that says so."""
    assert said in ran.refusal(1)
    assert ran.out == ""


def test_a_folder_that_one_may_not_write_to_is_one_line(interpreters: Any, drive: Path) -> None:
    (drive / "closed").mkdir(mode=0o555)
    ended = interpreters.run(f"""
        from deepnvme.tune.io import main
        if os.geteuid() == 0:
            os.setgroups([]); os.setgid(65534); os.setuid(65534)
        main(["--folder", {str(drive / "closed")!r}, "--io_size", "1M"])
    """)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        f"ds_io: '{drive}/closed' cannot be written to: Permission denied; choose a directory that you can write\n"
    )


@pytest.mark.root
def test_a_disk_that_fills_up_meanwhile_is_one_line_and_leaves_nothing(
    ds_io: Command, small_disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, hog = transfers.TensorMover.move, small_disk / "hog"

    def greedy(self: Any, path: Path) -> None:
        hog.write_bytes(bytes(small_disk.bytes_free() // 4 * 3))
        real(self, path)

    monkeypatch.setattr(transfers.TensorMover, "move", greedy)
    failed(ds_io("--folder", small_disk.path, "--io_size", "16M"), "No space left on device")
    assert sorted(path.name for path in small_disk.path.iterdir()) == ["hog", "lost+found"]


def test_a_difference_that_validation_finds_is_one_line(ds_io: Command, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = transfers.TensorMover.move

    def careless(self: Any, path: Path) -> None:
        real(self, path)
        self.tensor[0] ^= 1

    monkeypatch.setattr(transfers.TensorMover, "move", careless)
    failed(ds_io("--folder", drive, "--io_size", "1M", "--validate", "--json"), "validation: tensor and '")
    assert list(drive.iterdir()) == []


@without_cuda
@pytest.mark.parametrize("more", [[], ["--use_gds"], ["--engine", "torch_io"]])
def test_a_gpu_that_is_not_there_is_one_line(ds_io: Command, drive: Path, more: list[str]) -> None:
    failed(ds_io("--folder", drive, "--io_size", "1M", "--gpu", *more), "sees no CUDA device; leave --gpu out")
    assert list(drive.iterdir()) == []


# -- DeepSpeed's options -----------------------------------------------------------------------------------------------


def test_every_option_of_deepspeed_means_what_it_does_there(understood: Callable[..., Job], drive: Path) -> None:
    job = understood(
        "--folder", str(drive), "--io_size", "400M", "--fast_io_size", "32M", "--read", "--multi_process", "2",
        "--block_size", "128K", "--queue_depth", "64", "--single_submit", "--sequential_requests", "--validate",
        "--engine", "torch_fastio", "--loops", "5", "--io_parallel", "4", "--gpu", "--use_gds", "--slow_bounce_buffer",
        "--torch_legacy_save", "--use_accelerator_pin_memory", "--warmup_loops", "0", "--include_warmup_time",
        "--different_file_each_iteration",
    )  # fmt: skip
    assert [(place.folder, place.device) for place in job.places] == [(drive, 0), (drive, 1)]
    assert (job.io_size, job.fast_io_size, job.operation, job.engine) == (400 << 20, 32 << 20, "read", "torch_fastio")
    assert (job.loops, job.warmup_loops, job.include_warmup, job.different_files) == (5, 0, True, True)
    assert (job.validate, job.gpu, job.slow_bounce_buffer, job.torch_legacy_save) == (True, True, True, True)
    assert job.accelerator_pin_memory
    assert job.setting.model_dump() == {
        "block_size": 128 << 10, "queue_depth": 64, "intra_op_parallelism": 4, "single_submit": True, "overlap_events": False,
        "use_gds": True, "backend": "auto",
    }  # fmt: skip


def test_the_defaults_are_those_of_deepspeed(understood: Callable[..., Job]) -> None:
    job = understood("--io_size", "4096")
    setting = job.setting
    assert (job.operation, job.engine, job.loops, job.warmup_loops, len(job.places)) == ("write", "aio_handle", 3, 1, 1)
    assert (setting.block_size, setting.queue_depth, setting.intra_op_parallelism) == (1 << 20, 32, 1)
    assert (setting.single_submit, setting.overlap_events, job.fast_io_size) == (False, True, 64 << 20)


def test_mappings_may_be_given_together_or_one_by_one(understood: Callable[..., Job]) -> None:
    job = understood(
        "--io_size", "1M", "--folder_to_device_mapping", "/a:0", "/b:1", "--folder_to_device_mapping", "/c:d:15", "--gpu"
    )
    assert [(str(place.folder), place.device) for place in job.places] == [("/a", 0), ("/b", 1), ("/c:d", 15)]


# -- what is printed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["Read", "Write"])
def test_the_lines_that_other_tools_parse_are_deepspeeds(ds_io: Command, drive: Path, tmp_path: Path, operation: str) -> None:
    more = ["--read"] if operation == "Read" else []
    ran = ds_io("--folder", drive, "--io_size", "8M", "--validate", "--json", tmp_path / "found.json", *more)
    assert (ran.status, ran.err) == (0, "")
    document = json.loads((tmp_path / "found.json").read_text())
    for name, key in (("Task", "task_seconds"), ("E2E", "seconds")):
        seconds, speed = metric(ran.out, f"{name} {operation} Latency"), metric(ran.out, f"{name} {operation} Speed")
        assert f"{name} {operation} Latency = {seconds:.6f} sec\n" in ran.out
        assert f"{name} {operation} Speed = {speed:.6f} GB/sec\n" in ran.out
        assert seconds == pytest.approx(document[key], abs=1e-6)
        assert speed == pytest.approx(3 * (8 << 20) / document[key] / 1024**3, abs=1e-6)
    assert "validation     tensors and files agree" in ran.out


def test_the_text_says_how_bytes_went_and_what_they_cost(ds_io: Command, drive: Path) -> None:
    ran = ds_io("--folder", drive, "--io_size", "1M", "--sequential_requests", "--fsync", "--io_parallel", 2)
    rows = {line[:15].strip(): line[15:] for line in ran.out.splitlines()}
    assert ran.out.startswith("write of 1M by aio_handle, ")
    assert "2 workers" in ran.out.splitlines()[0]
    assert ran.out.splitlines()[0].endswith(", fsync")
    assert str(drive) in ran.out.splitlines()[1]
    assert "(median of 3 loops, quartiles " in rows["rate"]
    assert rows["CPU time"].endswith(" s/GB")
    assert {"p50", "p99", "p99.9"} <= set(rows["a request"].split())
    assert {"p50", "p99", "p99.9"} <= set(rows["a block"].split())
    assert "direct " in rows["bytes"]
    assert "buffered by the page cache" in rows["bytes"]
    assert "changes nothing" in rows["note"]


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("aio_basic", "not counted: aio_basic keeps no statistics"),
        ("torch_io", "all buffered: torch goes through the page cache"),
    ],
)
def test_an_engine_that_counts_nothing_says_what_is_known(ds_io: Command, drive: Path, engine: str, said: str) -> None:
    ran = ds_io("--folder", drive, "--io_size", "1M", "--engine", engine, "--loops", 1)
    assert said in ran.out
    assert "(one loop)" in ran.out
    document = json.loads(ds_io("--folder", drive, "--io_size", "1M", "--engine", engine, "--json").out)
    assert (document["bytes"], document["block_latency"], document["backend"]) == (None, None, None)


def test_a_backend_that_was_insisted_on_is_used(ds_io: Command, drive: Path, backend: str) -> None:
    ran = ds_io("--folder", drive, "--io_size", "1M", "--loops", 1, "--validate", "--backend", backend, "--json", "-")
    assert json.loads(ran.out)["backend"] == backend


# -- interrupts --------------------------------------------------------------------------------------------------------


def written(folder: Path) -> bool:
    return any(path.stat().st_size for path in folder.glob("ds_io-*/*"))


def session_of(leader: int) -> list[int]:
    """The processes that are left of it."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (place / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(session) == leader and state != "Z":
            found.append(int(place.name))
    return found


@pytest.fixture
def endless(drive: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ds_io on the drive, with loops without end, in a session of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        program = [sys.executable, *SCRIPT, "--folder", str(drive), "--io_size", "8M", "--loops", "1000000", *arguments]
        started.append(
            subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


INTERRUPTED = (130, "", "ds_io: interrupted; its files are removed\n")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "times"), [("SIGTERM", 1), ("SIGHUP", 1), ("SIGINT", 3)])
def test_an_interrupt_ends_it_and_removes_its_files(interpreters: Any, drive: Path, number: str, times: int) -> None:
    child = interpreters.start(f"""
        from deepnvme.tune.io import main
        main(["--folder", {str(drive)!r}, "--io_size", "8M", "--loops", "1000000", "--read"])
    """)
    until(lambda: written(drive))
    for _ in range(times):
        os.kill(child, signal.Signals[number])
        time.sleep(0.002)
    ended = interpreters.wait(child)
    assert (ended.returncode, ended.stdout, ended.stderr) == INTERRUPTED
    assert list(drive.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_of_its_processes(
    endless: Callable[..., subprocess.Popen[str]], drive: Path, number: signal.Signals
) -> None:
    process = endless("--multi_process", "2")
    until(lambda: written(drive))
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: all of them get it
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == INTERRUPTED
    assert list(drive.iterdir()) == []
    until(lambda: session_of(process.pid) == [])  # multiprocessing's own tracker ends after the rest
