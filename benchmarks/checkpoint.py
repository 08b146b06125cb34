"""Checkpoints of a transformer in bfloat16: against torch, safetensors, torch's DCP, Run:ai's streamer, and the engine alone.

    python benchmarks/checkpoint.py --dir /mnt/nvme --json checkpoint.json

Each contender has its turn: it writes a new file through fsync; or it reads, in a new process, a file of which nothing is cached,
until every page of the state is in memory. A ratio is taken round by round, between neighbours in time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import checkpoints, drive, llama
from harness.checkpoints import State, library, nbytes_of
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.comparison import Comparison, Comparisons, Counts, judge, measure_interleaved, times_as_fast
from harness.documents import all_comparisons, document
from harness.figures import Verdict
from harness.llama import Shape as Llama
from harness.optimizer_steps import quieten
from harness.tables import comparison_table, verdict_table
from harness.worker_process import WorkerProcess
from harness.workloads import ContenderFailed

import deepnvme
from deepnvme.tools.tune.command_line import positive
from deepnvme.tools.tune.figures import Spread
from deepnvme.tools.tune.folder import check_memory

MIB = 1 << 20
PARTS = ("save", "load", "transformers", "background", "memory", "small", "recycling", "checksums", "parallel")
SAVING = ("deepnvme", "raw", "torch", "safetensors", "DCP", "deepnvme DCP")
LOADING = ("deepnvme", "deepnvme safetensors", "raw", "torch", "safetensors", "Run:ai", "DCP", "deepnvme DCP")


@dataclass(frozen=True)
class Settings:
    """What to measure, and how large."""

    directory: Path
    rounds: int
    width: int
    layers: int
    vocabulary: int
    small_tensors: int
    only: tuple[str, ...]

    def shape(self) -> dict[str, int]:
        """Arguments of ``checkpoints.transformer``."""
        return {"width": self.width, "layers": self.layers, "vocabulary": self.vocabulary}

    def state(self) -> State:
        return checkpoints.transformer(**self.shape())


def measure(settings: Settings, progress: Progress) -> Comparisons:
    """Run everything in a directory of its own below ``settings.directory``, which is empty again afterwards."""
    state = settings.state()
    nbytes = nbytes_of(state)
    check_memory(4 * nbytes, "give fewer --layers")
    drive.check(settings.directory, (len(LOADING) + 1) * nbytes)
    measurements = Comparisons()
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=settings.directory) as directory:
        warm_up(Path(directory), progress)
    parts: dict[str, Callable[[Settings, State, Path, Comparisons, Progress], None]] = {
        "save": compare_saving,
        "load": compare_loading,
        "transformers": compare_transformers,
        "background": compare_background,
        "memory": compare_memory,
        "small": compare_small,
        "recycling": compare_recycling,
        "checksums": compare_checksums,
        "parallel": compare_parallel,
    }
    for name in settings.only:
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=settings.directory) as directory:
            parts[name](settings, state, Path(directory), measurements, progress)
    return measurements


def warm_up(directory: Path, progress: Progress) -> None:
    """What comes with the first use of a library, a compiler in our case, is nobody's checkpoint."""
    progress("warming up")
    tiny = {"tiny": torch.zeros(1)}
    for name in {*SAVING, *LOADING}:
        path = directory / f"{name}.checkpoint"
        with contextlib.suppress(ContenderFailed):
            library(name).save(tiny, path)
            library(name).load(path, tiny)


def times_as_fast_verdicts(
    verb: str, comparison: Comparison[str, Counts], rows: Sequence[tuple[str, str, float]]
) -> list[Verdict]:
    """One for each (ours, theirs, at least)."""
    return [
        judge(comparison, f"{verb}, times as fast: {ours} / {theirs}", (ours, theirs), times_as_fast, "at least", bound)
        for ours, theirs, bound in rows
    ]


def saving(name: str, state: State, directory: Path) -> Callable[[], Counts]:
    """A contender that writes a new file."""
    path = directory / f"{name}.checkpoint"

    def turn() -> Counts:
        save = library(name).save
        checkpoints.remove(path)
        quieten(directory)
        begun = time.perf_counter()
        save(state, path)
        return {"seconds": time.perf_counter() - begun}

    return turn


def compare_saving(settings: Settings, state: State, directory: Path, measurements: Comparisons, progress: Progress) -> None:
    """Every library saves the same state."""
    contenders = {name: saving(name, state, directory) for name in SAVING}
    comparison = measurements.comparisons["save"] = measure_interleaved("save", contenders, settings.rounds, progress)
    rows = (
        ("deepnvme", "torch", 4.0),
        ("deepnvme", "safetensors", 2.0),
        ("deepnvme", "DCP", 1.8),
        ("deepnvme", "raw", 0.92),
        ("deepnvme DCP", "DCP", 1.8),
    )
    measurements.verdicts += times_as_fast_verdicts("save", comparison, rows)


def loading(name: str, settings: Settings, state: State, directory: Path) -> Callable[[], Counts]:
    """A contender that reads a file of its own in a new process, and whose result is compared with what was written.

    In a process that has loaded before, a library may find the memory of its earlier loads: ours took 4.6 s in a new process,
    safetensors 2.4 s, and ours looked twice as fast where it had loaded before.
    """
    path = directory / f"{name}.checkpoint"
    given = {"name": name, "path": str(path), **settings.shape()}

    def turn() -> Counts:
        if not path.exists():
            library(name).save(state, path)
        with WorkerProcess(sys.executable, "harness.load_worker", [json.dumps(given)], directory) as process:
            quieten(directory)
            return process.call("load")

    return turn


def compare_loading(settings: Settings, state: State, directory: Path, measurements: Comparisons, progress: Progress) -> None:
    """Every library loads the state that it has saved."""
    contenders = {name: loading(name, settings, state, directory) for name in LOADING}
    comparison = measurements.comparisons["load"] = measure_interleaved("load", contenders, settings.rounds, progress)
    rows = (
        ("deepnvme", "torch", 2.2),
        ("deepnvme", "Run:ai", 1.3),
        ("deepnvme safetensors", "safetensors", 1.3),
        ("deepnvme", "raw", 0.92),
        ("deepnvme DCP", "DCP", 1.8),
    )
    measurements.verdicts += times_as_fast_verdicts("load", comparison, rows)


def compare_transformers(
    settings: Settings, state: State, directory: Path, measurements: Comparisons, progress: Progress
) -> None:
    """transformers loads a Llama, about as large as the state, with and without the engine below it."""
    shape = Llama(settings.width, settings.layers, settings.vocabulary)
    with contextlib.suppress(ContenderFailed):  # which each contender then says
        llama.save(shape, directory / "llama")

    def load(enabled: bool) -> Counts:
        given = json.dumps({"directory": str(directory / "llama"), "enabled": enabled})
        with WorkerProcess(sys.executable, "harness.pretrained_worker", [given], directory) as process:
            quieten(directory)
            return process.call("load")

    ways = {"with enable()": functools.partial(load, True), "without": functools.partial(load, False)}
    comparison = measurements.comparisons["transformers"] = measure_interleaved(
        "from_pretrained", ways, settings.rounds, progress
    )
    measurements.verdicts += times_as_fast_verdicts("from_pretrained", comparison, [("with enable()", "without", 1.3)])
    what = "from_pretrained: loads whose bits differ"
    differ = judge(
        comparison, what, ("with enable()", "without"), lambda ours, theirs: float(ours["bits"] != theirs["bits"]), "at most", 0
    )
    measurements.verdicts.append(differ)


def compare_background(settings: Settings, state: State, directory: Path, measurements: Comparisons, progress: Progress) -> None:
    """How long the caller of async_save is held, against copying the state. The pool has its memory from an earlier save, and the
    copy's has been touched, as a training run has them."""
    copies = {name: tensor.clone() for name, tensor in state.items()}

    def copy() -> Counts:
        begun = time.perf_counter()
        for name, tensor in state.items():
            copies[name].copy_(tensor)
        return {"seconds": time.perf_counter() - begun}

    def held() -> Counts:
        quieten(directory)
        begun = time.perf_counter()
        future = deepnvme.async_save(state, directory / "background.pt")
        seconds = time.perf_counter() - begun
        future.result()
        return {"seconds": seconds, "in_all": time.perf_counter() - begun}

    held()
    comparison = measurements.comparisons["background"] = measure_interleaved(
        "async_save", {"caller held": held, "memcpy": copy}, settings.rounds, progress
    )
    what = "async_save, the caller is held / a memcpy of the state"
    verdict = judge(comparison, what, ("memcpy", "caller held"), times_as_fast, "at most", 1.3)
    measurements.verdicts.append(verdict)


def compare_memory(settings: Settings, state: State, directory: Path, measurements: Comparisons, progress: Progress) -> None:
    """How much memory saving takes beyond the state, in a fresh process."""
    progress("peak memory")
    given = [json.dumps({**settings.shape(), "directory": str(directory)})]
    # An eighth more is what a pool lends where memory of that size was free; pages and stacks are within the 64 MiB.
    budget = nbytes_of(state) + 64 * MIB
    for what, method, arguments, allowed in (
        ("memory beyond the state: save", "save", {}, 64 * MIB),
        ("memory beyond the state: async_save, with a budget of it and 64 MiB", "async_save", {"budget": budget}, budget),
    ):
        figure, note = None, "the kernel does not let peak memory be reset (/proc/self/clear_refs)"
        with WorkerProcess(sys.executable, "harness.checkpoint_worker", given, directory) as process:
            growth = process.call(method, **arguments)["growth"]
        if growth is not None:
            figure = Spread.of([growth / MIB])
        measurements.verdicts.append(Verdict(what, figure, "at most", round(allowed / MIB, 1), "MiB", note))


def compare_small(settings: Settings, state: State, directory: Path, measurements: Comparisons, progress: Progress) -> None:
    """A state of many small tensors, whose cost is in their number."""
    small = {f"layer.{index}.weight": torch.full((4096,), float(index)) for index in range(settings.small_tensors)}
    contenders = {name: saving(name, small, directory) for name in ("deepnvme", "torch")}
    comparison = measurements.comparisons["small"] = measure_interleaved("small tensors", contenders, settings.rounds, progress)
    what = f"save of {settings.small_tensors} tensors of 16 KiB, times as fast: deepnvme / torch"
    measurements.verdicts.append(judge(comparison, what, ("deepnvme", "torch"), times_as_fast, "at least", 5))


def compare_recycling(settings: Settings, state: State, directory: Path, measurements: Comparisons, progress: Progress) -> None:
    """The blocks of the oldest checkpoint written over, against new ones."""
    runs = {True: deepnvme.CheckpointManager(directory / "run", keep=2), False: None}
    steps = itertools.count()

    def save(recycled: bool) -> Counts:
        manager = runs[recycled]
        (directory / "new.pt").unlink(missing_ok=True)
        quieten(directory)
        begun = time.perf_counter()
        if manager is None:
            deepnvme.save(state, directory / "new.pt")
        else:
            manager.save(next(steps), state)
        return {"seconds": time.perf_counter() - begun}

    for _ in range(2):
        save(recycled=True)
    contenders = {"recycled": functools.partial(save, True), "new": functools.partial(save, False)}
    comparison = measurements.comparisons["recycling"] = measure_interleaved("recycling", contenders, settings.rounds, progress)
    measurements.verdicts += times_as_fast_verdicts("save over blocks that are there", comparison, [("recycled", "new", 1.0)])


def compare_checksums(settings: Settings, state: State, directory: Path, measurements: Comparisons, progress: Progress) -> None:
    """The state with CRC-32s, which are computed while it is written, against without: to a new file, and over blocks that are
    there, which a drive writes faster. Both on the same file and run in turn, since two files' blocks differ."""
    manager = deepnvme.CheckpointManager(directory / "run", keep=2)
    steps = itertools.count()

    def save(recycled: bool, checksum: bool) -> Counts:
        (directory / "new.pt").unlink(missing_ok=True)
        quieten(directory)
        began, processor = time.perf_counter(), time.process_time()
        if recycled:
            manager.save(next(steps), state, checksum=checksum)
        else:
            deepnvme.save(state, directory / "new.pt", checksum=checksum)
        return {"seconds": time.perf_counter() - began, "processor_seconds": time.process_time() - processor}

    for _ in range(3):
        save(recycled=True, checksum=False)
    rows = []
    contenders = {}
    for where, recycled in (("a new file", False), ("blocks that are there", True)):
        names = [f"{where}, {how} checksums" for how in ("with", "without")]
        contenders.update(zip(names, (functools.partial(save, recycled, checksum) for checksum in (True, False)), strict=True))
        rows.append((names[0], names[1], 0.95))
    comparison = measurements.comparisons["checksums"] = measure_interleaved("checksums", contenders, settings.rounds, progress)
    measurements.verdicts += times_as_fast_verdicts("save", comparison, rows)


def compare_parallel(settings: Settings, state: State, directory: Path, measurements: Comparisons, progress: Progress) -> None:
    """Two processes that write one file, against one of them. Each has a state of its own."""
    ways = {"one process": "one", "two, the same": "together", "two, sharded": "sharded"}
    with contextlib.ExitStack() as stack:
        given = [json.dumps({"rank": rank, "ranks": 2, "directory": str(directory), **settings.shape()}) for rank in range(2)]
        started = [WorkerProcess(sys.executable, "harness.parallel_worker", [each], directory) for each in given]
        workers = [stack.enter_context(worker) for worker in started]
        threads = stack.enter_context(ThreadPoolExecutor(len(workers)))

        def save(how: str) -> Counts:
            path = directory / "parallel.pt"
            path.unlink(missing_ok=True)
            quieten(directory)
            calls = [threads.submit(worker.call, "save", how=how, path=str(path)) for worker in workers]
            return {"seconds": max(call.result()["seconds"] for call in calls)}

        for how in ways.values():
            save(how)
        contenders = {name: functools.partial(save, how) for name, how in ways.items()}
        comparison = measurements.comparisons["parallel"] = measure_interleaved("parallel", contenders, settings.rounds, progress)
    rows = [(name, "one process", 0.9) for name in list(ways)[1:]]  # which keeps a drive busy by itself
    measurements.verdicts += times_as_fast_verdicts("save with group=", comparison, rows)


# -- the command line --------------------------------------------------------------------------------------------------


def as_json(settings: Settings, measurements: Comparisons, started: str) -> dict[str, Any]:
    return document("checkpoint", started, settings, measurements.verdicts, comparisons=all_comparisons(measurements.comparisons))


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = Parser(__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part of it; can be given more than once")
    parser.add_argument("--rounds", type=positive, help="turns of each contender (default: 7)")
    parser.add_argument("--width", type=positive, help="of the transformer (default: 2048)")
    parser.add_argument("--layers", type=positive, help="of the transformer (default: 19, with 2 GB)")
    parser.add_argument("--quick", action="store_true", help="a trial of the benchmark itself: tiny")
    given = parser.parse(arguments)
    settings = Settings(
        directory=given.dir,
        rounds=given.rounds or (2 if given.quick else 7),
        width=given.width or (256 if given.quick else 2048),
        layers=given.layers or (2 if given.quick else 19),
        vocabulary=1000 if given.quick else 32000,
        small_tensors=200 if given.quick else 10000,
        only=tuple(given.only or PARTS),
    )
    return settings, given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, json_path = parse_arguments(arguments)
    with measuring("checkpoint") as started:
        measurements = measure(settings, print_step)
    for title, comparison in measurements.comparisons.items():
        print(comparison_table(title, comparison))
    print(verdict_table(measurements.verdicts))
    write_json(json_path, as_json(settings, measurements, started))
    return 0


if __name__ == "__main__":
    sys.exit(main())
