"""Numbers of reports get to TensorBoard, Weights & Biases, transformers' Trainer and Lightning."""

from __future__ import annotations

import csv
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.integrations.metrics import lightning_callback, log_metrics, log_with_trainer
from deepnvme.integrations.transformers import offload_training
from deepnvme.telemetry.report_figures import ReportFigures

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of packages that it imports
    import transformers


@dataclass(frozen=True)
class Report(ReportFigures):
    seconds: float
    step: int


class TestWriters:
    """Objects with the methods of the loggers that are meant."""

    def test_a_summary_writer_gets_each_number_with_its_step(self) -> None:
        class Writer:
            def __init__(self) -> None:
                self.got: list[Any] = []

            def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
                self.got.append((tag, scalar_value, global_step))

        writer = Writer()
        log_metrics(writer, 7, Report(1.5, 3))
        assert writer.got == [("deepnvme/seconds", 1.5, 7), ("deepnvme/step", 3, 7)]

    def test_a_logger_of_lightning_gets_them_together(self) -> None:
        class Logger:
            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
                self.got = metrics, step

        logger = Logger()
        log_metrics(logger, 7, Report(1.5, 3), prefix="io_")
        assert logger.got == ({"io_seconds": 1.5, "io_step": 3}, 7)

    def test_wandb_gets_the_step_as_a_number_beside_those_of_the_report_since_it_counts_calls(self) -> None:
        class Run:
            def log(self, data: dict[str, float], step: int | None = None) -> None:
                self.got = data, step

        run = Run()
        log_metrics(run, 7, Report(1.5, 3))
        assert run.got == ({"deepnvme/seconds": 1.5, "deepnvme/step": 3, "deepnvme/global_step": 7}, None)

    def test_what_cannot_log_is_refused(self) -> None:
        with pytest.raises(TypeError, match="add_scalar, log_metrics or log; list has none"):
            log_metrics([], 7, Report(1.5, 3))


def test_tensorboard_reads_what_its_writer_was_given(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensorboard's own
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(tmp_path)) as writer:
            for step in (1, 2):
                log_metrics(writer, step, Report(step / 2, step))
        events = tensorboard.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("deepnvme/seconds")] == [(1, 0.5), (2, 1.0)]


class Kept(transformers.TrainerCallback):  # type: ignore[misc]
    """Stands for those that send logs away, as with ``report_to``."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.logs.append(dict(logs))


def test_a_trainer_sends_the_numbers_away_with_its_logs(drive: Path, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    kept = Kept()
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in torch.randint(32, (24, 8))]
    model = transformers.AutoModelForCausalLM.from_config(config)
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:2], callbacks=[kept])
    training = offload_training(trainer, drive / "offloaded")
    log_with_trainer(trainer, training.report)
    trainer.train()
    steps = [log for log in kept.logs if "loss" in log]
    assert [log["deepnvme/step"] for log in steps] == [1, 2, 3]
    assert all(log["deepnvme/bytes_written"] > 0 and log["deepnvme/terabytes_per_day"] > 0 for log in steps)
    others = [log for log in kept.logs if "loss" not in log]
    assert others
    assert not any(name.startswith("deepnvme/") for log in others for name in log)
    training.close()


class TestLightning:
    @pytest.mark.parametrize("every", [0, -1])
    def test_logging_every_so_many_steps_needs_a_number(self, every: int) -> None:
        with pytest.raises(ValueError, match=f"every must be at least 1, got {every}"):
            lightning_callback(lambda: Report(1, 1), every=every)

    def test_without_lightning_it_says_what_to_install(self) -> None:
        code = (
            "import sys; sys.modules['lightning.pytorch'] = sys.modules['pytorch_lightning'] = None\n"
            "from deepnvme.integrations.metrics import lightning_callback\n"
            "try: lightning_callback(lambda: None)\n"
            "except ImportError as error: print(error)"
        )
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert "pip install lightning" in ran.stdout

    def test_its_loggers_get_the_numbers_of_optimizer_steps(self, drive: Path, tmp_path: Path) -> None:
        lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")
        from lightning.pytorch.loggers import CSVLogger

        class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(8, 8)

            def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
                return self.layer(batch).square().mean()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                self.offloaded = deepnvme.OffloadedOptimizer(
                    self.parameters(), torch.optim.AdamW, nvme_path=drive / "states", lr=1e-3
                )
                return self.offloaded

        module = Module()
        logger = CSVLogger(str(tmp_path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about workers of loaders, and the like
            trainer = lightning.Trainer(
                max_steps=4, accelerator="cpu", logger=logger, enable_progress_bar=False, enable_model_summary=False,
                enable_checkpointing=False, accumulate_grad_batches=2,
                callbacks=[lightning_callback(lambda: module.offloaded.report(), every=2)],
            )  # fmt: skip
            trainer.fit(module, torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4))
        with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
            logged = list(csv.DictReader(file))
        assert [(row["step"], row["deepnvme/step"]) for row in logged] == [("2", "2"), ("4", "4")]
        module.offloaded.close()
