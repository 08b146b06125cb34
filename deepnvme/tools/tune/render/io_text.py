"""Formats the results of ds_io as text and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from deepnvme.tools.tune.measure.figures import Percentiles, Spread
from deepnvme.tools.tune.measure.job import Job, Measurement
from deepnvme.tools.tune.sizes import GIB, size_text
from deepnvme.version import __version__

_WIDTH = 15


def render(measurement: Measurement) -> str:
    """Return the text that ds_io prints.

    First the lines that DeepSpeed's ds_io prints and other tools parse, in which a GB is 1024^3 bytes
    (deepspeed/nvme/test_ds_aio_utils.py); then further results, in which it is 10^9 bytes.
    """
    job = measurement.job
    lines = [_heading(job, measurement)]
    lines += [f"  {facts.path} ({facts.label})" for facts in measurement.folders]
    what = job.operation.capitalize()
    for name, seconds in (("Task", measurement.task_seconds), ("E2E", measurement.seconds)):
        lines.append(f"{name} {what} Latency = {seconds:.6f} sec")
        lines.append(f"{name} {what} Speed = {measurement.nbytes / seconds / GIB:.6f} GB/sec")
    rate = measurement.gb_per_second
    loops = len(measurement.samples)
    spread = f"median of {loops} loops, quartiles {rate.low:.2f} - {rate.high:.2f}" if loops > 1 else "one loop"
    lines += [
        _row("rate", f"{rate.median:.2f} GB/s ({spread}); GB is 10^9 bytes here, 1024^3 above"),
        _row("CPU time", f"{measurement.cpu_seconds_per_gb:.3f} s/GB"),
        _row("a request", _latency(measurement.request_latency)),
    ]
    if measurement.block_latency is not None:
        lines.append(_row("a block", _latency(measurement.block_latency)))
    lines.append(_row("bytes", _paths(measurement)))
    lines += [_row("", f"{reason} ({count} times)") for reason, count in measurement.fallbacks.items()]
    if job.validate:
        lines.append(_row("validation", "tensors and files agree"))
    if not job.setting.overlap_events:
        lines.append(_row("note", "--sequential_requests changes nothing: this engine always overlaps"))
    lines += _fio(measurement)
    return "\n".join(lines)


def as_document(measurement: Measurement) -> dict[str, Any]:
    """Return all results as JSON types.

    Sizes are in bytes, times in seconds, and a GB is 10^9 bytes; except under "deepspeed", which has the values of DeepSpeed's
    lines, where it is 1024^3 bytes.
    """
    job, paths, block = measurement.job, measurement.paths, measurement.block_latency
    total, names = measurement.nbytes, [field.name for field in dataclasses.fields(job)]
    return {
        "tool": "ds_io",
        "version": __version__,
        "job": {
            **{name: getattr(job, name) for name in names if name not in ("places", "setting")},
            "places": [{"folder": str(place.folder), "device": place.device} for place in job.places],
            "setting": job.setting.model_dump(),
        },
        "folders": [dataclasses.asdict(facts) for facts in measurement.folders],
        "backend": measurement.backend,
        "memory": measurement.memory,
        "gb_per_second": dataclasses.asdict(measurement.gb_per_second),
        "cpu_seconds_per_gb": measurement.cpu_seconds_per_gb,
        "request_latency": dataclasses.asdict(measurement.request_latency),
        "block_latency": None if block is None else dataclasses.asdict(block),
        "bytes": None if paths is None else {"direct": paths.direct, **dataclasses.asdict(paths)},
        "fallbacks": dict(measurement.fallbacks),
        "deepspeed": {
            "task_latency": measurement.task_seconds,
            "task_speed": total / measurement.task_seconds / GIB,
            "e2e_latency": measurement.seconds,
            "e2e_speed": total / measurement.seconds / GIB,
        },
        "loops": [_loop(sample) for sample in measurement.samples],
        "warmup": [_loop(sample) for sample in measurement.warmup],
        "fio": None if measurement.fio is None else dataclasses.asdict(measurement.fio),
    }


def _loop(sample: Any) -> dict[str, Any]:
    """Return one loop as JSON types."""
    found: dict[str, Any] = dataclasses.asdict(sample)
    del found["block_latency"]  # the document has that of all loops together
    return {**found, "task_seconds": sample.task_seconds, "gb_per_second": sample.gb_per_second}


def _heading(job: Job, measurement: Measurement) -> str:
    """Return the first line: what was measured, and how."""
    setting = job.setting
    parts = [f"{job.operation} of {size_text(job.io_size)} by {job.engine}"]
    if measurement.backend is not None:
        workers = setting.intra_op_parallelism
        parts += [
            f"{measurement.backend}, block {size_text(setting.block_size)}, depth {setting.queue_depth}",
            f"{workers} worker{'s' if workers > 1 else ''}",
        ]
    count = len(job.places)
    parts += [f"{count} processes"] if count > 1 else []
    parts += [measurement.memory]
    parts += ["fsync"] if job.fsync and job.operation == "write" else []
    return ", ".join(parts)


def _row(name: str, text: str) -> str:
    return f"{name:<{_WIDTH}}{text}"


def _latency(found: Percentiles) -> str:
    """Return percentiles as text, in milliseconds."""
    shown = (("p50", found.p50), ("p90", found.p90), ("p99", found.p99), ("p99.9", found.p999), ("longest", found.longest))
    return ", ".join(f"{name} {_milliseconds(value)}" for name, value in shown) + f" ms ({found.count} of them)"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _paths(measurement: Measurement) -> str:
    """Return how many bytes took which path, as text."""
    paths = measurement.paths
    if paths is None:
        if measurement.job.engine.startswith("torch"):
            return "all buffered: torch goes through the page cache"
        return f"not counted: {measurement.job.engine} keeps no statistics"
    total = max(paths.direct + paths.buffered + paths.gds, 1)
    parts = [f"direct {_share(paths.direct, total)}"]
    parts += [f"of them staged through a copy {_share(paths.staged, total)}"] if paths.staged else []
    parts += [f"buffered by the page cache {_share(paths.buffered, total)}"]
    parts += [f"GPUDirect {_share(paths.gds, total)}"] if measurement.job.setting.use_gds else []
    return ", ".join(parts)


def _share(part: int, total: int) -> str:
    return f"{part / 1e9:.2f} GB ({100 * part / total:.4g} %)"


def _fio(measurement: Measurement) -> list[str]:
    """Return the lines about fio; none without a comparison."""
    fio = measurement.fio
    if fio is None:
        return []
    rate = Spread.of([sample.gb_per_second for sample in fio.samples])
    cpu = sum(sample.cpu_seconds for sample in fio.samples) / (sum(sample.nbytes for sample in fio.samples) / 1e9)
    return [
        _row("fio", f"{rate.median:.2f} GB/s, {cpu:.3f} CPU s/GB ({fio.version}, {fio.ioengine}, {fio.buffers})"),
        _row("ours / fio", f"{fio.ratio.median:.2f} (quartiles {fio.ratio.low:.2f} - {fio.ratio.high:.2f}, loop by loop)"),
    ]
