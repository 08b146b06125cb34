"""Serve agents whose prompts come again, with their keys and values on the drive: the tokens that are computed anew, sooner.

    python examples/serve_from_drive.py [--agents N] [--requests N] [--memory BLOCKS] [--capacity SIZE] [--width N] [--layers N]
                                        [--plot FILE] [--dir DIR]

A small Llama with random weights answers agents. An agent starts with one of a few instructions, and each of its requests has its
whole conversation: what was answered, and something new. Keys and values are kept in blocks of 64 tokens, those used last in
memory, and with the second server all of them in a BlockStore. A block's key is a hash of all tokens up to its end. Files go to a
temporary directory under DIR (default: the current directory).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from deepnvme.kvstore import BlocksFuture, BlockStore

if TYPE_CHECKING:
    import transformers

BLOCK = 64  # tokens
ANSWER = 8  # tokens
VOCABULARY = 512


@dataclass
class Served:
    """What the requests took, in their order."""

    answers: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # until an answer's first token
    blocks: list[tuple[int, int, int]] = field(default_factory=list)  # of a prompt: in memory, on the drive, computed

    def shares(self) -> list[float]:
        """Return which part of the blocks, in percent, was in memory, on the drive and computed."""
        sums = [sum(each) for each in zip(*self.blocks, strict=True)]
        return [100 * each / max(sum(sums), 1) for each in sums]


class Server:
    """Answers prompts. ``store``: where keys and values go that do not fit into memory; None for nowhere."""

    def __init__(self, model: transformers.LlamaForCausalLM, blocks_in_memory: int, store: BlockStore | None) -> None:
        self.model, self.most, self.store = model, blocks_in_memory, store
        self.memory: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self.puts: list[BlocksFuture] = []
        self.served = Served()

    def answer(self, prompt: list[int]) -> list[int]:
        from transformers import DynamicCache

        begin = time.perf_counter()
        keys = keys_of(prompt)
        blocks = self.found(keys[: (len(prompt) - 1) // BLOCK])  # the last token is computed, for what follows it
        cache = DynamicCache()
        if blocks:
            whole = torch.cat(blocks, dim=-2)
            for number, (k, v) in enumerate(whole):
                cache.update(k[None], v[None], number)
        tokens = torch.tensor([prompt])
        for first in range(len(blocks) * BLOCK, len(prompt), BLOCK):
            logits = self.model(tokens[:, first : first + BLOCK], None, None, cache).logits
        answer = [int(logits[0, -1].argmax())]
        self.served.seconds.append(time.perf_counter() - begin)
        self.keep(keys[len(blocks) :], cache, len(blocks))
        while len(answer) < ANSWER:
            logits = self.model(torch.tensor([answer[-1:]]), None, None, cache).logits
            answer.append(int(logits[0, -1].argmax()))
        self.served.answers.append(answer)
        return answer

    def found(self, keys: list[bytes]) -> list[torch.Tensor]:
        """Return the blocks of a prompt that need not be computed: those before the first that is nowhere."""
        in_memory = length(key in self.memory for key in keys)
        blocks = [self.memory[key] for key in keys[:in_memory]]
        if self.store is not None:
            missing = keys[in_memory:]
            out = torch.empty(length(self.store.contains_many(missing)), *shape_of(self.model.config))
            hits = self.store.get_many(missing[: len(out)], out).result()
            blocks += out[: length(hits)]
        self.served.blocks.append((in_memory, len(blocks) - in_memory, len(keys) - len(blocks)))
        self.remember(keys, blocks)
        return blocks

    def keep(self, keys: list[bytes], cache: transformers.DynamicCache, first: int) -> None:
        """Keep the blocks of a prompt that were computed: those from the number ``first`` on."""
        blocks = []
        for number in range(first, first + len(keys)):
            part = slice(number * BLOCK, (number + 1) * BLOCK)
            layers: list[Any] = cache.layers
            blocks.append(torch.stack([torch.stack((each.keys[0, :, part], each.values[0, :, part])) for each in layers]))
        self.remember(keys, blocks)
        if self.store is not None and blocks:
            self.puts = [each for each in self.puts if not each.done()]
            self.puts.append(self.store.put_many(keys, blocks))  # while the answer goes on

    def remember(self, keys: Sequence[bytes], blocks: Sequence[torch.Tensor]) -> None:
        for key, block in reversed(list(zip(keys, blocks, strict=False))):
            self.memory[key] = block
            self.memory.move_to_end(key)
        while len(self.memory) > self.most:
            self.memory.popitem(last=False)


def keys_of(tokens: list[int]) -> list[bytes]:
    """Return a key for each whole block: a hash of the tokens up to its end."""
    digest, keys = hashlib.sha256(), []
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        digest.update(b"".join(token.to_bytes(4, "little") for token in tokens[end - BLOCK : end]))
        keys.append(digest.digest())
    return keys


def length(flags: Iterable[bool]) -> int:
    """Return how many flags come before the first that is False."""
    return sum(1 for _ in itertools.takewhile(bool, flags))


def shape_of(config: transformers.LlamaConfig) -> tuple[int, ...]:
    """Return the shape of a block: layers, keys and values, heads, tokens, width of a head."""
    heads = config.num_attention_heads
    return config.num_hidden_layers, 2, heads, BLOCK, config.hidden_size // heads


def requests(server: Server, agents: int, count: int, progress: Progress, what: str) -> None:
    """Have the agents ask, each time one of them. An agent leaves after three to ten requests, and another one comes."""
    numbers = random.Random(1)

    def tokens(least: int, most: int) -> list[int]:
        return [numbers.randrange(VOCABULARY) for _ in range(numbers.randint(least, most))]

    instructions = [tokens(4 * BLOCK, 8 * BLOCK) for _ in range(3)]
    prompts = [list(numbers.choice(instructions)) for _ in range(agents)]
    left = [numbers.randint(3, 10) for _ in range(agents)]
    task = progress.add_task(what, total=count, found="")
    for _ in range(count):
        agent = numbers.randrange(agents)
        prompts[agent] += tokens(BLOCK // 2, 2 * BLOCK)
        prompts[agent] += server.answer(prompts[agent])
        left[agent] -= 1
        if left[agent] == 0:
            prompts[agent], left[agent] = list(numbers.choice(instructions)), numbers.randint(3, 10)
        in_memory, on_drive, _ = server.served.shares()
        progress.update(task, advance=1, found=f"{in_memory:.0f} % of blocks in memory, {on_drive:.0f} % on the drive")


def plot(path: Path, results: dict[str, Served]) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), layout="constrained")
    for color, (name, served) in zip(("0.6", "C0"), results.items(), strict=True):
        found = list(itertools.accumulate(100 * (kept + read) / max(kept + read + new, 1) for kept, read, new in served.blocks))
        above.plot([each / (number + 1) for number, each in enumerate(found)], color=color, label=name)
        below.plot(list(itertools.accumulate(served.seconds)), color=color)
    above.set_ylabel("blocks found, %")
    above.set_ylim(0, 100)
    above.legend()
    below.set_ylabel("seconds until first tokens, in all")
    below.set_xlabel("request")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--agents", type=int, default=12, help="at a time (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=150, help="of all agents (default: %(default)s)")
    parser.add_argument("--memory", type=int, default=40, help="blocks of 64 tokens in memory (default: %(default)s)")
    parser.add_argument("--capacity", default="2GB", help="of the store (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture of hit rates and times; needs matplotlib")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the drive (default: the current one)")
    given = parser.parse_args()
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"other processes use this machine (load {load:.1f}): the times will vary", file=sys.stderr)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=given.width,
        intermediate_size=3 * given.width,
        num_attention_heads=given.width // 64,
        num_hidden_layers=given.layers,
        vocab_size=VOCABULARY,
        max_position_embeddings=1 << 16,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    block_bytes = 4 * math.prod(shape_of(config))
    console = Console()
    console.print(f"blocks of {block_bytes / 2**20:.3g} MiB, {given.memory} of them in memory, {given.capacity} on the drive")
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[found]}")]
    results: dict[str, Served] = {}
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        for name in ("memory only", "with the drive"):
            with tempfile.TemporaryDirectory(prefix="serve-", dir=given.dir) as directory, contextlib.ExitStack() as stack:
                store = None
                if name == "with the drive":
                    fingerprint = f"{config.to_json_string()}, float32, {BLOCK} tokens"
                    digest = hashlib.sha256(fingerprint.encode()).hexdigest()
                    store = stack.enter_context(BlockStore(directory, given.capacity, block_bytes, fingerprint=digest))
                server = Server(model, given.memory, store)
                requests(server, given.agents, given.requests, progress, name)
                results[name] = server.served
                figures = store.stats().as_dict() if store else {}
    table = Table("blocks", "in\nmemory, %", "on the\ndrive, %", "computed,\n%", "first token,\nms, median", "ms,\n90 %")
    for name, served in results.items():
        times = [
            f"{1e3 * each:.0f}" for each in (statistics.median(served.seconds), statistics.quantiles(served.seconds, n=10)[8])
        ]
        table.add_row(name, *(f"{each:.0f}" for each in served.shares()), *times)
    console.print(table)
    counted = ", ".join(f"{figures[name]} {name}" for name in ("hits", "misses", "evictions", "corrupt"))
    console.print(f"store: {counted}")
    same = len({str(each.answers) for each in results.values()}) == 1
    console.print(f"{given.requests} answers, every one the same" if same else "The answers differ.")
    if given.plot:
        plot(given.plot, results)
        console.print(f"{given.plot}: hit rates and times")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
