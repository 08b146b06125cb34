"""A mixture of experts that are read when they are chosen, in little memory, against other ways to run it from the drive.

    python benchmarks/experts.py --dir /mnt/nvme

All contenders decode the same tokens (words as frequent as Zipf says) and take turns, each in a process of its own, in a
control group with a memory limit, with nothing of its files in the page cache. "store" and "in place" are deepnvme's streams,
which read all experts, a layer at a time, since there is no memory to read another ahead; "accelerate" is transformers' loading
with everything offloaded to the disk; "airllm" is AirLLM. The store is built without the limit, and accelerate has it once its
model is loaded: it is killed otherwise. "in memory" has no limit: its time and the drive's time for the bytes of chosen experts
that were not in memory are what cannot be undercut. torch's kernels give float32 other last bits where a weight is aligned to 8
bytes only, as transformers maps it from most files: so logits are compared with those of weights that transformers maps, and of
the same weights in memory of torch's.

Needs transformers, safetensors and accelerate; and root, for the limit. The checkpoint has 8.5 GB. So have, each, the store and
what accelerate and AirLLM write: --contender, given several times, chooses some of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from expert_residents import best_fixed, zipf
from harness.memory_limit import memory_limit
from harness.meter import forget_peak, peak

import deepnvme.streaming
from deepnvme.drives.profiles import engine_for
from deepnvme.tools.tune.folder import drop_pages

CONTENDERS = ("in memory", "store", "in place", "accelerate", "airllm", "experts")
WORDS = 500
FIRST = 3
"""Tokens whose logits are compared, bit by bit."""
READ_AT_ONCE = 4


def config(options: argparse.Namespace) -> Any:
    """Return the configuration of a mixture with the shape of OLMoE, with fewer layers and words."""
    import transformers

    return transformers.OlmoeConfig(
        hidden_size=options.width,
        intermediate_size=options.width // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 128,
        num_key_value_heads=options.width // 128,
        vocab_size=8192,
        eos_token_id=None,
        pad_token_id=0,
    )


def make(options: argparse.Namespace) -> None:
    """Write the checkpoint."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(options), dtype=getattr(torch, options.dtype))
    torch.nn.init.normal_(model.model.embed_tokens.weight)  # so that words differ, and routers choose by them
    model.save_pretrained(options.dir / "checkpoint")


def load(options: argparse.Namespace) -> Any:
    """Return the model as the contender has it."""
    import transformers

    folder = options.dir / "checkpoint"
    if options.worker == "airllm":
        from airllm import AutoModel

        (options.dir / "airllm").mkdir(exist_ok=True)
        model = AutoModel.from_pretrained(str(folder), device="cpu", layer_shards_saving_path=str(options.dir / "airllm"))
        return model
    if options.worker in ("in memory", "accelerate"):
        where: dict[str, Any] = {}
        if options.worker == "accelerate":
            where = {"device_map": {"": "disk"}, "offload_folder": options.dir / "accelerate"}
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **where).eval().requires_grad_(False)
    if options.worker == "experts":
        return deepnvme.streaming.from_pretrained(folder, memory_budget=options.budget * 10**6)
    how: dict[str, Any] = {"store": {"path": options.dir / "store", "progress": False}, "in place": {"experts": "streamed"}}
    return deepnvme.streaming.from_pretrained(folder, prefetch=0, **how[options.worker])


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Decode the tokens with one contender, and return its figures."""
    import transformers

    transformers.logging.disable_progress_bar()
    with torch.inference_mode():  # what comes with the first use of torch and transformers is nobody's memory
        small = transformers.OlmoeConfig(hidden_size=64, intermediate_size=32, num_hidden_layers=1, vocab_size=64)
        transformers.OlmoeForCausalLM(small)(torch.ones((1, 1), dtype=torch.long))
    drop_files(options)
    forget_peak()
    before = peak()
    model = load(options)
    if options.limited_by:
        drop_files(options)
        options.limited_by.write_text(str(os.getpid()))
    experts = model.streaming.experts if options.worker == "experts" else None
    torch.manual_seed(1)
    words = torch.multinomial(torch.tensor(zipf(WORDS)), options.warm + options.tokens, replacement=True) + 7
    figures: dict[str, Any] = {"logits": [digest(logits) for logits in decoded(model, words[:FIRST])]}
    trace: list[tuple[int, int]] = []
    if experts is not None:
        note_choices(model, trace)
    for count, _ in enumerate(decoded(model, words), 1):
        if count == options.warm:
            if experts is not None:
                experts.reset()
            trace.clear()
            begun = time.perf_counter()
    seconds = time.perf_counter() - begun
    figures |= {"seconds": seconds / options.tokens, "grown": peak() - before}
    if options.worker == "in memory":
        for weight in model.parameters():
            if weight.data_ptr() % 64:  # in a mapped file
                weight.data = weight.data.clone()
        figures["aligned"] = [digest(logits) for logits in decoded(model, words[:FIRST])]
    if experts is not None:
        report = experts.report()
        capacity = report.memory_budget * len(report.layers) * 64 // expert_bytes(model)
        figures |= {"read": report.bytes_read / options.tokens, "missed": report.bytes_missed / options.tokens}
        figures |= {"hit_rate": report.hit_rate, "best_fixed": best_fixed(trace, capacity) / len(trace)}
        figures |= {"waited": report.seconds_waited / seconds, "drive_share": report.drive_share}
        model.streaming.close()
        figures["limit"] = drive_seconds(options.dir / "checkpoint", report.bytes_missed) / options.tokens
    return figures


def drop_files(options: argparse.Namespace) -> None:
    """Drop the page cache of all contenders' files."""
    drop_pages([path for folder in options.dir.iterdir() for path in folder.rglob("*") if path.is_file()])


def decoded(model: Any, words: torch.Tensor) -> Iterator[torch.Tensor]:
    """Decode tokens with a cache, and yield the logits after each."""
    import transformers

    cache = transformers.DynamicCache()
    for word in words:
        with torch.inference_mode():
            logits = model(word.view(1, 1), past_key_values=cache, use_cache=True).logits
        yield logits


def digest(logits: torch.Tensor) -> int:
    """Return a checksum of all bits."""
    return zlib.crc32(bytes(logits.contiguous().view(torch.uint8).flatten().tolist()))


def note_choices(model: Any, trace: list[tuple[int, int]]) -> None:
    """Have the model add the experts that it chooses to ``trace``."""
    for number, layer in enumerate(model.model.layers):

        def note(module: Any, args: Any, number: int = number) -> None:
            """Record the experts that a call chooses."""
            trace.extend((number, expert) for expert in args[1].unique().tolist())

        layer.mlp.experts.register_forward_pre_hook(note)


def expert_bytes(model: Any) -> int:
    """Return the bytes of all experts of a model."""
    shape = model.config
    each = 3 * shape.hidden_size * shape.intermediate_size * shape.dtype.itemsize
    return int(shape.num_hidden_layers * shape.num_experts * each)


def drive_seconds(folder: Path, nbytes: int) -> float:
    """Return how long the drive takes for so many bytes, read in random pieces as large as a weight of an expert."""
    file = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    size = 8 << 20
    with engine_for([folder]) as engine, engine.open(file) as opened:
        buffers = [engine.empty_pinned(size, torch.uint8) for _ in range(READ_AT_ONCE)]
        places = random.Random(0).choices(range(file.stat().st_size // size), k=-(-nbytes // size))
        begun = time.perf_counter()
        running: list[Any] = []
        for count, place in enumerate(places):
            if len(running) == READ_AT_ONCE:
                running.pop(0).result()
            running.append(engine.read(buffers[count % READ_AT_ONCE], opened, place * size))
        for future in running:
            future.result()
        return (time.perf_counter() - begun) * nbytes / (len(places) * size)


def measured(options: argparse.Namespace, contender: str) -> dict[str, Any] | None:
    """Return the figures of a contender's turn; None if it does not run, after printing why."""
    if contender == "store":  # which is built with as much memory as there is
        streamed = {"path": options.dir / "store", "progress": False}
        deepnvme.streaming.from_pretrained(options.dir / "checkpoint", **streamed).streaming.close()
    slow = [] if contender in ("experts", "in memory") else ["--warm", "1", "--tokens", "3"]
    command = [sys.executable, __file__, *sys.argv[1:], "--dir", str(options.dir), "--worker", contender, *slow]
    with contextlib.ExitStack() as stack:
        limited = [] if contender == "in memory" else stack.enter_context(memory_limit(options.memory * 10**6))
        if contender == "accelerate":
            command += ["--limited-by", limited.pop()]
            limited.clear()
        ended = subprocess.run([*limited, *command], capture_output=True, text=True)
    if ended.returncode:
        last_words = "".join(ended.stderr.strip().splitlines()[-1:])
        print(f"{contender} does not run: it ended with {ended.returncode}: {last_words}", flush=True)
        return None
    figures: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return figures


def spread(values: list[float]) -> str:
    """Return the median of values, with the least and the greatest."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def show(options: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> None:
    """Print what the turns say about the targets."""
    ours = found["experts"]
    for contender, turns in found.items():
        if contender not in ("experts", "in memory") and turns:
            ratios = [other["seconds"] / each["seconds"] for each, other in zip(ours, turns, strict=False)]
            print(f"tokens/s against {contender}: {spread(ratios)}")
    bytes_ = spread([each["read"] / each["missed"] for each in ours])
    print(f"bytes read against bytes of chosen experts that were not in memory: {bytes_}")
    points = spread([100 * (each["best_fixed"] - each["hit_rate"]) for each in ours])
    print(f"hit rate below that of the best fixed choice, points: {points}")
    beyond = spread([each["grown"] / 2**20 - options.budget * 10**6 / 2**20 for each in ours])
    print(f"memory beyond the budget, MiB: {beyond}")
    if found.get("in memory"):
        pairs = list(zip(ours, found["in memory"], strict=False))
        shares = spread([max(each["limit"], memory["seconds"]) / each["seconds"] for each, memory in pairs])
        print(f"share of max(compute in memory, missed bytes at the drive's limit): {shares}")
        for contender, turns in filter(lambda item: item[1], found.items()):
            for name, how in (("logits", "as transformers maps them"), ("aligned", "aligned by torch")):
                same = all(each["logits"] == memory[name] for each, memory in zip(turns, found["in memory"], strict=False))
                print(f"logits of {contender} identical to those of weights in memory {how}: {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="directory on the drive")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--dtype", default="float32", help="what the processor computes fastest")
    parser.add_argument("--budget", type=int, default=2200, help="MB for weights")
    parser.add_argument("--memory", type=int, default=3000, help="MB for a process")
    parser.add_argument("--warm", type=int, default=100, help="tokens before the measured ones")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--contender", choices=CONTENDERS, action="append", help="all of them by default")
    parser.add_argument("--keep", action="store_true", help="leave the files in --dir, and use those that a run has left there")
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--limited-by", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(run(options)))
        return
    with contextlib.nullcontext(options.dir) if options.keep else tempfile.TemporaryDirectory(dir=options.dir) as folder:
        options.dir = Path(folder)
        if not (options.dir / "checkpoint").exists():
            make(options)
        found: dict[str, list[dict[str, Any]]] = {}
        for number in range(options.rounds):
            for contender in dict.fromkeys([*(options.contender or CONTENDERS), "experts"]):
                if number and not found.get(contender):
                    continue
                figures = measured(options, contender)
                found.setdefault(contender, []).extend([figures] if figures else [])
                shown = {
                    name: float(f"{value:.4g}") for name, value in (figures or {}).items() if name not in ("logits", "aligned")
                }
                print(f"round {number + 1}, {contender}: {shown}", flush=True)
        show(options, found)


if __name__ == "__main__":
    main()
