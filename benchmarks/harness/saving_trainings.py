"""Trainings of Lightning and of transformers' Trainer that save checkpoints, and one of them in a process of its own:
``python -m harness.saving_trainings SETTINGS REQUESTS REPLIES``."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from deepnvme.tools.tune.folder import settle
from harness.serving import serve

STEPS = 3
"""With a checkpoint after each. The first save also pins memory; the others count."""


def batches() -> list[dict[str, torch.Tensor]]:
    row = torch.arange(8)
    return [{"input_ids": row, "labels": row}] * 1000


def train_by_lightning(
    name: str, model: Any, optimizer: torch.optim.Optimizer, directory: Path, steps: int, times: SaveTimes | None = None
) -> None:
    """Train with one of Lightning's contenders: ``default``, ``AsyncCheckpointIO`` or ``NVMeCheckpointIO``.

    Args:
        name: The contender.
        model: What is trained.
        optimizer: Its optimizer.
        directory: Where checkpoints are. Without ``times`` the training goes on from the last one.
        steps: How many steps are trained.
        times: Times the saves; None rotates checkpoints as ``ModelCheckpoint`` does by default.
    """
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
            return optimizer

        def on_train_batch_end(self, *_: Any) -> None:
            if times is not None:
                path = directory / f"{self.global_step}.ckpt"
                times.begin()
                self.trainer.save_checkpoint(path)
                times.end(path)

    plugins = {"default": [], "AsyncCheckpointIO": [AsyncCheckpointIO()], "NVMeCheckpointIO": [NVMeCheckpointIO()]}[name]
    kept = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1 if times is None else 10**9)
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, callbacks=[kept], enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=directory, plugins=plugins,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(batches(), batch_size=1)
    last = max(directory.glob("*.ckpt"), key=step_of, default=None)
    trainer.fit(Module(), loader, ckpt_path=last, weights_only=False)


def train_by_trainer(
    name: str, model: Any, optimizer: torch.optim.Optimizer, directory: Path, steps: int, times: SaveTimes | None = None
) -> None:
    """Train with one of Trainer's contenders: ``default`` or ``async_checkpoints``. Arguments as of ``train_by_lightning``."""
    import transformers

    from deepnvme.integrations.transformers import async_checkpoints

    class Timing(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if times is not None:
                times.begin()

        def on_save(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            if times is not None:
                times.end(directory / f"checkpoint-{state.global_step}")

    arguments = transformers.TrainingArguments(
        str(directory), max_steps=steps, save_strategy="steps", save_steps=1, save_total_limit=1, use_cpu=True, report_to=[],
        logging_strategy="no", disable_tqdm=True, per_device_train_batch_size=1, max_grad_norm=0,
    )  # fmt: skip
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=batches(), callbacks=[Timing()], optimizers=(optimizer, constant)
    )
    if name == "async_checkpoints":
        async_checkpoints(trainer)
    trainer.train(resume_from_checkpoint=any(directory.glob("checkpoint-*")))


TRAIN = {"Lightning": train_by_lightning, "Trainer": train_by_trainer}


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint's name tells: ``step=3.ckpt``, ``3.ckpt`` or ``checkpoint-3``."""
    return int(checkpoint.stem.replace("=", "-").rpartition("-")[2])


class SaveTimes:
    """Times saves, and waits after each until nothing is under way."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.seconds = directory, list[float]()

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def end(self, checkpoint: Path) -> None:
        self.seconds.append(time.perf_counter() - self._begun)
        while not checkpoint.exists():
            time.sleep(0.01)
        os.sync()
        settle(self.directory)


class Training:
    """A training of a Llama which, with two states of AdamW for each parameter, takes about ``gb`` GB."""

    def __init__(self, *, framework: str, name: str, directory: str, gb: float) -> None:
        import transformers

        self._framework, self._name, self._directory = framework, name, Path(directory)
        width = 1024 if gb >= 0.5 else 64
        layers = max(round(gb * 1e9 / 12 / (16 * width * width)), 1)
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "num_attention_heads": 4}
        self._model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **sizes))

    def describe(self) -> dict[str, Any]:
        return {}

    def train(self) -> dict[str, Any]:
        """Return the seconds that each save held the training, the first one apart, and the bytes of a checkpoint."""
        times = SaveTimes(self._directory)
        optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        TRAIN[self._framework](self._name, self._model, optimizer, self._directory, STEPS, times)
        checkpoints = list(self._directory.glob("*[0-9]*"))
        nbytes = sum(path.stat().st_size for path in self._directory.rglob("*") if path.is_file()) // len(checkpoints)
        return {"seconds": statistics.median(times.seconds[1:]), "first_seconds": times.seconds[0], "bytes": nbytes}


def main() -> None:
    settings, request_fd, reply_fd = sys.argv[1:]
    serve(lambda: Training(**json.loads(settings)), ("train",), int(request_fd), int(reply_fd))


if __name__ == "__main__":
    main()
