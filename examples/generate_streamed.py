"""Generate text with a Llama whose weights stay on the drive: the tokens that it generates in memory, in less memory.

    python examples/generate_streamed.py [--size GB] [--budget GB] [--tokens N] [--dir DIR]

The model is made here, with random weights in bf16, so the text is random too. Each way runs in a process of its own, whose peak
memory is what the system says. Files go to a temporary directory under DIR (default: the current directory).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

import deepnvme.streaming

if TYPE_CHECKING:
    import transformers

GB = 10**9
PROMPTS = torch.tensor([[1, 17, 4, 99, 23, 5, 42, 8]])


def configuration(nbytes: int) -> transformers.LlamaConfig:
    """Return the configuration of a Llama that takes about ``nbytes`` in bf16."""
    import transformers

    width = 2048 if nbytes >= GB // 2 else 256
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        vocab_size=32000 if width > 256 else 512,
        dtype="bfloat16",
    )
    layer = 2 * (width * width * 5 // 2 + 3 * width * config.intermediate_size)
    embeddings = 4 * width * config.vocab_size
    config.num_hidden_layers = max(2, round((nbytes - embeddings) / layer))
    return config


def make(checkpoint: Path, nbytes: int) -> None:
    """Write a checkpoint of random weights, in shards."""
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(configuration(nbytes))
    model.save_pretrained(checkpoint, max_shard_size="1GB")


class Clock:
    """A streamer, as ``generate`` calls it: with the prompt first, and then with each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(model: transformers.PreTrainedModel, count: int) -> dict[str, object]:
    clock = Clock()
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    said = model.generate(PROMPTS, streamer=clock, **options)
    rates = [1 / (end - begin) for begin, end in itertools.pairwise(clock.times)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"tokens": said[0, PROMPTS.shape[1] :].tolist(), "rates": rates, "peak": peak}


def in_memory(checkpoint: Path, count: int) -> dict[str, object]:
    import transformers

    return generate(transformers.AutoModelForCausalLM.from_pretrained(checkpoint), count)


def streamed(checkpoint: Path, store: Path, budget: int, count: int) -> dict[str, object]:
    model = deepnvme.streaming.from_pretrained(checkpoint, path=store, memory_budget=budget, progress=True)
    with model.streaming as streaming:
        result = generate(model, count)
        return result | {"report": str(streaming.report())}


def spread(rates: list[float]) -> str:
    """Return the median, and the least and the largest rate."""
    return f"{statistics.median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f})"


def in_its_own_process(*arguments: object) -> dict[str, Any]:
    """Run this program with other arguments, and return the result that it prints."""
    done = subprocess.run([sys.executable, __file__, *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=2.0, metavar="GB", help="size of the weights (default: 2)")
    parser.add_argument("--budget", type=float, metavar="GB", help="weights that stay in memory (default: a quarter)")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to generate (default: 16)")
    parser.add_argument("--dir", default=".", help="a directory on the drive to use (default: the current one)")
    parser.add_argument("--part", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    budget = int((options.size / 4 if options.budget is None else options.budget) * GB)
    try:
        import transformers
    except ImportError as error:
        sys.exit(f"{error}: pip install 'deepnvme[transformers]'")
    transformers.logging.disable_progress_bar()
    if options.part:
        name, folder = options.part[0], Path(options.part[1])
        parts = {
            "make": lambda: make(folder / "checkpoint", int(options.size * GB)),
            "in-memory": lambda: in_memory(folder / "checkpoint", options.tokens),
            "streamed": lambda: streamed(folder / "checkpoint", folder / "store", budget, options.tokens),
        }
        print(json.dumps(parts[name]()))
        return

    if (load := os.getloadavg()[0]) > 0.5:
        print(f"other processes use this machine (load {load:.1f}): the times will vary", file=sys.stderr)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="deepnvme-", dir=options.dir) as folder:
        rest = (folder, "--size", options.size, "--budget", budget / GB, "--tokens", options.tokens)
        with console.status(f"making a Llama of {options.size:g} GB"):
            in_its_own_process("--part", "make", *rest)
        with console.status("generating with all weights in memory"):
            known = in_its_own_process("--part", "in-memory", *rest)
        found = in_its_own_process("--part", "streamed", *rest)
    table = Table(title=f"{options.tokens} tokens generated by a Llama of {options.size:g} GB in bf16")
    for column in ("weights", "tokens/s, median\n(of all tokens)", "peak memory of\nthe process, MB"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for name, result in (("in memory", known), (f"streamed, {budget / GB:.2g} GB of them kept", found)):
        table.add_row(name, spread(result["rates"]), f"{float(result['peak']) / 1e6:.0f}")
    console.print(table)
    console.print(str(found["report"]))
    if known["tokens"] != found["tokens"]:
        sys.exit(f"the tokens differ: {known['tokens']} in memory, {found['tokens']} streamed")
    console.print(f"{options.tokens} tokens, every one the same: {' '.join(map(str, found['tokens']))}")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # there is nothing to download
    main()
