"""The tuning tools against what they stand for: ds_io against raw_io, and the tuner's block against an exhaustive sweep.

    python benchmarks/tuning.py --dir /mnt/nvme --json tuning.json

Takes some 15 minutes, and writes some 500 GB. ds_io's loops take turns with raw_io's contender for the same transfer. The tuner
runs as its users run it; every setting it chooses from is then measured at full size, and the best of those meets the tuner's
choice, in turn.

The regret (``--only regret --runs 10``) is what a run's choice costs. The tuner runs N times, and each time its choice and the
ten settings that it ranks highest are measured afresh, in turn. How much longer the choice takes than the best of the ten is
judged by other rounds than those that tell which is the best: the fastest of ten equal settings, told and judged by the same
rounds, would look faster than it is.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import drive, interleave, libraries
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.figures import Verdict
from harness.tables import verdict_table
from harness.workloads import ContenderFailed, Workload

from deepnvme import AioConfig
from deepnvme.ops.op_builder import AsyncIOBuilder
from deepnvme.tools.tune.command_line import size_text
from deepnvme.tools.tune.estimates import Difference, difference, hodges_lehmann
from deepnvme.tools.tune.figures import Spread
from deepnvme.tools.tune.folder import drop_pages, settle
from deepnvme.tools.tune.job import Job, Place
from deepnvme.tools.tune.measuring import workers
from deepnvme.tools.tune.settings import default_space
from deepnvme.tools.tune.transfers import page_locked

MIB = 1 << 20
# Of the sweep's best settings, those that meet the tuner's choice: the first of a noisy table need not be the best.
CHALLENGERS = 3
# Of the tuner's own ranking, those that its choice is compared with for the regret.
TOP = 10


@dataclass(frozen=True)
class Settings:
    """How much to measure."""

    directory: Path
    size: int
    io_size: int
    rounds: int
    passes: int
    seconds: int
    runs: int
    regret_size: int
    regret_rounds: int


# -- ds_io against raw_io ----------------------------------------------------------------------------------------------


def compare_ds_io(settings: Settings, progress: Progress) -> list[Verdict]:
    """Loop by loop in turn: what ds_io does in a loop, and what raw_io does in a round."""
    verdicts = []
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tuning-", dir=settings.directory)))
        drive.check(directory, (settings.rounds + 3) * settings.size)
        process = stack.enter_context(libraries.LibraryProcess(sys.executable, "deepnvme", directory, "auto"))
        raw_io = libraries.LibraryContender(process, "handle", "handle", "pinned", seed=1)
        block_size, queue_depth = process.described["block_size"], process.described["queue_depth"]
        for name, workload in (
            ("read", Workload("read", "read", "existing", 1, settings.size, MIB)),
            ("overwrite", Workload("overwrite", "write", "existing", 1, settings.size, MIB)),
            ("fresh", Workload("fresh", "write", "absent", 1, settings.size, MIB)),
        ):
            job = Job(
                (Place(directory, 0),),
                workload.operation,
                settings.size,
                AioConfig(block_size=block_size, queue_depth=queue_depth),
                loops=settings.rounds,
                different_files=workload.state == "absent",
            )
            paths = raw_io.files(workload, directory)
            with workers(job, [directory]) as ds_io:
                if job.operation == "read":
                    ds_io("lay_out")
                if workload.state == "existing":
                    drive.lay_out(paths[0], settings.size, interleave.CONTENTS)
                raw_io.measure(workload, paths)  # the tensor is allocated with the first transfer
                ds_io("loop", 0)
                ratios = []
                for turn in range(1, settings.rounds + 1):
                    progress(f"ds_io and raw_io: {name}, round {turn} of {settings.rounds}")
                    rates: dict[str, float] = {}
                    for who in ("raw_io", "ds_io") if turn % 2 == 0 else ("ds_io", "raw_io"):
                        interleave.prepare(workload, paths, directory)
                        if who == "raw_io":
                            rates[who] = raw_io.measure(workload, paths).gb_per_second
                        else:
                            ds_io("prepare", turn)
                            rates[who] = ds_io("loop", turn)[0][1].gb_per_second
                    ratios.append(rates["ds_io"] / rates["raw_io"])
            for path in directory.iterdir():
                if path.is_file():
                    path.unlink()
            for sense, bound in (("at least", 0.97), ("at most", 1.03)):
                what = f"{size_text(settings.size)} {name}: ds_io / raw_io's handle, pinned"
                verdicts.append(Verdict(what, Spread.of(ratios), sense, bound))  # type: ignore[arg-type]
    return verdicts


def run_tool(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The JSON that a command of ours prints. Raises ContenderFailed if it fails."""
    done = subprocess.run([sys.executable, "-m", module, *arguments, "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        raise ContenderFailed(f"{module}: {done.stderr.strip()}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def tuner_arguments(settings: Settings) -> list[str]:
    """The tuner's command line."""
    measured = ["--io_size", str(settings.io_size), "--seconds", str(settings.seconds)]
    return ["--nvme_dir", str(settings.directory), *measured]


# -- the tuner against an exhaustive sweep -----------------------------------------------------------------------------


class SettingTimer:
    """Times transfers between a file and a tensor with any setting, without the tuner's code, so that its errors would show."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._op = AsyncIOBuilder().load()
        self._keeper = self._op.aio_handle()
        self._tensor = page_locked(self._keeper, nbytes)
        self._path = directory / "tensor"
        self._keeper.sync_pwrite(self._tensor, str(self._path))
        settle(directory)

    def seconds_per_gb(self, setting: AioConfig) -> float:
        """Return the seconds to read a GB and to write one."""
        handle = self._op.aio_handle(**setting.handle_arguments())
        seconds = 0.0
        for move in (handle.sync_pread, handle.sync_pwrite):
            drop_pages([self._path])
            start = time.perf_counter()
            move(self._tensor, str(self._path))
            seconds += time.perf_counter() - start
        return seconds / (self._tensor.nbytes / 1e9)


def compare_tuner(settings: Settings, progress: Progress) -> tuple[list[Verdict], dict[str, Any]]:
    """What the tuner chooses, against the best of an exhaustive sweep over the same settings."""
    progress("the tuner")
    start = time.monotonic()
    document = run_tool("deepnvme.tune.sweep", tuner_arguments(settings))
    took = time.monotonic() - start
    chosen = AioConfig.from_deepspeed(document)
    working = [name for name, obstacle in AsyncIOBuilder().load().backends().items() if obstacle is None]
    space = default_space(settings.io_size, working)
    with tempfile.TemporaryDirectory(prefix="tuning-", dir=settings.directory) as directory:
        timer = SettingTimer(Path(directory), settings.io_size)
        swept: dict[AioConfig, list[float]] = {setting: [] for setting in space}
        order = random.Random(0)
        for turn in range(settings.passes):
            for index, setting in enumerate(order.sample(space, len(space))):
                if index % 25 == 0:
                    progress(f"exhaustive sweep, pass {turn + 1} of {settings.passes}: {index} of {len(space)}")
                swept[setting].append(timer.seconds_per_gb(setting))
        challengers = sorted(space, key=lambda setting: statistics.median(swept[setting]))[:CHALLENGERS]
        meeting: dict[AioConfig, list[float]] = {setting: [] for setting in dict.fromkeys([chosen, *challengers])}
        for turn in range(settings.rounds):
            progress(f"the tuner's choice and the sweep's best, round {turn + 1} of {settings.rounds}")
            for setting in order.sample(list(meeting), len(meeting)):
                meeting[setting].append(timer.seconds_per_gb(setting))
    best = min(challengers, key=lambda setting: statistics.median(meeting[setting]))
    ratios = [theirs / ours for theirs, ours in zip(meeting[best], meeting[chosen], strict=True)]
    verdicts = [
        Verdict("the tuner's block / the best of an exhaustive sweep", Spread.of(ratios), "at least", 0.97),
        Verdict("time of the tuner", Spread.of([took]), "at most", 75, "s"),
    ]
    described = {
        "chosen": chosen.to_deepspeed(),
        "best": best.to_deepspeed(),
        "rank_of_chosen": 1 + sorted(space, key=lambda setting: statistics.median(swept[setting])).index(chosen),
        "settings": len(space),
        "seconds_per_gb": [
            {**setting.model_dump(), "swept": swept[setting], "meeting": meeting.get(setting, [])} for setting in space
        ],
    }
    return verdicts, described


# -- the regret of repeated runs ---------------------------------------------------------------------------------------


def regret(chosen: AioConfig, seconds: Mapping[AioConfig, Sequence[float]]) -> Difference:
    """Return by how much longer the chosen setting takes than the best, with an interval; below zero if by chance it took less.

    Rounds with even numbers tell which is the best and those with odd numbers by how much, and the other way round.

    Args:
        chosen: A key of ``seconds``.
        seconds: For each setting its time in each round.
    """
    logarithms: list[float] = []
    for telling, judging in ((0, 1), (1, 0)):
        best = min(seconds, key=lambda setting: hodges_lehmann([math.log(each) for each in seconds[setting][telling::2]]))
        pairs = zip(seconds[chosen][judging::2], seconds[best][judging::2], strict=True)
        logarithms += [math.log(ours / theirs) for ours, theirs in pairs]
    return difference(logarithms, None, 1)


def measure_regret(settings: Settings, progress: Progress) -> tuple[list[Verdict], list[dict[str, Any]]]:
    """What the choice of each of several runs costs, against the best of its top ten."""
    runs: list[dict[str, Any]] = []
    order = random.Random(0)
    for number in range(1, settings.runs + 1):
        progress(f"regret: run {number} of {settings.runs}")
        document = run_tool("deepnvme.tune.sweep", tuner_arguments(settings))
        (found,) = document["searches"]
        chosen, ranked = setting_of(found["best"]), [setting_of(result) for result in found["results"]]
        seconds: dict[AioConfig, list[float]] = {setting: [] for setting in dict.fromkeys([chosen, *ranked[:TOP]])}
        with tempfile.TemporaryDirectory(prefix="tuning-", dir=settings.directory) as directory:
            timer = SettingTimer(Path(directory), settings.regret_size)
            timer.seconds_per_gb(chosen)  # the first transfer of a process is slower
            for turn in range(settings.regret_rounds):
                progress(f"regret: run {number} of {settings.runs}, round {turn + 1} of {settings.regret_rounds}")
                for setting in order.sample(list(seconds), len(seconds)):
                    seconds[setting].append(timer.seconds_per_gb(setting))
        cost = regret(chosen, seconds)
        progress(f"regret: run {number}: {cost.text}")
        runs.append({
            "chosen": chosen.to_deepspeed(),
            "reason": found["reason"],
            "regret": cost.slower,
            "interval": cost.interval,
            "seconds": document["seconds"],
            "bytes_written": document["bytes_written"],
            "seconds_per_gb": [{**setting.model_dump(), "rounds": times} for setting, times in seconds.items()],
        })  # fmt: skip
    regrets = [100 * run["regret"] for run in runs]
    written = [run["bytes_written"] / 1e9 for run in runs]
    verdicts = [
        Verdict(f"regret of {len(runs)} runs: the choice against the best of its top ten", Spread.of(regrets), "at most", 3, "%"),
        Verdict(f"regret of the worst of {len(runs)} runs", Spread.of([max(regrets)]), "at most", 3, "%"),
        Verdict("written by a run of the tuner", Spread.of(written), "at most", 33, "GB"),
    ]
    return verdicts, runs


def setting_of(result: Mapping[str, Any]) -> AioConfig:
    """Return the setting of a result in the tuner's JSON, with the backend that was used in place of "auto"."""
    return AioConfig(**{name: result[name] for name in AioConfig.model_fields})


# -- the command line --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--only", choices=("ds_io", "tuner", "regret"), help="one part of it")
    parser.add_argument("--runs", type=int, default=3, help="of the tuner, for the regret (default: 3)")
    parser.add_argument("--quick", action="store_true", help="a trial of the benchmark itself: tiny")
    given = parser.parse(arguments)
    if given.quick:
        settings = Settings(
            given.dir, 8 * MIB, 16 * MIB, rounds=3, passes=1, seconds=2, runs=1, regret_size=8 * MIB, regret_rounds=2
        )
    else:
        settings = Settings(
            given.dir,
            1 << 30,
            400 * MIB,
            rounds=21,
            passes=3,
            seconds=50,
            runs=given.runs,
            regret_size=128 * MIB,
            regret_rounds=20,
        )

    verdicts: list[Verdict] = []
    document: dict[str, Any] = {"benchmark": "tuning", "settings": {**vars(settings), "directory": None}}
    with measuring("tuning"):
        if given.only in (None, "ds_io"):
            verdicts += compare_ds_io(settings, print_step)
        if given.only in (None, "tuner"):
            found, document["tuner"] = compare_tuner(settings, print_step)
            verdicts += found
        if given.only in (None, "regret"):
            found, document["regret"] = measure_regret(settings, print_step)
            verdicts += found
    print(verdict_table(verdicts))
    if "tuner" in document:
        tuner = document["tuner"]
        print(f"chosen: {tuner['chosen']['aio']}, number {tuner['rank_of_chosen']} of the sweep's {tuner['settings']}")
        print(f"best:   {tuner['best']['aio']}")
    for run in document.get("regret", []):
        print(f"regret {Difference(run['regret'], run['interval']).text}: {run['chosen']['aio']}, {run['reason']}")
    write_json(given.json, {**document, "targets": [verdict.as_json() for verdict in verdicts]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
