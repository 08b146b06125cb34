"""accelerate's offloads, undone and made again in any order, with reads that fail: the same output, and the weights again."""

from __future__ import annotations

import errno
import importlib.util
import random as randoms
from pathlib import Path

import torch
from torch import nn

from deepnvme.streaming import streaming_of
from deepnvme.swap import TensorStore

from ....support.engines import transfers_through
from .. import Leaked, Wrong, streams

SHORT, SECONDS = 3, 90


def requires() -> str | None:
    return None if importlib.util.find_spec("accelerate") else "needs accelerate"


def attack(random: randoms.Random, directory: Path) -> None:
    import accelerate

    from deepnvme.integrations import accelerate as integration

    integration.enable(memory_budget=random.choice([0, 3 * streams.BLOCK_BYTES]), prefetch=random.randint(0, 2))
    try:
        model = streams.model()
        for block in range(streams.BLOCKS):
            model[block].bias.requires_grad_(random.random() < 0.5)
        own = {name: (weight.detach().clone(), weight.requires_grad) for name, weight in model.named_parameters()}
        wanted = streams.output(model)
        for number in range(random.randint(2, 4)):
            folder = directory / str(random.choice([0, number]))  # the same store again, or another
            kind = random.choice(["disk", "disk", "dispatch", "cpu"])
            if kind == "disk":
                accelerate.disk_offload(model, folder)
            elif kind == "dispatch":
                places = {str(block): random.choice(["cpu", "disk"]) for block in range(streams.BLOCKS)}
                accelerate.dispatch_model(model, {**places, "0": "disk"}, offload_dir=folder)
            else:
                accelerate.cpu_offload(model)
            for _ in range(random.randint(0, 2)):
                streams.check_output(model, wanted)
            if kind != "cpu" and random.random() < 0.7:
                _with_faults(random, model, wanted, folder)
            if random.random() < 0.3:
                hook = accelerate.hooks.AlignDevicesHook(io_same_device=True)
                accelerate.hooks.add_hook_to_module(model, hook, append=True)
                streams.check_output(model, wanted)
            accelerate.hooks.remove_hook_from_submodules(model)
            _check_undone(model, own, wanted, folder / integration.STORE)
    finally:
        integration.disable()


def _with_faults(random: randoms.Random, model: nn.Module, wanted: torch.Tensor, folder: Path) -> None:
    from accelerate.hooks import remove_hook_from_submodules

    error = random.choice([errno.EIO, errno.ENODEV])
    with transfers_through(streams.faulty_engine(random, error)):
        for _ in range(random.randint(1, 4)):
            try:
                streams.check_output(model, wanted)
                if random.random() < 0.3:
                    remove_hook_from_submodules(model)
                    return
            except OSError as raised:
                if raised.errno != error or not str(raised.filename).startswith(str(folder)):
                    raise Wrong(f"{raised!r} with filename {raised.filename!r} was raised for errno {error}") from raised
    streams.check_output(model, wanted)


def _check_undone(model: nn.Module, own: dict[str, tuple[torch.Tensor, bool]], wanted: torch.Tensor, store: Path) -> None:
    if streaming_of(model) is not None or hasattr(model, "_hf_hook") or hasattr(model, "streaming"):
        raise Wrong("an offload that was undone is there still")
    for name, weight in model.named_parameters():
        values, requires_grad = own[name]
        if type(weight) is not nn.Parameter or weight.requires_grad != requires_grad or not torch.equal(weight, values):
            raise Wrong(f"{name} is not what it was before the offload")
    streams.check_output(model, wanted)
    if store.exists():
        try:
            TensorStore(store, persist=True).close()
        except OSError as error:
            raise Leaked(f"the store of an offload that was undone is open still: {error}") from error
