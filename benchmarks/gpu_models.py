"""Models on a GPU whose state is on the drive: checkpoints, streamed weights, optimizer states, keys and values, activations.

    python benchmarks/gpu_models.py --dir /mnt/nvme --json gpu_models.json

Each contender has its turn, with nothing of its files in the page cache, and its time ends when the device has done its work. A
ratio is taken round by round. Parts that would begin after ``--seconds`` are left out, and named. transformers, accelerate,
fastsafetensors and runai-model-streamer take part where they are installed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from harness import checkpoints, drive, in_memory, layers, llama, meter
from harness.activation_models import GPT, GPTShape
from harness.checkpoints import nbytes_of
from harness.command_line import Parser, Progress, measuring, print_step, write_json
from harness.comparison import Comparison, Comparisons, Counts, judge, measure_interleaved, over_limit, times_as_fast
from harness.documents import all_comparisons, document
from harness.optimizer_steps import STATE_BYTES, drive_limits, quieten
from harness.tables import spread_text, table, verdict_table
from harness.workloads import ContenderFailed

import deepnvme
from deepnvme.streaming import OffloadedCache, stream
from deepnvme.tools.tune.command_line import positive
from deepnvme.tools.tune.figures import Spread
from deepnvme.tools.tune.folder import NotMeasurable, check_memory, sync

MIB = 1 << 20
OURS, LIMITS = "deepnvme", "limits"


@dataclass(frozen=True)
class Settings:
    """What to measure, and how large."""

    directory: Path
    rounds: int
    seconds: int
    width: int
    layers: int
    vocabulary: int

    @property
    def state_bytes(self) -> int:
        """Of the checkpoint."""
        return nbytes_of(checkpoints.transformer(self.width, self.layers, self.vocabulary, "meta"))

    @property
    def llama(self) -> llama.Shape:
        """Half as many layers, for the part that has to read all of them for each token."""
        return llama.Shape(self.width, max(1, self.layers // 2), self.vocabulary)


@dataclass(frozen=True)
class Measured:
    """A part of the benchmark on a device, in a directory of its own."""

    settings: Settings
    device: torch.device
    directory: Path
    progress: Progress
    found: Comparisons

    def turn(self, work: Callable[[], Any], nbytes: int = 0) -> Callable[[], Counts]:
        """Return a contender: its work on a quiet drive, until the device is idle. ``nbytes``: that it moves."""

        def once() -> Counts:
            kept: Any = None

            def until_idle() -> None:
                nonlocal kept  # freeing is not part of the time
                kept = work()
                self.wait()

            quieten(self.directory)
            self.wait()
            taken = {**meter.measure(until_idle), "bytes": nbytes}
            return {**taken, **(kept if isinstance(kept, dict) and "bytes_read" in kept else {})}

        return once

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def compare(self, title: str, contenders: dict[str, Callable[[], Counts]]) -> Comparison[str, Counts]:
        comparison = measure_interleaved(title, contenders, self.settings.rounds, self.progress)
        self.found.comparisons[title] = comparison
        return comparison

    def judge(self, title: str, what: str, who: tuple[str, ...], figure: Callable[..., float], bound: float) -> None:
        """Add a verdict to a comparison: at least this."""
        verdict = judge(self.found.comparisons[title], f"{title}, {what}", who, figure, "at least", bound)
        self.found.verdicts.append(verdict)


# -- checkpoints ---------------------------------------------------------------------------------------------------------


def compare_checkpoints(part: Measured) -> None:
    """A state in the device's memory, saved and loaded."""
    settings, device, directory = part.settings, part.device, part.directory
    made = checkpoints.transformer(settings.width, settings.layers, settings.vocabulary)
    state = {name: tensor.to(device) for name, tensor in made.items()}
    del made
    nbytes = nbytes_of(state)

    def saving(name: str) -> Callable[[], Counts]:
        path = directory / f"{name}.pt"

        def save() -> None:
            checkpoints.library(name).save(state, path)

        once = part.turn(save, nbytes)

        def anew() -> Counts:
            checkpoints.remove(path)
            try:
                return once()
            finally:
                checkpoints.remove(path)

        return anew

    title = "save of a state on the GPU"
    part.compare(title, {OURS: saving("deepnvme"), "torch.save": saving("torch")})
    part.judge(title, "times as fast: deepnvme / torch.save", (OURS, "torch.save"), times_as_fast, 4.0)
    path = directory / "state.safetensors"
    deepnvme.safetensors.save_file(state, path)
    state.clear()
    title = "load of safetensors to the GPU"
    part.compare(title, {name: part.turn(functools.partial(load, path, device), nbytes) for name, load in LOADING.items()})
    for other, bound in (("safetensors", 1.3), ("fastsafetensors", 1.0), ("Run:ai", 1.0)):
        part.judge(title, f"times as fast: deepnvme / {other}", (OURS, other), times_as_fast, bound)


def _load_by_safetensors(path: Path, device: torch.device) -> checkpoints.State:
    import safetensors.torch

    return safetensors.torch.load_file(path, device=str(device))


def _load_by_fastsafetensors(path: Path, device: torch.device) -> checkpoints.State:
    try:
        from fastsafetensors import fastsafe_open
    except ImportError as error:
        raise ContenderFailed("not run: install fastsafetensors") from error
    with fastsafe_open([str(path)], device=str(device), nogds=not Path("/proc/driver/nvidia-fs").exists()) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping


def _load_by_run_ai(path: Path, device: torch.device) -> checkpoints.State:
    os.environ.setdefault("RUNAI_STREAMER_LOG_LEVEL", "ERROR")
    try:
        from runai_model_streamer import SafetensorsStreamer
    except ImportError as error:
        raise ContenderFailed("not run: install runai-model-streamer") from error
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        return {name: tensor.to(device, non_blocking=True) for name, tensor in streamer.get_tensors()}


LOADING: dict[str, Callable[[Path, torch.device], checkpoints.State]] = {
    OURS: lambda path, device: deepnvme.safetensors.load_file(path, device=device),
    "safetensors": _load_by_safetensors,
    "fastsafetensors": _load_by_fastsafetensors,
    "Run:ai": _load_by_run_ai,
}


# -- models --------------------------------------------------------------------------------------------------------------


def compare_streaming(part: Measured) -> None:
    """A Llama that is read for each token, against accelerate's disk_offload."""
    shape, device, new = part.settings.llama, part.device, 2
    checkpoint = part.directory / "llama"
    llama.save(shape, checkpoint)
    sync(checkpoint)
    ids = torch.randint(1, shape.vocabulary, (1, 32), generator=torch.Generator().manual_seed(0)).to(device)

    def generating(model: Any) -> Callable[[], Counts]:
        def generate() -> None:
            with torch.inference_mode():
                model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False)

        return part.turn(generate, new * read)

    def offloaded() -> Any:
        try:
            from accelerate import disk_offload
        except ImportError as error:
            raise ContenderFailed("not run: install accelerate") from error
        return disk_offload(llama.loaded(shape, checkpoint), part.directory / "accelerate", execution_device=device)

    model = llama.empty(shape)
    model.model.rotary_emb.to(device)
    read = sum(weight.nbytes for weight in model.model.layers.parameters())  # for each token
    with contextlib.ExitStack() as stack:
        stack.enter_context(stream(model, checkpoint, device=device))
        limits = stack.enter_context(drive_limits(part.directory / "drive", 512 * MIB, part.settings.rounds, ("read",)))
        contenders = {OURS: generating(model), LIMITS: limits}
        try:
            contenders["accelerate"] = generating(offloaded())
        except ContenderFailed as error:
            contenders["accelerate"] = functools.partial(_absent, str(error))
        contenders[OURS]()  # compiles kernels
        title = "Llama streamed to the GPU"
        part.compare(title, contenders)

    def share(ours: Counts, limit: Counts) -> float:
        return float(ours["bytes"] / ours["seconds"] / limit["read"])

    part.judge(title, "share of the drive's rate", (OURS, LIMITS), share, 0.85)
    part.judge(title, "times as fast: deepnvme / accelerate", (OURS, "accelerate"), times_as_fast, 1.5)


def _absent(why: str) -> Counts:
    raise ContenderFailed(why)


def compare_optimizers(part: Measured) -> None:
    """AdamW of parameters on the device, with its states on the drive or in the device's memory."""
    settings, device = part.settings, part.device
    model = layers.Layers(settings.width, max(2, settings.layers // 2)).to(device)
    row = torch.linspace(-1, 1, settings.width, dtype=torch.bfloat16, device=device)[None]
    model(row).float().square().mean().backward()
    parameters = list(model.parameters())
    nbytes = STATE_BYTES * sum(parameter.numel() for parameter in parameters)
    options: dict[str, Any] = {"lr": 1e-4, "fused": True}
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(
            deepnvme.OffloadedOptimizer(
                parameters, torch.optim.AdamW, path=part.directory / "states", master_weights=True, **options
            )
        )
        theirs = in_memory.InMemory(parameters, torch.optim.AdamW, **options)
        limits = stack.enter_context(drive_limits(part.directory / "drive", 512 * MIB, settings.rounds))

        def step() -> Counts:
            ours.step()
            report = ours.report()
            return {"bytes_read": report.bytes_read, "bytes_written": report.bytes_written}

        for _ in range(2):  # the first makes states and files
            step()
            theirs.step()
        title = "AdamW step of parameters on the GPU"
        contenders = {OURS: part.turn(step, 2 * nbytes), LIMITS: limits, "in GPU memory": part.turn(theirs.step)}
        part.compare(title, contenders)

    def share(*samples: Counts) -> float:
        return 1 / over_limit(*samples, state_bytes=nbytes)

    part.judge(title, "share of max(the drive's rates, in GPU memory)", (OURS, LIMITS, "in GPU memory"), share, 0.8)


def compare_caches(part: Measured) -> None:
    """Keys and values of a long prompt on the drive, or as transformers keeps them."""
    try:
        from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise NotMeasurable(f"install transformers ({error})") from error
    torch.manual_seed(0)
    prompt, new, sequences = 64 * part.settings.layers, 8, 4
    config = LlamaConfig(
        hidden_size=512, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4, vocab_size=1000,
        max_position_embeddings=prompt + new, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(part.device, torch.bfloat16)
    ids = torch.randint(1, 1000, (sequences, prompt)).to(part.device)

    def generating(make: Callable[[], Any]) -> Callable[[], Counts]:
        def generate() -> None:
            with contextlib.ExitStack() as stack, torch.inference_mode():
                cache = make()
                if isinstance(cache, OffloadedCache):
                    stack.enter_context(cache)
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), cache=cache, do_sample=False, max_new_tokens=new,
                    min_new_tokens=new,
                )  # fmt: skip

        return part.turn(generate)

    caches: dict[str, Callable[[], Any]] = {
        OURS: lambda: OffloadedCache(config, path=part.directory),
        "in GPU memory": lambda: DynamicCache(config=config),
    }
    if part.device.type == "cuda":
        caches["in host memory"] = lambda: DynamicCache(config=config, offloading=True)
    contenders = {name: generating(make) for name, make in caches.items()}
    contenders[OURS]()  # compiles kernels
    part.compare(f"{new} tokens for {sequences} prompts of {prompt}: keys and values", contenders)


def compare_activations(part: Measured) -> None:
    """A training step of a GPT that saves its activations on the drive, or in the device's memory."""
    shape = GPTShape(width=1024, layers=max(2, part.settings.layers // 2), sequences=4, tokens=16 * part.settings.layers)
    torch.manual_seed(0)
    model = GPT(shape).to(part.device)
    x = torch.randn(shape.sequences, shape.tokens, shape.width, device=part.device)

    def stepping(context: Any) -> Callable[[], Counts]:
        def step() -> None:
            with context:
                loss = model(x).float().square().mean()
            loss.backward()

        once = part.turn(step)

        def watched() -> Counts:
            if part.device.type != "cuda":
                return once()
            torch.cuda.reset_peak_memory_stats(part.device)
            return {**once(), "peak": torch.cuda.max_memory_allocated(part.device)}

        return watched

    ours = deepnvme.offload.save_on_disk(part.directory / "activations", memory_budget=256 * MIB)
    with contextlib.closing(ours):
        contenders = {
            OURS: stepping(ours),
            "in GPU memory": stepping(contextlib.nullcontext()),
            "save_on_cpu": stepping(torch.autograd.graph.save_on_cpu(pin_memory=part.device.type == "cuda")),
        }
        for once in contenders.values():  # gradients and files are made
            once()
        part.compare("step of a GPT: activations", contenders)


PARTS: dict[str, Callable[[Measured], None]] = {
    "checkpoints": compare_checkpoints,
    "streaming": compare_streaming,
    "optimizer": compare_optimizers,
    "cache": compare_caches,
    "activations": compare_activations,
}


# -- measuring -----------------------------------------------------------------------------------------------------------


@dataclass
class Measurements(Comparisons):
    """What one run found out; of the parts that it did not see, why in ``notes``."""

    notes: list[str] = field(default_factory=list)


def fitting(settings: Settings, device: torch.device) -> Settings:
    """Return the settings with as many layers as the device has memory for: the state, and the same once more."""
    if device.type != "cuda":
        return settings
    free = torch.cuda.mem_get_info(device)[0]
    while settings.layers > 2 and 2 * settings.state_bytes + (2 << 30) > free:
        settings = replace(settings, layers=settings.layers - 1)
    return settings


def measure(settings: Settings, device: torch.device, progress: Progress) -> Measurements:
    """Run every part in a directory of its own below ``settings.directory``, which is empty again afterwards."""
    check_memory(2 * settings.state_bytes, "give fewer --layers")
    drive.check(settings.directory, 3 * settings.state_bytes)
    measurements, begun = Measurements(), time.monotonic()
    for name, part in PARTS.items():
        if time.monotonic() - begun >= settings.seconds:
            measurements.notes.append(f"{name}: not seen: {settings.seconds} seconds were over")
            continue
        progress(f"{name}: preparing")
        with tempfile.TemporaryDirectory(prefix="gpu_models-", dir=settings.directory) as directory:
            try:
                part(Measured(settings, device, Path(directory), progress, measurements))
            except (NotMeasurable, ContenderFailed) as error:
                measurements.notes.append(f"{name}: not seen: {error}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return measurements


# -- reporting -----------------------------------------------------------------------------------------------------------


def rows(comparison: Comparison[str, Counts]) -> Iterator[list[str]]:
    """Seconds, GB/s and CPU seconds for each GB of every contender; why one took no part."""
    for name, samples in comparison.samples.items():
        if name == LIMITS:
            continue
        if not samples:
            yield [name, "-", "-", "-", "-", comparison.absent.get(name, "")]
            continue
        seconds = spread_text(Spread.of([sample["seconds"] for sample in samples]), 3)
        last = samples[-1]
        nbytes, peak = last["bytes"], last.get("peak")
        rate = f"{Spread.of([nbytes / sample['seconds'] / 1e9 for sample in samples]).median:.2f}" if nbytes else "-"
        cpu = Spread.of([sample["cpu_seconds"] / (nbytes / 1e9 if nbytes else 1) for sample in samples]).median
        yield [name, seconds, rate, f"{cpu:.2f}", f"{peak / MIB:.0f}" if peak else "-", comparison.absent.get(name, "")]


def report(measurements: Measurements) -> str:
    header = ["contender", "s, median (quartiles)", "GB/s", "CPU s/GB, or CPU s", "MiB of GPU memory", ""]
    tables = [table(title, header, rows(each), left=1) for title, each in measurements.comparisons.items()]
    return "\n".join([*tables, verdict_table(measurements.verdicts), *(f"note: {note}" for note in measurements.notes)])


def as_json(settings: Settings, measurements: Measurements, device: torch.device, started: str) -> dict[str, Any]:
    return document(
        "gpu_models", started, settings, measurements.verdicts, notes=measurements.notes,
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        torch=torch.__version__, state_bytes=settings.state_bytes,
        comparisons=all_comparisons(measurements.comparisons),
        rows={title: list(rows(each)) for title, each in measurements.comparisons.items()},
    )  # fmt: skip


# -- the command line ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=positive, default=2, help="turns of each contender (default: 2)")
    parser.add_argument("--seconds", type=positive, default=240, help="no part begins afterwards (default: 240)")
    parser.add_argument("--width", type=positive, default=3072, help="of the models, a multiple of 128 (default: 3072)")
    parser.add_argument("--layers", type=positive, default=32, help="at most, of the models (default: 32, 3.7 billion weights)")
    parser.add_argument("--vocabulary", type=positive, default=32064, help="of the models (default: 32064)")
    given = parser.parse(arguments)
    if not torch.cuda.is_available():
        print(f"gpu_models: needs a CUDA device, and PyTorch {torch.__version__} sees none", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    settings = Settings(given.dir, given.rounds, given.seconds, given.width, given.layers, given.vocabulary)
    settings = fitting(settings, device)
    with measuring("gpu_models") as started:
        measurements = measure(settings, device, print_step)
    print(report(measurements))
    write_json(given.json, as_json(settings, measurements, device, started))
    return 0


if __name__ == "__main__":
    sys.exit(main())
