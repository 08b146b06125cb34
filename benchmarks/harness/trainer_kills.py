"""Trainings that save after every step, and are killed and resumed: whether each checkpoint is whole, and there is one."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from harness.saving_trainings import TRAIN, step_of

ELEMENTS = 1 << 20
"""Of the only parameter of the model; its optimizer has as many."""
_LONGEST = 0.2
"""Seconds from the first change that a process makes to the directory until it is killed, at most."""


class Filled(torch.nn.Module):
    """A model whose gradients are all 1, so that the value of every element follows from the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.weight.sum()}


def filled_after(steps: int) -> tuple[float, float]:
    """Return the weight and the momentum of ``Filled`` after some steps."""
    weight, momentum = torch.zeros(()), torch.zeros(())
    for _ in range(steps):
        momentum = momentum * 0.5 + 1
        weight = weight - momentum * 0.125
    return weight.item(), momentum.item()


def is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint has the weights and states of its step. Uses torch and safetensors alone."""
    from safetensors.torch import load_file

    try:
        if checkpoint.is_dir():
            weight = load_file(checkpoint / "model.safetensors")["weight"]
            momentum = torch.load(checkpoint / "optimizer.pt")["state"][0]["momentum_buffer"]
            step = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
            torch.load(checkpoint / "rng_state.pth", weights_only=False)
            torch.load(checkpoint / "scheduler.pt")
        else:
            loaded = torch.load(checkpoint, weights_only=False)
            weight, step = loaded["state_dict"]["model.weight"], loaded["global_step"]
            momentum = loaded["optimizer_states"][0]["state"][0]["momentum_buffer"]
        expected = filled_after(step)
        return step == step_of(checkpoint) and bool((weight == expected[0]).all()) and bool((momentum == expected[1]).all())
    except Exception:  # whatever a damaged file raises
        return False


def kills(framework: str, name: str, directory: Path, count: int) -> dict[str, int]:
    """Kill trainings of a contender so many times.

    The processes are forked, since imports take longer than a process is to live. So this one uses one thread, and no engine.

    Returns:
        ``kills``; ``during_save``: those after which files were left that only our saves make; ``not_whole``: those after which
        there was no checkpoint, or one that is not whole.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _import_all()
        return _kills(framework, name, directory, count)
    finally:
        torch.set_num_threads(threads)


def _import_all() -> None:
    """Import what trainings use, once for all processes that are forked."""
    warnings.simplefilter("ignore")
    import lightning.pytorch
    import transformers

    from deepnvme.integrations import lightning as ours_of_lightning
    from deepnvme.integrations import transformers as ours_of_transformers

    _ = lightning.pytorch.Trainer, transformers.Trainer, ours_of_lightning, ours_of_transformers
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def _kills(framework: str, name: str, directory: Path, count: int) -> dict[str, int]:
    generator = random.Random(0)
    found = {"kills": count, "during_save": 0, "not_whole": 0}
    pattern = "*.ckpt" if framework == "Lightning" else "checkpoint-*"
    for number in range(count + 1):
        child = os.fork()
        if child == 0:
            _train(framework, name, directory, 10**6 if number else 1)
        if number:
            before = set(directory.iterdir())
            while set(directory.iterdir()) == before and os.waitpid(child, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
            time.sleep(generator.random() * _LONGEST)
            os.kill(child, signal.SIGKILL)
        if os.waitpid(child, 0)[1] != (signal.SIGKILL if number else 0):
            raise RuntimeError("a training ended by itself")
        checkpoints = list(directory.glob(pattern))
        broken = [each for each in checkpoints if not is_whole(each)]
        found["during_save"] += any(".deepnvme-tmp" in path.name for path in directory.rglob("*"))
        found["not_whole"] += len(checkpoints) == len(broken) or bool(broken)
        for each in broken:  # as one does by hand, to train on
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    return found


def _train(framework: str, name: str, directory: Path, steps: int) -> Any:
    """Train in a forked process, which ends then."""
    os.dup2(2, 1)  # what libraries print is not the benchmark's output
    try:
        model = Filled()
        TRAIN[framework](name, model, torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5), directory, steps)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
