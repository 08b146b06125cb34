"""A model with a large table of n-grams, whose rows are read where they lie, against the same file mapped, and against fio.

    python benchmarks/tables_in_models.py --dir /mnt/nvme

The model is a small Qwen4-Exp of transformers: each token looks up 16 rows of 320 bytes. Every contender prefills the same 4096
tokens and then decodes the same 200, each time in a process of its own, which begins with nothing of the files in the page
cache. All have the other weights in memory. Prints how many rows a second the lookups of the prefill take, against fio's random
reads of 512 bytes and against the mapped file; and the time that a decoded token spends in lookups, beyond that of rows that are
in memory (of the mapped file, looked up a second time). Needs transformers 5.23, safetensors and numpy, and fio for the
comparison with it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness import fio
from safetensors.torch import save_file

import deepnvme.streaming
from deepnvme.tools.tune.folder import drop_pages, settle

CONTENDERS = ("rows", "mapped")
PREFILL, DECODED = 4096, 200
TABLE = "model.layers.0.ple.ple_embedding.ngram_embedding"
WIDTH, HEADS, SHARDS = 160, 16, 16
ROW_BYTES = 2 * WIDTH
FIO = ((64, 1), (128, 1), (256, 1), (64, 2), (128, 2))
"""Depth and number of jobs."""


def config(options: argparse.Namespace) -> Any:
    """Return the configuration of a model with a table of about as many bytes as wanted."""
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2, "num_experts": 4}
    sizes |= {"hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
    sizes |= {"indexer_budget": 64, "indexer_compress_ratio": 4, "ple_embed_dim": WIDTH * HEADS, "split_ngram_parts": SHARDS}
    return transformers.Qwen4ExpTextConfig(
        vocab_size=32000, layer_types=["linear_attention", "indexed_attention"], ple_layer_ids=[1], eos_token_id=2,
        dtype="bfloat16", ngram_vocab_size_base=int(options.gib * 2**30) // ROW_BYTES // HEADS, **sizes,
    )  # fmt: skip


def make(options: argparse.Namespace) -> None:
    """Write the checkpoint: the table in one file, in parts, and the other weights in another one."""
    import transformers
    from accelerate import init_empty_weights

    torch.manual_seed(0)
    with init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config(options))
    state = model.state_dict()
    rows = len(state.pop(f"{TABLE}.weight"))
    others = {
        name: torch.randn(weight.shape).to(weight.dtype) * 0.02 if weight.is_meta else weight for name, weight in state.items()
    }
    save_file(others, options.dir / "others.safetensors")
    parts = [f"{TABLE}.shard_{number}.weight" for number in range(SHARDS)]
    write_table(options.dir / "table.safetensors", parts, rows)
    where = dict.fromkeys(others, "others.safetensors") | dict.fromkeys(parts, "table.safetensors")
    (options.dir / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(options.dir)


def write_table(path: Path, parts: list[str], rows: int) -> None:
    """Write a safetensors file of random bfloat16 values whose parts have equally many rows each."""
    import numpy

    each = rows // len(parts) * ROW_BYTES
    header: dict[str, Any] = {
        part: {"dtype": "BF16", "shape": [rows // len(parts), WIDTH], "data_offsets": [number * each, (number + 1) * each]}
        for number, part in enumerate(parts)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = numpy.random.default_rng(0)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = each * len(parts)
        while left:
            count = min(left, 64 << 20)
            bits = random.integers(0, 1 << 64, count // 8, dtype=numpy.uint64)
            file.write((bits & 0x83FF83FF83FF83FF | 0x3C003C003C003C00).tobytes())  # from -2 to 2
            left -= count


def mapped(options: argparse.Namespace) -> torch.Tensor:
    """Return the whole table as a mapping of its file."""
    path = options.dir / "table.safetensors"
    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
    storage = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
    rows = (path.stat().st_size - begin) // ROW_BYTES
    return torch.empty(0, dtype=torch.bfloat16).set_(storage, begin // 2, (rows, WIDTH), (WIDTH, 1))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Prefill and decode with one contender, and return its figures."""
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(max(torch.get_num_threads() - 1, 1))  # one processor is left for the engine, as for page faults
    model: Any = deepnvme.streaming.from_pretrained(options.dir, memory_budget="4GB", experts="streamed", progress=False)
    table = model.get_submodule(TABLE)
    if options.worker == "mapped":
        table._parameters["weight"] = torch.nn.Parameter(mapped(options), requires_grad=False)
    seconds: list[float] = []

    def timed(ids: torch.Tensor, look_up: Callable[..., torch.Tensor] = table.forward) -> torch.Tensor:
        """Look up rows, and note how long that takes."""
        begun = time.perf_counter()
        rows = look_up(ids)
        seconds.append(time.perf_counter() - begun)
        return rows

    table.forward = timed
    torch.manual_seed(1)
    ids = torch.randint(3, 32000, (1, PREFILL + DECODED))
    figures: dict[str, Any] = {}
    with torch.inference_mode():
        for _ in range(3):
            model(torch.randint(3, 32000, (1, 3)))
        drop(options)
        for turn in ("cold", "again") if options.worker == "mapped" else ("cold",):
            seconds.clear()
            begun = time.perf_counter()
            cache = transformers.DynamicCache(config=model.config)
            logits = [model(ids[:, :PREFILL], past_key_values=cache, logits_to_keep=1).logits]
            figures[f"{turn}_prefill"], figures[f"{turn}_rows"] = time.perf_counter() - begun, PREFILL * HEADS / seconds[0]
            seconds.clear()
            for number in range(PREFILL, PREFILL + DECODED):
                logits.append(model(ids[:, number : number + 1], past_key_values=cache).logits)
            figures[f"{turn}_token"] = statistics.median(seconds)
    figures["logits"] = torch.cat(logits, dim=1).double().sum(dim=-1).flatten().tolist()
    return figures


def drop(options: argparse.Namespace) -> None:
    """Drop the checkpoint from the page cache, and wait until the drive is idle."""
    drop_pages([path for path in options.dir.iterdir() if path.is_file()])
    settle(options.dir)


def best_of_fio(options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Yield fio's random reads a second of the table's file, by depth and number of jobs."""
    program = shutil.which("fio")
    if program is None:
        return
    engine = fio.ioengine(program, options.dir)
    drop(options)  # or fio would, within its time
    for depth, jobs in FIO:
        reads = fio.RandomReads(program, engine, options.dir / "table.safetensors", depth, jobs, 512)
        found = reads.measure(1.0)
        yield reads.name, found["reads"] / found["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="directory on the drive")
    parser.add_argument("--gib", type=float, default=16, help="size of the table")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(run(options)))
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        options.dir = Path(folder)
        make(options)
        ratios: dict[str, list[float]] = {}
        for number in range(options.rounds):
            found = {}
            for contender in CONTENDERS:
                command = [sys.executable, __file__, *sys.argv[1:], "--dir", folder, "--worker", contender]
                output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
                figures = found[contender] = json.loads(output.splitlines()[-1])
                shown = {name: f"{value:.4g}" for name, value in figures.items() if name != "logits"}
                print(f"round {number + 1}, {contender}: {shown}", flush=True)
            rates = dict(best_of_fio(options))
            print(f"round {number + 1}, fio: { ({name: round(rate) for name, rate in rates.items()}) }", flush=True)
            ours, other = found["rows"], found["mapped"]
            this_round = {
                "rows a second of the prefill against the cold mapping": ours["cold_rows"] / other["cold_rows"],
                "ms a decoded token beyond rows in memory": 1e3 * (ours["cold_token"] - other["again_token"]),
                "the same of the cold mapping": 1e3 * (other["cold_token"] - other["again_token"]),
                "logits that differ": float(ours["logits"] != other["logits"]),
            }
            if rates:
                this_round["rows a second of the prefill against fio's best"] = ours["cold_rows"] / max(rates.values())
            for name, value in this_round.items():
                ratios.setdefault(name, []).append(value)
    for name, values in ratios.items():
        print(f"{name}: {statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})")


if __name__ == "__main__":
    main()
