"""A mixture of experts that are read when they are chosen, against the same model streamed from a built store.

    python benchmarks/experts.py --dir /mnt/nvme

The contenders have the same memory budget, decode the same tokens (words as frequent as Zipf says), and take turns, each in a
process of its own, with nothing of its files in the page cache. Prints for each the tokens a second and the bytes read a token;
and for experts on demand the bytes of chosen experts that were not in memory, the share of chosen experts that were, and that of
the best fixed choice of experts for these tokens. Needs transformers and safetensors. The model has 1.7 GB, the store as much.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from expert_residents import best_fixed, zipf

import deepnvme.streaming
from deepnvme.tools.tune.folder import drop_pages

CONTENDERS = ("store", "experts")
WORDS = 500


def config(options: argparse.Namespace) -> Any:
    """Return the configuration of a mixture with the shape of OLMoE, narrower and shallower."""
    import transformers

    sizes = {"hidden_size": 1024, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}
    return transformers.OlmoeConfig(
        num_hidden_layers=options.layers, num_experts=64, num_experts_per_tok=8, vocab_size=8192, **sizes
    )


def expert_bytes(options: argparse.Namespace) -> int:
    """Return the bytes of all experts."""
    mixture = config(options)
    each = 3 * mixture.hidden_size * mixture.intermediate_size * getattr(torch, options.dtype).itemsize
    return int(options.layers * mixture.num_experts * each)


def make(options: argparse.Namespace) -> None:
    """Write the checkpoint, and build the store."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(options), dtype=getattr(torch, options.dtype))
    torch.nn.init.normal_(model.model.embed_tokens.weight)  # so that words differ, and routers choose by them
    model.save_pretrained(options.dir / "checkpoint")
    deepnvme.streaming.from_pretrained(options.dir / "checkpoint", path=options.dir / "store", progress=False).streaming.close()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Decode the tokens with one contender, and return its figures."""
    import transformers

    transformers.logging.disable_progress_bar()
    folder, budget = options.dir / "checkpoint", options.budget * expert_bytes(options) // 100
    drop_pages([path for path in options.dir.rglob("*") if path.is_file()])
    experts = None
    if options.worker == "store":
        model: Any = deepnvme.streaming.from_pretrained(folder, path=options.dir / "store", memory_budget=budget)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        model.requires_grad_(False)  # torch chooses kernels by that, and streamed weights need no gradients
        experts = deepnvme.streaming.offload_experts(model, folder, memory_budget=budget)
        drop_pages([path for path in options.dir.rglob("*") if path.is_file()])
    trace: list[tuple[int, int]] = []
    for number, layer in enumerate(model.model.layers):

        def note(module: Any, args: Any, number: int = number) -> None:
            """Record the experts that a call chooses."""
            trace.extend((number, expert) for expert in args[1].unique().tolist())

        layer.mlp.experts.register_forward_pre_hook(note)
    torch.manual_seed(1)
    words = torch.multinomial(torch.tensor(zipf(WORDS)), options.warm + options.tokens, replacement=True) + 7
    figures: dict[str, Any] = {"logits": []}
    with torch.inference_mode():
        cache = transformers.DynamicCache()
        for count, word in enumerate(words):
            if count == options.warm:
                (experts or model.streaming).reset()
                trace.clear()
                begun = time.perf_counter()
            output = model(word.view(1, 1), past_key_values=cache)
            figures["logits"].append(output.logits.double().sum().item())
    seconds = time.perf_counter() - begun
    report = experts.report() if experts is not None else model.streaming.report()
    figures |= {"tokens_per_second": options.tokens / seconds, "bytes_per_token": report.bytes_read / options.tokens}
    if isinstance(report, deepnvme.streaming.ExpertsReport):
        capacity = budget * options.layers * 64 // expert_bytes(options)
        figures |= {"missed_per_token": report.bytes_missed / options.tokens, "hit_rate": report.hit_rate}
        figures |= {"best_fixed": best_fixed(trace, capacity) / len(trace), "waited": report.seconds_waited / seconds}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="directory on the drive")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", default="float32", help="what the processor computes fastest")
    parser.add_argument("--budget", type=int, default=30, help="memory, in percent of the experts")
    parser.add_argument("--warm", type=int, default=100, help="tokens before the measured ones")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(run(options)))
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        options.dir = Path(folder)
        make(options)
        found: dict[str, list[dict[str, Any]]] = {contender: [] for contender in CONTENDERS}
        arguments = [sys.executable, __file__, *sys.argv[1:], "--dir", folder]
        for number in range(options.rounds):
            for contender in CONTENDERS:
                warm = ["--warm", "1", "--tokens", "6"] if contender == "store" else []
                output = subprocess.run(
                    [*arguments, "--worker", contender, *warm], stdout=subprocess.PIPE, check=True, text=True
                ).stdout
                figures = json.loads(output.splitlines()[-1])
                found[contender].append(figures)
                shown = {name: f"{value:.4g}" for name, value in figures.items() if name != "logits"}
                print(f"round {number + 1}, {contender}: {shown}", flush=True)
    ratios = [
        ours["tokens_per_second"] / other["tokens_per_second"]
        for ours, other in zip(found["experts"], found["store"], strict=True)
    ]
    read = [each["bytes_per_token"] / each["missed_per_token"] for each in found["experts"]]
    same = len({tuple(each["logits"][:7]) for each in [*found["experts"], *found["store"]]}) == 1
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"tokens/s of experts on demand against the store: {spread}")
    print(f"bytes read against bytes of chosen experts that were not in memory: {statistics.median(read):.4f}")
    print(f"logits identical: {same}")


if __name__ == "__main__":
    main()
