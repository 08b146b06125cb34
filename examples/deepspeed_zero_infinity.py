"""Train a small GPT with DeepSpeed, its optimizer's states on the drive: with DeepSpeed's own ops, and with this package's.

    python examples/deepspeed_zero_infinity.py [--dir DIR] [--width N] [--layers N] [--steps N]

The configuration is the same each time: all that changes is a call of deepnvme.integrations.deepspeed.enable() before the engine
is made. Each way trains in a process of its own, on the CPU, with text that it makes itself: sums. Files go to a temporary
directory under DIR (default: the current directory). DeepSpeed compiles its own op on first use, for a minute or two.
"""

import argparse
import importlib.util
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from train_offloaded import GPT, batch_of

WAYS = {
    "DeepSpeed alone": None,
    "our ops": {"swappers": False},
    "our ops and swappers": {"swappers": True},
}
"""Arguments of enable() for each way; None to leave DeepSpeed as it is."""
INSTALL = """this trains with DeepSpeed, which is not installed here:
    apt install libaio-dev
    pip install setuptools wheel packaging py-cpuinfo ninja
    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8"""


def configuration(nvme_path: str, elements: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,  # torch's AdamW: DeepSpeed's own would have to be compiled too
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": max(1 << 19, elements // 8),
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": nvme_path,
                "buffer_count": 16,
                "pipeline_read": True,
                "pipeline_write": True,
            },
        },
    }


def train(way: str, nvme_path: str, options: argparse.Namespace) -> dict[str, list[object]]:
    import deepspeed

    given = WAYS[way]
    if given is not None:
        import deepnvme.integrations.deepspeed

        deepnvme.integrations.deepspeed.enable(**given)
    torch.manual_seed(0)
    model = GPT(options.width, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    elements = sum(parameter.numel() for parameter in model.parameters())
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(nvme_path, elements))
    numbers = random.Random(0)
    losses, seconds = [], []
    for _ in range(options.steps):
        tokens, following = batch_of(numbers, rows=4)
        begun = time.perf_counter()
        loss = F.cross_entropy(engine(tokens).float().flatten(0, 1), following.flatten())
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - begun)
        losses.append(loss.item())
    torch.distributed.destroy_process_group()
    return {"losses": losses, "seconds": seconds}


def in_its_own_process(way: str, folder: str, options: argparse.Namespace) -> dict[str, list[float]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sizes = ["--width", options.width, "--layers", options.layers, "--steps", options.steps]
    done = subprocess.run(
        [sys.executable, __file__, "--part", way, folder, *map(str, sizes)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **rank, "DS_ACCELERATOR": "cpu"},
    )
    if done.returncode:
        sys.exit(f"{way}: ended with {done.returncode}\n{done.stdout}{done.stderr}")
    result: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a directory on the drive to use (default: the current one)")
    parser.add_argument("--width", type=int, default=512, help="width of the model, a multiple of 64 (default: 512)")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (default: 8, which make 25 M parameters)")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: 20)")
    parser.add_argument("--part", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("deepspeed") is None:
        sys.exit(INSTALL)
    if options.part:
        print("\n" + json.dumps(train(*options.part, options)))
        return

    if (load := os.getloadavg()[0]) > 0.5:
        print(f"other processes use this machine (load {load:.1f}): the times will vary", file=sys.stderr)
    console = Console()
    results = {}
    for way in WAYS:
        with console.status(way), tempfile.TemporaryDirectory(prefix="deepnvme-", dir=options.dir) as folder:
            results[way] = in_its_own_process(way, folder, options)
    table = Table(title=f"{options.steps} steps of a GPT in bf16, AdamW's states on the drive")
    for column in ("", "first loss", "last", "s/step (of all)", "speedup"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    alone = results["DeepSpeed alone"]
    # The first makes the states and their files.
    seconds = {way: statistics.median(result["seconds"][1:]) for way, result in results.items()}
    for way, result in results.items():
        losses = result["losses"]
        faster = seconds["DeepSpeed alone"] / seconds[way]
        of_all = result["seconds"][1:]
        a_step = f"{seconds[way]:.3f} ({min(of_all):.3f}-{max(of_all):.3f})"
        table.add_row(way, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", a_step, f"{faster:.2f}")
    console.print(table)
    for way, result in results.items():
        if result["losses"] != alone["losses"]:
            raise SystemExit(f"the losses differ: {alone['losses']} with DeepSpeed alone, {result['losses']} with {way}")
    console.print(f"{options.steps} losses, every one the same")


if __name__ == "__main__":
    main()
