"""Save and load a transformer with its optimizer's states: torch beside deepnvme, each reading what the other wrote.

    python examples/checkpoint.py [--dir DIR] [--layers N] [--rounds N]

Files go to a temporary directory under DIR (default: the current directory) and are removed at the end.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import deepnvme


def make_state(layers: int) -> dict[str, Any]:
    """Return the state of a transformer in bfloat16 and of its AdamW, which keeps two tensors for each weight."""
    layer = torch.nn.TransformerEncoderLayer(d_model=768, nhead=12, dim_feedforward=3072, dtype=torch.bfloat16)
    weights = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).state_dict()
    moments = {
        index: {"step": torch.tensor(100.0), "exp_avg": torch.randn_like(weight), "exp_avg_sq": torch.rand_like(weight)}
        for index, weight in enumerate(weights.values())
    }
    return {"model": weights, "optimizer": {"state": moments, "param_groups": [{"lr": 1e-3}]}, "step": 100}


def torch_save(state: dict[str, Any], path: Path) -> None:
    """Save by torch, and flush to stable storage as deepnvme.save does."""
    torch.save(state, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def drop_cache(path: Path) -> None:
    """Remove a file from the page cache, so that the next load reads the drive."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def seconds(call: Callable[..., Any], *arguments: Any) -> float:
    """Call a function, and return how long it took."""
    begin = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin


def tensors_of(state: Any) -> list[torch.Tensor]:
    """Return all tensors in nested dictionaries and lists."""
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return [tensor for value in values for tensor in tensors_of(value)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the drive to use")
    parser.add_argument("--layers", type=int, default=12, help="layers of the transformer (default: 12, which make 510 MB)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which medians and extremes are printed (default: 3)")
    arguments = parser.parse_args()
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"other processes use this machine (load {load:.1f}): the times will vary", file=sys.stderr)

    state = make_state(arguments.layers)
    tensors = tensors_of(state)
    gigabytes = sum(tensor.nbytes for tensor in tensors) / 1e9
    print(f"{len(tensors)} tensors, {gigabytes:.2f} GB, to {arguments.dir}")

    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        theirs, ours = Path(directory) / "torch.pt", Path(directory) / "deepnvme.pt"
        times: dict[str, list[float]] = {"torch.save": [], "deepnvme.save": [], "torch.load": [], "deepnvme.load": []}
        for _ in range(arguments.rounds):  # in turns, so that other load on the machine affects both
            for path in (theirs, ours):
                path.unlink(missing_ok=True)
            times["torch.save"].append(seconds(torch_save, state, theirs))
            times["deepnvme.save"].append(seconds(deepnvme.save, state, ours))
            drop_cache(theirs)
            times["torch.load"].append(seconds(torch.load, theirs))
            drop_cache(theirs)
            times["deepnvme.load"].append(seconds(deepnvme.load, theirs))

        medians = {name: statistics.median(each) for name, each in times.items()}
        for name, each in medians.items():
            spread = f"({min(times[name]):.3f} to {max(times[name]):.3f})"
            print(f"{name:14} {each:7.3f} s {spread} {gigabytes / each:6.2f} GB/s")
        for what in ("save", "load"):
            print(f"{what}: {medians[f'torch.{what}'] / medians[f'deepnvme.{what}']:.1f} times as fast")

        for path, load in ((ours, torch.load), (theirs, deepnvme.load)):
            if not all(map(torch.equal, tensors_of(load(path)), tensors)):
                raise SystemExit(f"{path.name} was loaded differently")
        print("each reads what the other wrote, every byte the same")


if __name__ == "__main__":
    main()
