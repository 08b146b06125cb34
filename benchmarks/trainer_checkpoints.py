"""How long a checkpoint of 1 GB holds a training of Lightning and of transformers' Trainer, against what these do by themselves.

    python benchmarks/trainer_checkpoints.py --dir /mnt/nvme --kills 200

Every contender trains the same Llama for three steps, with a checkpoint after each, in a process of its own. The first save also
pins memory; the others count. A save is timed from the end of the step to the return of the trainer's save; then the benchmark
waits until the checkpoint is there, the page cache is written back and the drive is idle. fsync is in no contender's time; only
ours call it. With ``--kills``, small trainings that save after every step are killed by SIGKILL and resumed: each checkpoint that
is there must be whole, and there must be one. Needs lightning, transformers, accelerate and safetensors.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from deepnvme.tools.tune.folder import settle

CONTENDERS = {
    "Lightning": ("default", "AsyncCheckpointIO", "NVMeCheckpointIO"),
    "Trainer": ("default", "async_checkpoints"),
}
STEPS = 3
ELEMENTS = 1 << 20
"""Of the only parameter of the model that is trained until it is killed; its optimizer has as many."""


def llama(options: argparse.Namespace) -> Any:
    """Return a Llama which, with two states of AdamW for each parameter, takes about as many bytes as wanted."""
    import transformers

    width = 1024 if options.gb >= 0.5 else 64
    layers = max(round(options.gb * 1e9 / 12 / (16 * width * width)), 1)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **sizes))


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


class Timed:
    """Times saves, and waits after each until nothing is under way."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.held = directory, list[float]()

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def end(self, checkpoint: Path) -> None:
        self.held.append(time.perf_counter() - self._begun)
        while not checkpoint.exists():
            time.sleep(0.01)
        os.sync()
        settle(self.directory)


def train_by_lightning(name: str, model: Any, directory: Path, steps: int, timed: Timed | None, killed: bool = False) -> None:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from deepnvme.integrations.lightning import NVMeCheckpointIO

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return optimizer_of(model, killed)

        def on_train_batch_end(self, *_: Any) -> None:
            if timed is not None:
                path = directory / f"{self.global_step}.ckpt"
                timed.begin()
                self.trainer.save_checkpoint(path)
                timed.end(path)

    plugins = {"default": [], "AsyncCheckpointIO": [AsyncCheckpointIO()], "NVMeCheckpointIO": [NVMeCheckpointIO()]}[name]
    kept = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1 if killed else 10**9)
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, callbacks=[kept], enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=directory, plugins=plugins,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(batches(), batch_size=1)
    last = max(directory.glob("*.ckpt"), key=step_of, default=None) if killed else None
    trainer.fit(Module(), loader, ckpt_path=last, weights_only=False)


def train_by_trainer(name: str, model: Any, directory: Path, steps: int, timed: Timed | None, killed: bool = False) -> None:
    import transformers

    from deepnvme.integrations.transformers import async_checkpoints

    class Timing(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if timed is not None:
                timed.begin()

        def on_save(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            if timed is not None:
                timed.end(directory / f"checkpoint-{state.global_step}")

    arguments = transformers.TrainingArguments(
        str(directory), max_steps=steps, save_strategy="steps", save_steps=1, save_total_limit=1, use_cpu=True, report_to=[],
        logging_strategy="no", disable_tqdm=True, per_device_train_batch_size=1, max_grad_norm=0,
    )  # fmt: skip
    optimizer = optimizer_of(model, killed)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=batches(), callbacks=[Timing()], optimizers=(optimizer, constant)
    )
    if name == "async_checkpoints":
        async_checkpoints(trainer)
    trainer.train(resume_from_checkpoint=killed and any(directory.glob("checkpoint-*")))


TRAIN = {"Lightning": train_by_lightning, "Trainer": train_by_trainer}


def batches() -> list[dict[str, torch.Tensor]]:
    row = torch.arange(8)
    return [{"input_ids": row, "labels": row}] * 1000


def optimizer_of(model: torch.nn.Module, killed: bool) -> torch.optim.Optimizer:
    if killed:
        return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    return torch.optim.AdamW(model.parameters(), fused=True)


def run(options: argparse.Namespace) -> None:
    """Train with one contender, and print how long each save held the training."""
    framework, name = options.worker.split()
    timed = Timed(options.dir)
    TRAIN[framework](name, llama(options), options.dir, STEPS, timed)
    nbytes = sum(path.stat().st_size for path in options.dir.rglob("*") if path.is_file()) // len(
        list(options.dir.glob("*[0-9]*"))
    )
    print(json.dumps({"first": timed.held[0], "held": statistics.median(timed.held[1:]), "gb": nbytes / 1e9}))


# -- kills


def import_all() -> None:
    """Import what trainings use, once for all processes that are forked."""
    import lightning.pytorch
    import transformers

    from deepnvme.integrations import lightning as ours_of_lightning
    from deepnvme.integrations import transformers as ours_of_transformers

    _ = lightning.pytorch.Trainer, transformers.Trainer, ours_of_lightning, ours_of_transformers


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.rpartition("=" if "=" in checkpoint.stem else "-")[2])


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
    """Kill trainings, and count those that were saving by ours, and those that left no checkpoint, or one that is not whole.

    The processes are forked, since imports take longer than a process is to live. So this one uses one thread, and no engine.
    """
    import_all()
    generator = random.Random(0)
    found = {"kills": count, "during a save": 0, "not whole": 0}
    pattern = "*.ckpt" if framework == "Lightning" else "checkpoint-*"
    for number in range(count + 1):
        child = os.fork()
        if child == 0:
            try:
                TRAIN[framework](name, Filled(), directory, 10**6 if number else 1, None, killed=True)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if number:
            before = set(directory.iterdir())
            while set(directory.iterdir()) == before and os.waitpid(child, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
            time.sleep(generator.random() * 0.2)
            os.kill(child, signal.SIGKILL)
        if os.waitpid(child, 0)[1] != (signal.SIGKILL if number else 0):
            raise RuntimeError("a training ended by itself")
        checkpoints = list(directory.glob(pattern))
        broken = [each for each in checkpoints if not is_whole(each)]
        found["during a save"] += any(".deepnvme-tmp" in path.name for path in directory.rglob("*"))
        found["not whole"] += len(checkpoints) == len(broken) or bool(broken)
        for each in broken:  # as one does by hand, to train on
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="directory on the drive")
    parser.add_argument("--gb", type=float, default=1, help="size of a checkpoint")
    parser.add_argument("--rounds", type=int, default=3, help="0 measures nothing")
    parser.add_argument("--kills", type=int, default=0, help="kill trainings of each of our contenders so many times")
    parser.add_argument("--kills-of-default", type=int, default=0, help="the same for those that are compared with")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if options.worker:
        run(options)
        return 0
    ratios: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for framework, names in CONTENDERS.items():
            held = {}
            for name in names:
                with tempfile.TemporaryDirectory(dir=options.dir) as folder:
                    command = [
                        sys.executable,
                        __file__,
                        "--dir",
                        folder,
                        "--gb",
                        str(options.gb),
                        "--worker",
                        f"{framework} {name}",
                    ]
                    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
                figures = json.loads(output.splitlines()[-1])
                held[name] = figures["held"]
                print(
                    f"round {number + 1}, {framework}, {name}: { ({key: round(value, 3) for key, value in figures.items()}) }",
                    flush=True,
                )
            for name in names[1:]:
                ratios.setdefault(f"{framework}: held by {name} / by default", []).append(held[name] / held["default"])
    for what, values in ratios.items():
        print(f"{what}: {statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})")
    torch.set_num_threads(1)
    for framework, names in CONTENDERS.items():
        for name, count in ((names[-1], options.kills), (names[0], options.kills_of_default)):
            if count:
                with tempfile.TemporaryDirectory(dir=options.dir) as folder:
                    print(f"{framework}, {name}: {kills(framework, name, Path(folder), count)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
