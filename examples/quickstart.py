"""Save a model's state to the drive and restore it, through the op, at the speed of the drive.

    python examples/quickstart.py [--dir DIR] [--layers N] [--rounds N]

Files go to a temporary directory under DIR (default: the current directory) and are removed at the end.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import deepnvme

ALIGNMENT = 4096  # tensors that start on a page are transferred without a copy


def offsets_of(state: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return an offset for each tensor in one file."""
    offsets, end = {}, 0
    for name, tensor in state.items():
        offsets[name] = end
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets


def spread(values: list[float]) -> str:
    """Return the median, and the least and the largest value."""
    return f"{statistics.median(values):5.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the drive to use")
    parser.add_argument("--layers", type=int, default=12, help="layers of the transformer (default: 12, which make 340 MB)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which medians and extremes are printed (default: 3)")
    arguments = parser.parse_args()
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"other processes use this machine (load {load:.1f}): the times will vary", file=sys.stderr)

    layer = torch.nn.TransformerEncoderLayer(d_model=768, nhead=12, dim_feedforward=3072)
    model = torch.nn.TransformerEncoder(layer, arguments.layers, enable_nested_tensor=False)
    state = model.state_dict()
    gigabytes = sum(tensor.nbytes for tensor in state.values()) / 1e9
    offsets = offsets_of(state)

    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory, deepnvme.Engine() as engine:
        print(f"a transformer of {len(state)} tensors, {gigabytes:.2f} GB, through {engine.backend} to {arguments.dir}")

        # Pinned memory is what the drive reads into and writes from fastest; ordinary tensors work too.
        pinned = {name: engine.empty_pinned(tensor.shape, tensor.dtype).copy_(tensor) for name, tensor in state.items()}

        wrote, synced, read = [], [], []
        for number in range(arguments.rounds):
            path = Path(directory) / f"model-{number}.bin"
            begin = time.perf_counter()
            for future in [engine.write(tensor, path, offsets[name]) for name, tensor in pinned.items()]:
                future.result()
            wrote.append(gigabytes / (time.perf_counter() - begin))

            begin = time.perf_counter()
            engine.fsync(path).result()
            synced.append(time.perf_counter() - begin)

            for tensor in pinned.values():
                tensor.zero_()
            begin = time.perf_counter()
            for future in [engine.read(tensor, path, offsets[name]) for name, tensor in pinned.items()]:
                future.result()
            read.append(gigabytes / (time.perf_counter() - begin))

            wrong = [name for name, tensor in state.items() if not torch.equal(tensor, pinned[name])]
            if wrong:
                raise SystemExit(f"restored differently: {', '.join(wrong)}")
            path.unlink()
        print(f"wrote    {spread(wrote)} GB/s")
        print(f"fsync    {spread(synced)} s")
        print(f"read     {spread(read)} GB/s")
        model.load_state_dict(pinned)
        print(f"restored {len(state)} tensors, every byte the same")

        stats = engine.stats()
        for kind in ("zero_copy", "staged", "buffered"):
            print(f"{kind:9} {getattr(stats, f'bytes_{kind}') / 1e9:6.3f} GB")


if __name__ == "__main__":
    main()
