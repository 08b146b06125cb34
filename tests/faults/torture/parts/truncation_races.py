"""Another process truncates and rewrites files while they are loaded, verified and built from: documented errors, no SIGBUS."""

from __future__ import annotations

import pickle
import random as random_module
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import deepnvme
from deepnvme.checkpoint import verify
from deepnvme.safetensors import load_file
from deepnvme.streaming.weights.weight_store import WeightStore

from .. import Wrong

SHORT = 1
SECONDS = 90
_SECONDS_A_TRY = 4

_WRITER = """
import random, sys, torch
from safetensors.torch import save_file
path, plain, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
random = random.Random(seed)
while True:
    count = random.choice([1, 3, 200])
    weights = {f"w{index}": torch.ones(random.choice([1, 5000, 300_000])) for index in range(count)}
    weights["w0"] = torch.ones(30, 1000).t()
    torch.save(weights, path)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, plain)
    with open(random.choice([path, plain]), "r+b") as file:
        file.truncate(random.randrange(1, 400_000))
"""


def requires() -> str | None:
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        return "the package safetensors, whose writer truncates in place"
    return None


def attack(random: random_module.Random, directory: Path) -> None:
    path, plain, store = directory / "file.pt", directory / "file.safetensors", directory / "store"
    readers: list[Callable[[], object]] = [
        lambda: deepnvme.load(path),
        lambda: deepnvme.load(path, keys=["w0"]),
        lambda: deepnvme.load(path, lambda storage, location: storage),
        lambda: verify(path),
        lambda: load_file(plain),
        lambda: verify(plain),
        lambda: WeightStore.build(path, store).close(),
    ]
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path), str(plain), str(random.randrange(1 << 30))])
    try:
        while not (path.exists() and plain.exists()):
            if writer.poll() is not None:
                raise Wrong("the writer has ended")
            time.sleep(0.05)
        end = time.monotonic() + _SECONDS_A_TRY
        while time.monotonic() < end:
            try:
                random.choice(readers)()
            except (OSError, KeyError, pickle.UnpicklingError):
                continue
            finally:
                shutil.rmtree(store, ignore_errors=True)
    finally:
        writer.kill()
        writer.wait()
