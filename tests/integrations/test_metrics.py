"""Numbers of reports get to TensorBoard, Weights & Biases, loggers of Lightning and transformers' Trainer."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.integrations.metrics import log_metrics, log_with_trainer
from deepnvme.integrations.transformers import offload_training
from deepnvme.telemetry.report_figures import ReportFigures

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of packages that it imports
    import transformers


@dataclass(frozen=True)
class Report(ReportFigures):
    seconds: float
    step: int


class Writer:
    """Notes what its methods are called with."""

    def __init__(self) -> None:
        self.got: list[tuple[Any, ...]] = []

    def note(self, *given: Any, **_: Any) -> None:
        self.got.append(given)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("add_scalar", [("io_seconds", 1.5, 7), ("io_step", 3, 7)]),  # TensorBoard
        ("log_metrics", [({"io_seconds": 1.5, "io_step": 3}, 7)]),  # Lightning
        ("log", [({"io_seconds": 1.5, "io_step": 3, "io_global_step": 7},)]),  # wandb, whose own step counts calls
    ],
)
def test_each_kind_of_logger_gets_the_numbers_and_the_step(method: str, expected: list[Any]) -> None:
    kind = type("Logger", (Writer,), {method: Writer.note})
    writer = kind()
    log_metrics(writer, 7, Report(1.5, 3), prefix="io_")
    assert writer.got == expected


def test_what_cannot_log_is_refused() -> None:
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
