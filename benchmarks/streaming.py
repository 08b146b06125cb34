"""A Llama with its weights on the drive: against the drive's limit, the model in memory, and accelerate's disk_offload.

    python benchmarks/streaming.py --dir /mnt/nvme --json streaming.json

Each contender has a process of its own and runs in its turn, with nothing of its files in the page cache: a ratio is taken round
by round, between neighbours in time. Needs transformers and safetensors; accelerate to be compared with.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness import drive
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.comparison import Comparisons, Counts, judge, measure_interleaved, times_as_fast
from harness.documents import all_comparisons, document
from harness.figures import Verdict
from harness.llama import Shape
from harness.optimizer_steps import drive_limits, quieten
from harness.tables import comparison_table, spread_text, table, verdict_table
from harness.worker_process import WorkerProcess
from harness.workloads import ContenderFailed

from deepnvme.streaming import WeightStore
from deepnvme.tools.tune.command_line import positive
from deepnvme.tools.tune.figures import Spread
from deepnvme.tools.tune.folder import check_memory, sync

MIB = 1 << 20
PARTS = ("forward", "first", "generate", "identity", "memory", "build")
PREFETCH = 2


@dataclass(frozen=True)
class Settings:
    """The model, and how much to do with it."""

    directory: Path
    rounds: int
    generate_rounds: int
    shape: Shape
    sequences: int
    tokens: int
    prompts: int
    prompt_tokens: int
    new_tokens: int
    only: tuple[str, ...]


@dataclass
class Measurements(Comparisons):
    """Everything one run found out."""

    bounds: dict[str, list[tuple[str, Spread]]] = field(default_factory=dict)
    """For each part what it cannot be faster than, in seconds: of what the drive needs, and of the model in memory."""


@dataclass(frozen=True)
class Files:
    """Where the weights are, each made when it is first asked for."""

    settings: Settings
    directory: Path
    progress: Progress

    @property
    def checkpoint(self) -> Path:
        return self._made("checkpoint", self._save)

    @property
    def store(self) -> Path:
        return self._built("store", {})

    @property
    def int8(self) -> Path:
        return self._built("int8", {"quantize": "int8"})

    @property
    def offloaded(self) -> Path:
        """Of accelerate, which writes it when it starts."""
        path = self.directory / "accelerate"
        path.mkdir(exist_ok=True)
        return path

    def _save(self, path: Path) -> None:
        with worker(self, "memory", path) as process:
            process.call("save")

    def _built(self, name: str, options: dict[str, Any]) -> Path:
        source = self.checkpoint
        return self._made(name, lambda path: build(source, path, options))

    def _made(self, name: str, make: Callable[[Path], None]) -> Path:
        """The path of a file that is made when it is first asked for."""
        path = self.directory / name
        if not path.exists():
            self.progress(f"writing the {name}")
            make(path)
        return path


def build(source: Path, path: Path, options: Mapping[str, Any]) -> None:
    WeightStore.build(source, path, **options).close()


def measure(settings: Settings, progress: Progress) -> Measurements:
    """Run everything in a directory of its own below ``settings.directory``, which is empty again afterwards."""
    nbytes = settings.shape.nbytes
    # The model in memory, half of it, and the rings; the checkpoint twice, a store, accelerate's and the half of int8.
    check_memory(3 * nbytes, "give fewer --layers")
    drive.check(settings.directory, 6 * nbytes)
    measurements = Measurements()
    parts: dict[str, Callable[[Settings, Files, Measurements, Progress], None]] = {
        "forward": compare_forward,
        "first": compare_first,
        "generate": compare_generate,
        "identity": compare_identity,
        "memory": compare_memory,
        "build": compare_building,
    }
    with tempfile.TemporaryDirectory(prefix="streaming-", dir=settings.directory) as directory:
        files = Files(settings, Path(directory), progress)
        for name in settings.only:
            parts[name](settings, files, measurements, progress)
    return measurements


# -- contenders


def worker(files: Files, kind: str, weights: Path, checkpoint: str = "", budget: int = 0) -> WorkerProcess:
    """A process that is to hold a model, in memory or streamed; its method ``start`` makes it."""
    given = {
        "kind": kind,
        "shape": asdict(files.settings.shape),
        "weights": str(weights),
        "checkpoint": checkpoint,
        "budget": budget,
        "prefetch": PREFETCH,
    }
    return WorkerProcess(sys.executable, "harness.streaming_worker", [json.dumps(given)], files.directory)


def start(files: Files, kind: str, weights: Path, budget: int = 0) -> WorkerProcess:
    """As :func:`worker`, with the model made."""
    process = worker(files, kind, weights, str(files.checkpoint), budget)
    try:
        process.call("start")
    except BaseException:
        process.close()
        raise
    return process


@contextlib.contextmanager
def contenders(
    files: Files, names: Sequence[str], progress: Progress
) -> Iterator[tuple[dict[str, WorkerProcess], dict[str, str]]]:
    """Those that could start, and why others could not."""
    half = files.settings.shape.nbytes // 2
    starts: dict[str, Callable[[], WorkerProcess]] = {
        "in memory": lambda: start(files, "memory", files.checkpoint),
        "deepnvme": lambda: start(files, "deepnvme", files.store),
        "deepnvme, in place": lambda: start(files, "in_place", files.checkpoint),
        "deepnvme, half resident": lambda: start(files, "deepnvme", files.store, half),
        "deepnvme, int8": lambda: start(files, "deepnvme", files.int8),
        "accelerate": lambda: start(files, "accelerate", files.offloaded),
    }
    running, absent = {}, {}
    with contextlib.ExitStack() as stack:
        for name in names:
            progress(f"starting: {name}")
            try:
                running[name] = stack.enter_context(starts[name]())
            except ContenderFailed as error:
                absent[name] = str(error)
        yield running, absent


def runs_of(
    running: Mapping[str, WorkerProcess], method: str, directory: Path, **arguments: int
) -> dict[str, Callable[[], Counts]]:
    """A contender for each process: it calls a method with the drive quiet and nothing in the page cache."""

    def turn(process: WorkerProcess) -> Callable[[], Counts]:
        def run() -> Counts:
            quieten(directory)
            return process.call(method, **arguments)

        return run

    return {name: turn(process) for name, process in running.items()}


# -- parts


def compare_forward(settings: Settings, files: Files, measurements: Measurements, progress: Progress) -> None:
    """A forward pass of all contenders in turns, also against what the drive and the model in memory allow."""
    names = ("in memory", "deepnvme", "deepnvme, in place", "accelerate", "deepnvme, half resident", "deepnvme, int8")
    given = {"sequences": settings.sequences, "tokens": settings.tokens}
    with contextlib.ExitStack() as stack:
        running, absent = stack.enter_context(contenders(files, names, progress))
        nbytes = min(settings.shape.nbytes, 1 << 30)
        limits = stack.enter_context(drive_limits(files.directory / "limits", nbytes, settings.rounds, ("read",)))
        for process in running.values():
            process.call("forward", **given)  # learns the order, fills the budget, touches the memory
        passes = runs_of(running, "forward", files.directory, **given)
        comparison = measure_interleaved("forward", {"limits": limits, **passes}, settings.rounds, progress)
    comparison.absent |= absent
    measurements.comparisons["forward"] = comparison
    drives = [settings.shape.nbytes / sample["read"] for sample in comparison.samples["limits"]]
    bounds = [("the weights at the drive's limit", Spread.of(drives))]
    if comparison.samples.get("in memory"):
        bounds.append(("in memory", Spread.of([sample["seconds"] for sample in comparison.samples["in memory"]])))
    measurements.bounds["forward"] = bounds

    def of_bound(ours: Counts, limit: Counts, in_memory: Counts) -> float:
        seconds: float = max(settings.shape.nbytes / limit["read"], in_memory["seconds"]) / ours["seconds"]
        return seconds

    what = f"forward pass of {settings.sequences} x {settings.tokens} tokens"
    rows: tuple[tuple[str, tuple[str, ...], Callable[..., float], float], ...] = (
        (
            f"{what}: share of the speed of max(weights / read limit, in memory)",
            ("deepnvme", "limits", "in memory"),
            of_bound,
            0.9,
        ),
        (f"{what}, times as fast: in place / from the store", ("deepnvme, in place", "deepnvme"), times_as_fast, 0.97),
        (f"{what}, times as fast: deepnvme / accelerate's disk_offload", ("deepnvme", "accelerate"), times_as_fast, 2.2),
        (
            f"{what}, times as fast: half of the weights resident / none",
            ("deepnvme, half resident", "deepnvme"),
            times_as_fast,
            1.7,
        ),
        (f"{what}, times as fast: int8 / bfloat16", ("deepnvme, int8", "deepnvme"), times_as_fast, 1.6),
    )
    for text, who, figure, bound in rows:
        measurements.verdicts.append(judge(comparison, text, who, figure, "at least", bound))


def compare_first(settings: Settings, files: Files, measurements: Measurements, progress: Progress) -> None:
    """The first token of a checkpoint that was never used before: in place, and with what has to be written first."""
    target = files.directory / "first"

    def begins(kind: str, written: bool) -> Callable[[], Counts]:
        def turn() -> Counts:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            weights = target if written else files.checkpoint
            with worker(files, kind, weights, str(files.checkpoint)) as process:
                quieten(files.directory)
                begun = time.perf_counter()
                if kind == "deepnvme":
                    build(files.checkpoint, target, {})
                counts = process.call("first")
                return {"seconds": time.perf_counter() - begun, **counts}

        return turn

    runs = {
        "in place": begins("in_place", written=False),
        "store": begins("deepnvme", written=True),
        "accelerate": begins("accelerate", written=True),
    }
    comparison = measurements.comparisons["first"] = measure_interleaved("first", runs, settings.rounds, progress)
    shutil.rmtree(target, ignore_errors=True)
    for other, bound in (("store", 3.0), ("accelerate", 1.5)):
        what = f"first token of a new checkpoint, times as fast: in place / {other} written first"
        measurements.verdicts.append(judge(comparison, what, ("in place", other), times_as_fast, "at least", bound))
    written = Spread.of([float(sample["written"]) for sample in comparison.samples["in place"]])
    measurements.verdicts.append(Verdict("bytes written in place", written, "at most", 0))


def compare_generate(settings: Settings, files: Files, measurements: Measurements, progress: Progress) -> None:
    """All contenders generate tokens for many prompts."""
    given = {"prompts": settings.prompts, "tokens": settings.prompt_tokens, "new": settings.new_tokens}
    with contenders(files, ("deepnvme", "accelerate", "in memory"), progress) as (running, absent):
        for process in running.values():
            process.call("forward", sequences=1, tokens=1)
        runs = runs_of(running, "generate", files.directory, **given)
        comparison = measure_interleaved("generate", runs, settings.generate_rounds, progress)
    comparison.absent |= absent
    measurements.comparisons["generate"] = comparison
    if comparison.samples.get("in memory"):
        spread = Spread.of([sample["seconds"] for sample in comparison.samples["in memory"]])
        measurements.bounds["generate"] = [("in memory", spread)]
    what = f"generating {settings.new_tokens} tokens for {settings.prompts} prompts of {settings.prompt_tokens}, times as fast: "
    what += "deepnvme / accelerate's disk_offload"
    measurements.verdicts.append(judge(comparison, what, ("deepnvme", "accelerate"), times_as_fast, "at least", 2.2))


def compare_identity(settings: Settings, files: Files, measurements: Measurements, progress: Progress) -> None:
    """Bit by bit."""
    names = ("in memory", "deepnvme", "deepnvme, in place", "deepnvme, half resident")
    with contenders(files, names, progress) as (running, absent):
        answers = {name: process.call("answers", prompts=2, tokens=4, new=4) for name, process in running.items()}
    for name in names[1:]:
        what = f"logits and tokens that differ from those in memory: {name}"
        missing = absent.get(name) or absent.get("in memory")
        figure = None if missing else Spread.of([float(answers[name] != answers["in memory"])])
        measurements.verdicts.append(Verdict(what, figure, "at most", 0, note=missing or ""))


def compare_memory(settings: Settings, files: Files, measurements: Measurements, progress: Progress) -> None:
    """Peak memory of forward passes beyond the budget."""
    with WeightStore.open(files.store) as store:
        largest = max(extent.nbytes for extent in store.extents.values())
    for name, budget in (("no budget", 0), ("a budget of half the weights", settings.shape.nbytes // 2)):
        progress(f"peak memory, {name}")
        allowed = (PREFETCH + 1) * largest + 64 * MIB
        what = f"peak memory beyond {name}"
        with worker(files, "deepnvme", files.store, budget=budget) as process:
            growth = process.call("peak", passes=3)["growth"]
        note = "" if growth is not None else "the kernel does not let peak memory be reset (/proc/self/clear_refs)"
        figure = None if growth is None else Spread.of([(growth - budget) / MIB])
        measurements.verdicts.append(Verdict(what, figure, "at most", round(allowed / MIB, 1), "MiB", note))


def compare_building(settings: Settings, files: Files, measurements: Measurements, progress: Progress) -> None:
    """Making a weight store, against a copy of the files."""
    source, target = files.checkpoint, files.directory / "target"

    def building(make: Callable[[], None]) -> Callable[[], Counts]:
        def turn() -> Counts:
            shutil.rmtree(target, ignore_errors=True)
            quieten(files.directory)
            begun = time.perf_counter()
            make()
            return {"seconds": time.perf_counter() - begun}

        return turn

    def copy() -> None:
        # Blocks shared with the source would be no copy.
        subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
        for path in (*target.iterdir(), target):
            sync(path)

    runs = {
        "build": building(lambda: build(source, target, {})),
        "cp and sync": building(copy),
        "build, int8": building(lambda: build(source, target, {"quantize": "int8"})),
        "build, int4": building(lambda: build(source, target, {"quantize": "int4"})),
    }
    comparison = measurements.comparisons["build"] = measure_interleaved("build", runs, settings.rounds, progress)
    what = "WeightStore.build from safetensors, times as fast: deepnvme / cp of the files and sync"
    measurements.verdicts.append(judge(comparison, what, ("build", "cp and sync"), times_as_fast, "at least", 0.8))


# -- the command line --------------------------------------------------------------------------------------------------


def bounds_table(measurements: Measurements) -> str:
    """For each part the times that cannot be undercut; the largest is marked."""
    rows = [
        [part, what, spread_text(spread, 3), "the limit" if spread is max(all_, key=lambda each: each[1].median)[1] else ""]
        for part, all_ in measurements.bounds.items()
        for what, spread in all_
    ]
    return table("What cannot be undercut", ["part", "", "s, median (quartiles)", ""], rows, left=2)


def as_json(settings: Settings, measurements: Measurements, started: str) -> dict[str, Any]:
    bounds = {part: {what: vars(spread) for what, spread in all_} for part, all_ in measurements.bounds.items()}
    figures = {"weights": settings.shape.nbytes, "bounds": bounds, "comparisons": all_comparisons(measurements.comparisons)}
    return document("streaming", started, settings, measurements.verdicts, **figures)


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = Parser(__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part of it; can be given more than once")
    parser.add_argument("--rounds", type=positive, help="turns of each contender (default: 7)")
    parser.add_argument("--width", type=positive, help="of the Llama, a multiple of 128 (default: 2048)")
    parser.add_argument("--layers", type=positive, help="of the Llama (default: 16, with 1.7 GB)")
    parser.add_argument("--sequences", type=positive, default=1, help="of a forward pass (default: 1)")
    parser.add_argument("--tokens", type=positive, default=1, help="in each sequence of a forward pass (default: 1)")
    parser.add_argument("--prompts", type=positive, help="to generate for at once (default: 32)")
    parser.add_argument("--prompt-tokens", type=positive, help="in each of them (default: 128)")
    parser.add_argument("--new-tokens", type=positive, help="to generate for each (default: 32)")
    parser.add_argument(
        "--generate-rounds",
        type=positive,
        default=1,
        help="turns of generating (default: 1, which takes many minutes where the processor has no instructions for bfloat16)",
    )
    parser.add_argument("--quick", action="store_true", help="a trial of the benchmark itself: tiny")
    given = parser.parse(arguments)
    width = given.width or (256 if given.quick else 2048)
    if width % 128:
        parser.error(f"--width: {width} is not a multiple of 128")
    settings = Settings(
        directory=given.dir,
        rounds=given.rounds or (2 if given.quick else 7),
        generate_rounds=given.generate_rounds,
        shape=Shape(width, given.layers or (4 if given.quick else 16), 1000 if given.quick else 32000),
        sequences=given.sequences,
        tokens=given.tokens,
        prompts=given.prompts or (2 if given.quick else 32),
        prompt_tokens=given.prompt_tokens or (4 if given.quick else 128),
        new_tokens=given.new_tokens or (2 if given.quick else 32),
        only=tuple(given.only or PARTS),
    )
    return settings, given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, json_path = parse_arguments(arguments)
    with measuring("streaming") as started:
        measurements = measure(settings, print_step)
    for title, comparison in measurements.comparisons.items():
        print(comparison_table(title, comparison))
    if measurements.bounds:
        print(bounds_table(measurements))
    print(verdict_table(measurements.verdicts))
    write_json(json_path, as_json(settings, measurements, started))
    return 0


if __name__ == "__main__":
    sys.exit(main())
