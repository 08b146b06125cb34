"""Generate text with a mixture of experts, of which only the chosen ones are read from the drive: tokens/s, hits and a plot.

    python examples/generate_mixture.py [CHECKPOINT] [--prompt TEXT] [--size GB] [--budget BYTES] [--tokens N] [--plot FILE]
                                        [--dir DIR]

CHECKPOINT is the folder or the hub's name of a mixture for transformers. Without it, a mixture with the shape of OLMoE is made,
with random weights in bf16, so the text is random too. If the model fits into memory, it also generates there, and the tokens
are compared. Each way runs in a process of its own, whose peak memory is what the system says. A mixture that is made goes to a
temporary directory under DIR (default: the current directory).
"""

from __future__ import annotations

import argparse
import importlib.util
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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

import deepnvme.streaming
from deepnvme.memory.system_memory import available_memory

if TYPE_CHECKING:
    import transformers

GB = 10**9
PART_IN_MEMORY = 0.4  # of a mixture that is made
WINDOW = 8  # tokens of a running mean in the plot


def make(checkpoint: Path, nbytes: int) -> None:
    """Write a checkpoint of about ``nbytes`` of random weights in the shape of OLMoE, in shards."""
    import transformers

    width = 1024 if nbytes >= GB // 2 else 128
    config = transformers.OlmoeConfig(
        hidden_size=width,
        intermediate_size=width // 2,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        num_experts=64,
        num_experts_per_tok=8,
        vocab_size=8 * width,
        eos_token_id=None,
        dtype="bfloat16",
    )
    layer = 2 * (4 * width * width + 64 * 3 * width * config.intermediate_size)
    config.num_hidden_layers = max(2, round((nbytes - 4 * width * config.vocab_size) / layer))
    torch.manual_seed(0)
    model = transformers.OlmoeForCausalLM._from_config(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight)  # so that routers tell words apart, as those of trained models do
    model.save_pretrained(checkpoint, max_shard_size="1GB")


class Clock:
    """A streamer, as ``generate`` calls it: with the prompt first, and then with each token. It also notes what layers read."""

    def __init__(self, streaming: deepnvme.streaming.Streaming | None, progress: Progress, total: int, name: str) -> None:
        self.times: list[float] = []
        self.hits: list[list[float]] = []  # for each token, of each layer: the share of the experts used that was in memory
        self._experts = None if streaming is None else streaming.experts
        self._before: list[tuple[int, int]] = []
        self._progress, self._task = progress, progress.add_task(name, total=total, said="the prompt")

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        said = ""
        if self._experts is not None:
            report = self._experts.report()
            uses = [(layer.hits, layer.chosen) for layer in report.layers.values()]
            if self._before:
                pairs = zip(uses, self._before, strict=True)
                self.hits.append([(hits - old) / max(chosen - of_old, 1) for (hits, chosen), (old, of_old) in pairs])
                said = f", {statistics.mean(map(statistics.mean, self.hits[-WINDOW:])):.0%} of experts in memory"
            self._before = uses
        count = len(self.times) - 1
        if count == 0:
            return
        if count > 1:
            said = f"{(count - 1) / (self.times[-1] - self.times[1]):.2f} tokens/s{said}"
        self._progress.update(self._task, completed=count, said=said.removeprefix(", "))

    def end(self) -> None:
        pass


def generate(model: transformers.PreTrainedModel, name: str, given: argparse.Namespace) -> dict[str, object]:
    """Generate text, and return the tokens, the tokens/s of each, and what the layers had in memory."""
    streaming: deepnvme.streaming.Streaming | None = getattr(model, "streaming", None)
    columns = [TextColumn("{task.description}"), BarColumn(bar_width=12), MofNCompleteColumn(), TextColumn("{task.fields[said]}")]
    prompt, tokenizer = torch.tensor([[1, 17, 4, 99, 23, 5, 42, 8]]), None
    if given.checkpoint:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(given.checkpoint)
        prompt = tokenizer(given.prompt, return_tensors="pt")["input_ids"]
        if not prompt.numel():  # transformers makes an empty tokenizer if there are no files of one
            sys.exit(f"the tokenizer of '{given.checkpoint}' makes no tokens of {given.prompt!r}: does tokenizer.json lie there?")
    with Progress(*columns, console=Console(stderr=True)) as progress:
        clock = Clock(streaming, progress, given.tokens, name)
        torch.manual_seed(0)
        said = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=given.tokens,
            do_sample=True,
            top_k=20,
            pad_token_id=0,
            streamer=clock,
        )
    tokens = said[0, prompt.shape[1] :].tolist()
    return {
        "tokens": tokens,
        "text": None if tokenizer is None else tokenizer.decode(said[0]),
        "first": clock.times[1] - clock.times[0],
        "rates": [1 / (end - begin) for begin, end in itertools.pairwise(clock.times[1:])],
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "nbytes": sum(weight.numel() * weight.element_size() for weight in model.parameters()),
        "hits": clock.hits,
    }


def on_demand(checkpoint: str, given: argparse.Namespace) -> dict[str, object]:
    model = deepnvme.streaming.from_pretrained(checkpoint, experts="on-demand", memory_budget=given.budget)
    with model.streaming as streaming:
        result = generate(model, "experts on demand", given)
        return result | {"reports": [str(streaming.experts.report()), str(streaming.report())]}


def in_memory(checkpoint: str, given: argparse.Namespace) -> dict[str, object]:
    import transformers

    return generate(transformers.AutoModelForCausalLM.from_pretrained(checkpoint), "in memory", given)


def plot(path: Path, hits: list[list[float]]) -> None:
    """Draw the share of experts that were in memory: token by token, of each layer and token, and of each layer."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    percent = 100 * torch.tensor(hits)  # tokens x layers
    each = percent.mean(dim=1).tolist()
    running = [statistics.mean(each[max(token - WINDOW + 1, 0) : token + 1]) for token in range(len(each))]
    shapes = {"width_ratios": [4, 1], "height_ratios": [2, 3]}
    figure, ((above, corner), (below, right)) = plt.subplots(2, 2, figsize=(9, 6), layout="constrained", gridspec_kw=shapes)
    corner.axis("off")
    above.plot(each, ".", color="0.7", label="one token")
    above.plot(running, color="C0", label=f"mean of {WINDOW} tokens")
    above.set_ylabel("experts in memory, %")
    above.set_ylim(0, 100)
    corner.legend(*above.get_legend_handles_labels(), loc="upper left")
    above.sharex(below)
    image = below.imshow(percent.T.tolist(), aspect="auto", origin="lower", interpolation="nearest", vmin=0, vmax=100)
    below.set_xlabel("token (the first one: the prompt)")
    below.set_ylabel("layer with experts")
    figure.colorbar(image, ax=right, label="experts in memory, %")
    right.barh(range(percent.shape[1]), percent.mean(dim=0).tolist(), color="C0")
    right.set_xlim(0, 100)
    right.set_xlabel("mean, %")
    right.sharey(below)
    figure.savefig(path, dpi=120)


def spread(rates: list[float]) -> str:
    """Return the median, and the least and the largest rate."""
    return f"{statistics.median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f})" if rates else "-"


def in_its_own_process(part: str, checkpoint: str, options: list[str]) -> dict[str, Any]:
    """Run this program for one of its parts, and return the result that it prints."""
    command = [sys.executable, __file__, *options, "--part", part, checkpoint]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(checkpoint: str, given: argparse.Namespace, console: Console) -> None:
    """Generate with experts on demand and, if the model fits, in memory. Print and plot what was found."""
    found = in_its_own_process("on-demand", checkpoint, sys.argv[1:])
    nbytes = int(found["nbytes"])
    results = {"experts on demand": found}
    if fits := nbytes * 1.2 < available_memory():
        results["in memory"] = in_its_own_process("in-memory", checkpoint, sys.argv[1:])
    table = Table(title=f"{len(found['tokens'])} tokens generated by a mixture of {nbytes / GB:.2g} GB")
    for column in ("weights", "first token,\nseconds", "tokens/s, median\n(of all tokens)", "peak memory of\nthe process, MB"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for name, result in results.items():
        table.add_row(name, f"{result['first']:.1f}", spread(result["rates"]), f"{float(result['peak']) / 1e6:.0f}")
    console.print(table)
    text = found["text"] or f"tokens: {' '.join(map(str, found['tokens']))}"
    for line in (f"experts: {found['reports'][0]}", f"other weights: {found['reports'][1]}", text):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    if importlib.util.find_spec("matplotlib"):
        plot(given.plot, found["hits"])
        console.print(f"{given.plot}: experts in memory, token by token and layer by layer")
    if not fits:
        console.print("The model does not fit into memory, so the tokens are not compared.")
    elif results["in memory"]["tokens"] != found["tokens"]:
        sys.exit(f"the tokens differ: in memory, they are {results['in memory']['tokens']}")
    else:
        console.print(f"{len(found['tokens'])} tokens, every one the same in memory.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", help="folder or name of a mixture (default: one is made)")
    parser.add_argument("--prompt", default="Once upon a time", metavar="TEXT", help="begin of the text, for a CHECKPOINT")
    parser.add_argument("--size", type=float, default=2.0, metavar="GB", help="size of the mixture that is made (default: 2)")
    parser.add_argument("--budget", metavar="BYTES", help='memory for weights, such as 4GB or 50%% (default: "auto", which is'
                        " half of the available memory; of a mixture that is made, 40%% of its size)")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate (default: 64)")
    parser.add_argument("--plot", type=Path, default=Path("mixture.png"), metavar="FILE", help="(default: mixture.png)")
    parser.add_argument("--dir", default=".", help="a directory on the drive to use (default: the current one)")
    parser.add_argument("--part", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.checkpoint:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # there is nothing to download
    try:
        import transformers
    except ImportError as error:
        sys.exit(f"{error}: pip install 'deepnvme[transformers]'")
    transformers.logging.disable_progress_bar()
    if given.budget is None:
        given.budget = "auto" if given.checkpoint else str(int(given.size * PART_IN_MEMORY * GB))
    if given.part:
        name, checkpoint = given.part
        parts = {
            "make": lambda: make(Path(checkpoint), int(given.size * GB)),
            "in-memory": lambda: in_memory(checkpoint, given),
            "on-demand": lambda: on_demand(checkpoint, given),
        }
        print(json.dumps(parts[name]()))
        return

    console = Console()
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"other processes use this machine (load {load:.1f}): the times will vary", file=sys.stderr)
    if not importlib.util.find_spec("matplotlib"):
        print("there will be no plot, which needs matplotlib: pip install matplotlib", file=sys.stderr)
    if given.checkpoint:
        compare(given.checkpoint, given, console)
        return
    with tempfile.TemporaryDirectory(prefix="deepnvme-", dir=given.dir) as folder:
        with console.status(f"making a mixture of {given.size:g} GB"):
            in_its_own_process("make", folder, sys.argv[1:])
        compare(folder, given, console)


if __name__ == "__main__":
    main()
