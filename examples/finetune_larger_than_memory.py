"""Fine-tune a Llama four times as large as the memory for it, all of its weights and by LoRA: the losses that it has in memory.

    python examples/finetune_larger_than_memory.py [--mode full|lora|both] [--quantize int8|int4] [--layers N] [--hidden N]
                                                   [--steps N] [--plot DIR] [--dir DIR]

Each training is a process of its own. The kernel gives the one on the drive a quarter of what the model takes, with its gradients
and states or, for LoRA, its frozen weights, beyond what Python and its packages take: RLIMIT_DATA, which counts all private
memory, whether touched or not, and refuses more. The same training follows in memory, with the limit, which it exceeds, and
without. Weights are random and in float32. Files go to a temporary directory under DIR (default: the current directory).
"""

import argparse
import contextlib
import ctypes
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import deepnvme
import deepnvme.safetensors
from deepnvme.model.quantization import dequantize, is_worth_quantizing, quantize

MIB = 1 << 20
TIMES = 4  # the model is so many times as large as the memory
LEAST = 64 * MIB  # of memory: threads, a layer that computes and the drive's measurement take about half of it
M_MMAP_THRESHOLD = -3  # of mallopt(3)
ADAMW = {"lr": 3e-3, "fused": True}
TITLES = {"full": "Full fine-tuning", "lora": "LoRA"}


@dataclass(frozen=True)
class Job:
    """A training to do in a process of its own. ``limit``: bytes beyond those at its begin; None for any number."""

    mode: str
    on_drive: bool
    limit: int | None
    layers: int
    hidden: int
    tokens: int
    steps: int
    rank: int
    quantize: deepnvme.quantization.Scheme | None
    directory: str

    @property
    def checkpoint(self) -> Path:
        return Path(self.directory) / f"checkpoint-{self.mode}"

    @property
    def name(self) -> str:
        return "on the drive" if self.on_drive else "in memory"


# -- the model, and what it learns -------------------------------------------------------------------------------------


def configuration(job: Job) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        hidden_size=job.hidden,
        intermediate_size=job.hidden * 11 // 4,
        num_hidden_layers=job.layers,
        num_attention_heads=max(1, job.hidden // 64),
        use_cache=False,
        dtype="float32",
    )


def empty_model(job: Job) -> LlamaForCausalLM:
    """Return the model without values, which takes no memory."""
    with torch.device("meta"):
        return LlamaForCausalLM(configuration(job))


def write_checkpoint(job: Job) -> None:
    """Write random weights as transformers does, in one file for each layer, which is all that is in memory."""
    torch.manual_seed(0)
    model = empty_model(job)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, weight in model.state_dict().items():
        file = f"layer-{name.split('.')[2]}" if ".layers." in name else "rest"
        files.setdefault(f"{file}.safetensors", {})[name] = weight
    job.checkpoint.mkdir()
    for file, weights in files.items():
        made = {name: torch.randn(each.shape) * 0.02 for name, each in weights.items() if each.dim() > 1}
        made |= {name: torch.ones(each.shape) for name, each in weights.items() if each.dim() == 1}
        deepnvme.safetensors.save_file(made, job.checkpoint / file, {"format": "pt"}, fsync=False)
    index = {"metadata": {}, "weight_map": {name: file for file, weights in files.items() for name in weights}}
    (job.checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    model.config.save_pretrained(job.checkpoint)


class LoRALinear(torch.nn.Linear):
    """A frozen layer, and beside it two small ones that are trained, whose product begins as zero."""

    def __init__(self, linear: torch.nn.Linear, rank: int) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.down = torch.nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = torch.nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.down), self.up)


def add_lora(model: LlamaForCausalLM, rank: int) -> None:
    """Freeze the model, and have an adapter beside each linear layer of its layers."""
    model.requires_grad_(False)
    torch.manual_seed(1)
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, LoRALinear(child, rank))


def batches(job: Job) -> Iterator[torch.Tensor]:
    """Yield the bytes of sums, one sum on each line."""
    numbers = random.Random(0)
    for _ in range(job.steps):
        text = ""
        while len(text) < job.tokens:
            a, b = numbers.randrange(100), numbers.randrange(100)
            text += f"{a} + {b} = {a + b}\n"
        yield torch.tensor([list(text[: job.tokens].encode())])


# -- training, in a process of its own ---------------------------------------------------------------------------------


def say(kind: str, **more: object) -> None:
    """Tell the parent process what begins or was done."""
    print(json.dumps({"kind": kind, "at": time.perf_counter(), **more}), flush=True)


def private_bytes(process: int | str = "self") -> int:
    """Return what RLIMIT_DATA limits."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def do(job: Job) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.ones(512, 512) @ torch.ones(512, 512)  # starts threads
    save_memory()
    base = private_bytes()
    if job.limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (base + job.limit, base + job.limit))
    say("begin", base=base)
    try:
        (train_on_drive if job.on_drive else train_in_memory)(job)
    except (MemoryError, RuntimeError) as error:
        if job.on_drive or job.limit is None:
            raise
        text = str(error).partition("DefaultCPUAllocator: ")
        say("failed", error=f"{type(error).__name__}: {(text[2] or text[0]).splitlines()[0]}")


def save_memory() -> None:
    """Have glibc give back what is freed, of which it keeps much by default, and further threads have stacks of 1 MiB, not 8."""
    libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.mallopt(M_MMAP_THRESHOLD, MIB // 8)
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(MIB))
    libc.pthread_setattr_default_np(attributes)


def train_on_drive(job: Job) -> None:
    model = empty_model(job)
    if job.mode == "lora":
        add_lora(model, job.rank)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with deepnvme.OffloadedTraining(
        model,
        torch.optim.AdamW,
        path=Path(job.directory) / "training",
        checkpoint=job.checkpoint,
        memory_budget=(job.limit or 0) * 2 // 5,  # beside it: what a layer computes with, stacks of threads, rests of malloc
        activations="nvme",
        quantize=job.quantize,
        **ADAMW,
    ) as training:
        for tokens in batches(job):
            say("forward")
            with training.micro_batch():
                loss = model(input_ids=tokens, labels=tokens).loss
                say("backward")
                loss.backward()
            say("last writes")
            training.step()
            say("step", loss=loss.item(), report=asdict(training.report()))


def train_in_memory(job: Job) -> None:
    model = LlamaForCausalLM.from_pretrained(job.checkpoint).train()
    if job.mode == "lora":
        add_lora(model, job.rank)
    if job.quantize is not None:
        use_quantized_values(model, job.quantize)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], **ADAMW)
    for tokens in batches(job):
        say("forward")
        loss = model(input_ids=tokens, labels=tokens).loss
        say("backward")
        loss.backward()
        say("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        say("step", loss=loss.item())


@torch.no_grad()
def use_quantized_values(model: torch.nn.Module, scheme: deepnvme.quantization.Scheme) -> None:
    """Give frozen weights the values that they have when they were quantised and dequantised."""
    for param in model.parameters():
        if not param.requires_grad and is_worth_quantizing(scheme, param.shape, param.dtype):
            dequantize(scheme, quantize(param, scheme), param)


# -- watching it -------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """A step that was completed. ``phases``: each with the time of its begin. ``report``: of a training on the drive."""

    loss: float
    phases: list[tuple[str, float]]
    end: float
    report: dict | None

    @property
    def begin(self) -> float:
        return self.phases[0][1]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class Training:
    """What is known of a training that goes on, or is over. ``memory``: times, and bytes beyond those at its begin."""

    job: Job
    base: int | None = None
    steps: list[Step] = field(default_factory=list)
    phases: list[tuple[str, float]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    failure: str | None = None

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def peak(self) -> int:
        return max((nbytes for _, nbytes in self.memory), default=0)

    def record(self, event: dict) -> None:
        """Take note of what the process has said."""
        kind, at = event["kind"], event["at"]
        if kind == "begin":
            self.base = event["base"]
        elif kind == "failed":
            self.failure = event["error"]
        elif kind == "step":
            self.steps.append(Step(event["loss"], self.phases, at, event.get("report")))
            self.phases = []
        else:
            self.phases = [*self.phases, (kind, at)]

    def sample(self, process: int, over: threading.Event) -> None:
        """Watch the memory of the process."""
        while not over.wait(0.01):
            with contextlib.suppress(OSError, StopIteration):  # it has ended
                nbytes = private_bytes(process)
                if self.base is not None:
                    self.memory.append((time.perf_counter(), max(0, nbytes - self.base)))


def watch(job: Job, console: Console) -> Training:
    """Do a training, and show how it goes."""
    training, over = Training(job), threading.Event()
    expected = job.limit is not None and not job.on_drive  # that it fails
    child = subprocess.Popen(
        [sys.executable, __file__, "--job", json.dumps(asdict(job))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if expected else None,
        text=True,
    )
    sampler = threading.Thread(target=training.sample, args=(child.pid, over))
    sampler.start()
    try:
        with contextlib.ExitStack() as stack:
            if console.is_terminal:
                stack.enter_context(Live(get_renderable=lambda: panel(training), console=console, refresh_per_second=8))
            for line in child.stdout or ():
                event = json.loads(line)
                training.record(event)
                if event["kind"] == "step" and not console.is_terminal:
                    text = ", ".join(f"{name} {value}" for name, value in figures(training))
                    console.print(text, highlight=False, soft_wrap=True)
    except BaseException:  # Ctrl-C among them
        child.kill()
        raise
    finally:
        code = child.wait()
        over.set()
        sampler.join()
        if child.stdout is not None:
            child.stdout.close()
    if code and not expected:
        raise SystemExit(f"the training {job.name} has failed, with exit code {code}")
    if code:
        training.failure = f"exit code {code}"
    return training


def figures(training: Training) -> list[tuple[str, str]]:
    """Return what is shown of a training: names and values, most of them of the last step."""
    job, found = training.job, [("step", f"{len(training.steps)} of {training.job.steps}")]
    if training.steps:
        step = training.steps[-1]
        found += [("loss", f"{step.loss:.4f}"), ("trained tokens/s", f"{job.tokens / step.seconds:.0f}")]
        if step.report is not None:
            read, written = (step.report[f"bytes_{what}"] / 1e9 / step.seconds for what in ("read", "written"))
            found.append(("drive", f"reads {read:.2f} GB/s and writes {written:.2f} GB/s"))
            activations = step.report["activations"]
            writes = step.report["waiting_to_write"] + activations["waiting_forward"]
            reads = step.report["waiting"] - step.report["waiting_to_write"] + activations["waiting_backward"]
            found.append(("waits", f"{reads:.2f} s for reads and {writes:.2f} s for writes, of {step.seconds:.2f} s"))
    if training.memory:
        limit = "" if job.limit is None else f" of {job.limit / MIB:.0f}"
        found.append(("memory", f"{training.memory[-1][1] / MIB:.0f} MiB, at most {training.peak / MIB:.0f}{limit}"))
    return found


def panel(training: Training) -> Panel:
    """Return what a terminal shows."""
    rows = Table.grid(padding=(0, 2))
    job, phases = training.job, training.phases
    if phases:
        now = f"{phases[-1][0]}, for {time.perf_counter() - phases[-1][1]:.1f} s"
    else:
        now = "over" if len(training.steps) == job.steps else "starting" if training.base is None else "reading the weights"
    rows.add_row("now", now, style="bold")
    for name, value in figures(training):
        rows.add_row(name, value)
    if training.memory and job.limit is not None:
        rows.add_row("", ProgressBar(total=job.limit, completed=training.memory[-1][1], width=50))
    return Panel(rows, title=f"{TITLES[job.mode]}, {job.name}", title_align="left", width=90)


# -- the plot ----------------------------------------------------------------------------------------------------------


def plot(on_drive: Training, in_memory: Training, path: Path) -> None:
    """Draw the memory over a step of both trainings."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
    job, step = on_drive.job, fastest(on_drive)
    names = {"tab:gray": (in_memory, "in memory, without a limit"), "tab:blue": (on_drive, "on the drive, its phases shaded")}
    for color, (training, name) in names.items():
        shown = fastest(training)
        samples = [(at - shown.begin, nbytes / MIB) for at, nbytes in training.memory if shown.begin <= at <= shown.end]
        axes.plot(*zip(*samples, strict=True), label=name, color=color, linewidth=1.4)
    size, limit = size_of(job) / MIB, (job.limit or 0) / MIB
    axes.axhline(size, color="black", linestyle=":", linewidth=1.2, label=f"{contents(job)}: {size:.0f} MiB")
    axes.axhline(limit, color="tab:red", linestyle="--", linewidth=1.4, label=f"limit of the one on the drive: {limit:.0f} MiB")
    ends = [at - step.begin for _, at in step.phases[1:]] + [step.seconds]
    for (name, at), end in zip(step.phases, ends, strict=True):
        begin = at - step.begin
        axes.axvspan(begin, end, color="tab:blue", alpha=0.12 if name == "backward" else 0.04, linewidth=0)
        axes.axvline(end, color="tab:blue", linewidth=0.8, alpha=0.5)
        if end - begin > step.seconds / 10:
            axes.annotate(name, ((begin + end) / 2, limit / 12), ha="center", color="tab:blue")
    text = axes.annotate("end", (step.seconds, limit / 12), (-4, 0), textcoords="offset points", ha="right")
    text.set_color("tab:blue")
    axes.set(xlabel="seconds of a step", ylabel="MiB beyond Python and its packages", xlim=0, ylim=0)
    axes.set_title(f"{TITLES[job.mode]}: memory over a step", loc="left")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def settled(training: Training) -> list[Step]:
    """Return the steps after the fourth: the first makes the states, and the fourth divides the memory anew."""
    return training.steps[4:] or training.steps


def fastest(training: Training) -> Step:
    """Return the fastest step that is typical."""
    return min(settled(training), key=lambda step: step.seconds)


def step_seconds(training: Training) -> str:
    """Return the median of the seconds of a step, and the least and the most if there are several."""
    each = [step.seconds for step in settled(training)]
    return f"{statistics.median(each):.2f}" + (f" ({min(each):.2f}-{max(each):.2f})" if len(each) > 1 else "")


# -- the command line --------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("full", "lora", "both"), default="both", help="what is trained (default: both)")
    parser.add_argument("--quantize", choices=deepnvme.quantization.SCHEMES, help="of LoRA's frozen weights, on the drive")
    parser.add_argument("--layers", type=int, help="layers of the model (default: 20)")
    parser.add_argument("--hidden", type=int, help="width of the model, a multiple of 64 (default: 512, and 1024 for LoRA)")
    parser.add_argument("--rank", type=int, default=8, help="of LoRA's adapters (default: 8)")
    parser.add_argument("--tokens", type=int, help="length of the sequence (default: 128)")
    parser.add_argument("--steps", type=int, help="training steps (default: 10)")
    parser.add_argument("--quick", action="store_true", help="a smaller model, and fewer steps")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw memory over a step there; needs matplotlib")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the drive to use")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


def job_of(arguments: argparse.Namespace, mode: str, directory: str) -> Job:
    """Return the training on the drive."""
    hidden, layers, tokens, steps = (256, 32, 64, 5) if arguments.quick else (512, 20, 128, 10)
    if mode == "lora":
        hidden *= 2  # frozen weights take a quarter of what trained ones take with gradients and AdamW's two averages
    job = Job(
        mode=mode,
        on_drive=True,
        limit=None,
        layers=arguments.layers or layers,
        hidden=arguments.hidden or hidden,
        tokens=arguments.tokens or tokens,
        steps=arguments.steps or steps,
        rank=arguments.rank,
        quantize=arguments.quantize if mode == "lora" else None,
        directory=directory,
    )
    limit = size_of(job) // TIMES
    if job.hidden % 64 or limit < LEAST:
        raise SystemExit(
            f"--hidden has to be a multiple of 64, and a quarter of the model at least {LEAST / MIB:.0f} MiB:"
            f" got {job.hidden}, and {limit / MIB:.0f} MiB with {job.layers} layers"
        )
    return Job(**{**asdict(job), "limit": limit})


def size_of(job: Job) -> int:
    """Return the bytes of the frozen weights or, of a model that is trained as a whole, of weights, gradients and states."""
    weights = sum(param.nbytes for param in empty_model(job).parameters())
    return weights if job.mode == "lora" else 4 * weights


def contents(job: Job) -> str:
    """Return what :func:`size_of` is the size of."""
    return "frozen weights" if job.mode == "lora" else "weights, gradients and states"


def finetune(arguments: argparse.Namespace, mode: str, directory: str, console: Console) -> str | None:
    """Do the trainings of one mode. Return what differs, if anything does."""
    job = job_of(arguments, mode, directory)
    size, limit = size_of(job) / MIB, (job.limit or 0) / MIB
    text = f"{TITLES[mode]}: {size:.0f} MiB of {contents(job)}, with {limit:.0f} MiB of memory by RLIMIT_DATA"
    console.print(text, highlight=False, soft_wrap=True)
    with console.status("writing random weights"):
        write_checkpoint(job)
    on_drive = watch(job, console)
    limited = watch(Job(**{**asdict(job), "on_drive": False}), console)
    console.print(f"in memory, with the same limit: {limited.failure or 'it has not failed'}", highlight=False, soft_wrap=True)
    in_memory = watch(Job(**{**asdict(job), "on_drive": False, "limit": None}), console)

    table = Table("step", "loss in memory", "on the drive", "", title=f"{TITLES[mode]}: the losses")
    for number, (expected, found) in enumerate(zip(in_memory.losses, on_drive.losses, strict=True), 1):
        table.add_row(str(number), f"{expected:.6f}", f"{found:.6f}", "the same" if expected == found else "differs")
    console.print(table)
    columns = ("", "limit, MiB", "peak, MiB", "s/step, median\n(of the fifth and later)")
    table = Table(*columns, title="Memory beyond Python and its packages")
    table.add_row("in memory", "none", f"{in_memory.peak / MIB:.0f}", step_seconds(in_memory))
    table.add_row("on the drive", f"{limit:.0f}", f"{on_drive.peak / MIB:.0f}", step_seconds(on_drive))
    console.print(table)
    if arguments.plot:
        arguments.plot.mkdir(parents=True, exist_ok=True)
        plot(on_drive, in_memory, arguments.plot / f"memory-{mode}.png")
    if in_memory.losses != on_drive.losses:
        return f"{TITLES[mode]}: the losses differ, {in_memory.losses} in memory, {on_drive.losses} on the drive"
    console.print(f"{TITLES[mode]}: {job.steps} losses, every one the same", highlight=False)
    return None


def main() -> None:
    arguments = parse_arguments()
    if arguments.job:
        do(Job(**json.loads(arguments.job)))
        return
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"other processes use this machine (load {load:.1f}): the times will vary", file=sys.stderr)
    console = Console()
    modes = ("full", "lora") if arguments.mode == "both" else (arguments.mode,)
    differences = []
    for mode in modes:
        with tempfile.TemporaryDirectory(prefix="deepnvme-", dir=arguments.dir) as directory:
            differences.append(finetune(arguments, mode, directory, console))
    if any(differences):
        raise SystemExit("\n".join(filter(None, differences)))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # there is nothing to download
    main()
