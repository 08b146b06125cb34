"""A tensor between GPU memory and the drive: aio_handle, gds_handle, and torch.save and torch.load, interleaved within one run.

    python benchmarks/gpu_io.py --dir /mnt/nvme --json gpu_io.json

aio_handle on pinned host memory takes part as the reference. Only ratios within one run mean anything, see raw_io.py.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import drive, interleave
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.documents import all_workloads, document
from harness.figures import Verdict
from harness.interleave import Result
from harness.one_tensor import HandleContender, OneTensor, TorchContender
from harness.tables import rate_table, size_text, table, verdict_table
from harness.targets import Target, judge
from harness.workloads import Workload

from deepnvme.ops.op_builder import AsyncIOBuilder, GDSBuilder
from deepnvme.tools.tune.command_line import positive, size
from deepnvme.tools.tune.folder import NotMeasurable, check_memory

MIB = 1 << 20
HOST = ("host", "pinned")
ON_DEVICE = "device"


@dataclass(frozen=True)
class Settings:
    """What to measure, and how large."""

    directory: Path
    size: int
    rounds: int


@dataclass
class Measurements:
    """Everything one run found out."""

    results: list[Result] = field(default_factory=list)
    first_requests: dict[str, float] = field(default_factory=dict)
    """Seconds, by contender."""
    gds: dict[str, Any] = field(default_factory=dict)
    """How many bytes went directly, and why others did not."""
    notes: list[str] = field(default_factory=list)


def workloads(nbytes: int) -> list[Workload]:
    """One file that is read, overwritten, or new."""
    return [
        Workload("read", "read", "existing", files=1, nbytes=nbytes, block_size=MIB),
        Workload("overwrite", "write", "existing", files=1, nbytes=nbytes, block_size=MIB),
        Workload("fresh", "write", "absent", files=1, nbytes=nbytes, block_size=MIB),
    ]


# -- measuring ---------------------------------------------------------------------------------------------------------


def gds_handle() -> Any:
    """Raises RuntimeError, saying what is missing, where there can be no gds op."""
    return GDSBuilder().load().gds_handle()


def measure(
    settings: Settings,
    device: torch.device,
    progress: Progress,
    make_gds: Callable[[], Any] = gds_handle,
) -> Measurements:
    """Run everything in a directory of its own below ``settings.directory``, which is empty again afterwards."""
    # Host memory: the pinned tensor, and what torch saves from and loads into.
    check_memory(2 * settings.size, "give a smaller --size")
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 4 * settings.size + 256 * MIB:
        raise NotMeasurable(f"the GPU has no room for 4 tensors of {size_text(settings.size)}; give a smaller --size")
    measurements = Measurements()
    with tempfile.TemporaryDirectory(prefix="gpu_io-", dir=settings.directory) as name:
        directory = Path(name)
        drive.check(directory, 4 * settings.size)
        progress("starting (compiles on first use)")
        contenders = list(assemble(settings.size, device, make_gds, measurements.notes))
        for workload in workloads(settings.size):
            measurements.results.append(interleave.run(workload, contenders, directory, settings.rounds, progress))
    for contender in contenders:
        if contender.first:
            measurements.first_requests[contender.name] = contender.first.seconds
        if contender.name == "gds" and isinstance(contender, HandleContender):
            stats = contender.handle.stats()
            measurements.gds = {name: stats[name] for name in ("backend", "bytes_gds", "bytes_direct", "fallbacks")}
    measurements.notes += [f"gds: {reason}" for reason in measurements.gds.get("fallbacks", {})]
    return measurements


def assemble(nbytes: int, device: torch.device, make_gds: Callable[[], Any], notes: list[str]) -> Iterator[OneTensor]:
    """Whoever can take part; ``notes`` says why someone cannot."""
    op, example = AsyncIOBuilder().load(), torch.empty(0, dtype=torch.uint8)

    def on_device() -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    host = op.aio_handle()
    yield HandleContender(*HOST, host, host.new_cpu_locked_tensor(nbytes, example), seed=1)
    yield HandleContender("aio", ON_DEVICE, op.aio_handle(), on_device(), seed=2)
    try:
        gds = make_gds()
    except (OSError, RuntimeError) as error:
        notes.append(f"gds left out: {error}")
    else:
        tensor = on_device()
        try:
            gds.pin_device_tensor(tensor)
        except OSError as error:  # there may be less to register; transfers serve all the same
            notes.append(f"gds: its tensor is not registered: {error}")
        yield HandleContender("gds", ON_DEVICE, gds, tensor, seed=3)
    yield TorchContender("torch", ON_DEVICE, on_device(), seed=4)


# -- judging -----------------------------------------------------------------------------------------------------------


def verdicts(settings: Settings, measurements: Measurements) -> list[Verdict]:
    """The op in GPU memory against pinned host memory, and GPUDirect Storage against the op."""
    found = []
    for name in ("read", "overwrite", "fresh"):
        what = f"{size_text(settings.size)} {name}"
        aio = Target(f"{what}: aio, GPU / pinned host memory", name, ("aio", ON_DEVICE), HOST, "rate", 0.9)
        found.append(judge(aio, measurements.results))
        gds = Target(f"{what}: gds / aio", name, ("gds", ON_DEVICE), ("aio", ON_DEVICE), "rate", 1.0)
        if measurements.gds and not measurements.gds["bytes_gds"]:
            # What went through the host is aio once more.
            note = "; ".join(measurements.gds["fallbacks"]) or "no byte went directly"
            found.append(Verdict(gds.what, None, "at least", gds.bound, note=note))
        else:
            found.append(judge(gds, measurements.results))
    return found


# -- reporting ---------------------------------------------------------------------------------------------------------


def report(settings: Settings, measurements: Measurements) -> str:
    """All tables and notes, as text."""
    rows = [
        [name, f"{seconds:.3f}", f"{settings.size / seconds / 1e9:.2f}", ""]
        for name, seconds in measurements.first_requests.items()
    ]
    first = table("First read after start-up, none of the samples above", ["contender", "s", "GB/s", ""], rows, left=1)
    tables = [*map(rate_table, measurements.results), first, verdict_table(verdicts(settings, measurements))]
    return "\n".join([*tables, *(f"note: {note}" for note in measurements.notes)])


def as_json(settings: Settings, measurements: Measurements, device: torch.device, started: str) -> dict[str, Any]:
    return document(
        "gpu_io",
        started,
        settings,
        verdicts(settings, measurements),
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        first_request_seconds=measurements.first_requests,
        gds=measurements.gds,
        notes=measurements.notes,
        workloads=all_workloads(measurements.results),
    )


# -- the command line --------------------------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=positive, default=7, help="measurements of each contender (default: 7)")
    parser.add_argument("--size", type=size, default=1 << 30, help="bytes of the tensor (default: 1G)")
    given = parser.parse(arguments)
    return Settings(given.dir, given.size, given.rounds), given.json


def main(arguments: Sequence[str] | None = None) -> int:
    settings, json_path = parse_arguments(arguments)
    if not torch.cuda.is_available():
        print(f"gpu_io: needs a CUDA device, and PyTorch {torch.__version__} sees none", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    with measuring("gpu_io") as started:
        measurements = measure(settings, device, print_step)
    print(report(settings, measurements))
    write_json(json_path, as_json(settings, measurements, device, started))
    failed = [series for result in measurements.results for series in result.series if series.failure]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
